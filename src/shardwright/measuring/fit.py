"""Fits the formulas of the cost model to measured points: least squares of logarithms, so that errors are relative."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.collectives import SATURATION
from shardwright.cost.matmuls import TILE_COLUMNS, TILE_ROWS
from shardwright.measuring.points import AttentionPoint, CopyPoint, KernelPoint, MatmulPoint, MessagePoint
from shardwright.units import MiB

Floats = NDArray[np.float64]
STEPS = np.concatenate([[0.0], np.geomspace(0.01, 1024, 41)])
"""Values that are tried of sizes at which half of a rate is reached."""


@dataclass(frozen=True)
class MatmulFit:
    """`flops_per_s`: by precision, of large matmuls; `ramp_k`, `partial_wave`: see `cost.matmuls.Matmul.seconds`.
    `error`: mean of the absolute relative errors."""

    flops_per_s: dict[str, float]
    ramp_k: float
    partial_wave: float
    error: float


def fit_matmuls(points: Sequence[MatmulPoint], multiprocessors: int = 1) -> MatmulFit:
    """Of all precisions together; the rates alone depend on the precision."""
    rate = np.array([each.flops / each.seconds for each in points])
    k = np.array([each.k for each in points], dtype=float)
    rows = np.maximum(np.array([each.m for each in points]) / TILE_ROWS, 0.25)
    columns = np.maximum(np.array([each.n for each in points]) / TILE_COLUMNS, 0.25)
    waves = rows * columns / multiprocessors
    names = sorted({each.precision for each in points})
    which = np.array([names.index(each.precision) for each in points])
    best: tuple[float, float, float, Floats] | None = None
    for ramp in STEPS:
        for partial in STEPS[STEPS < 16]:
            left = np.log(rate) - np.log(waves / (waves + partial) * (k / (k + ramp)))
            peaks = np.array([left[which == each].mean() for each in range(len(names))])
            loss = float(((left - peaks[which]) ** 2).sum())
            if best is None or loss < best[0]:
                best = loss, float(ramp), float(partial), peaks
    assert best is not None
    _, ramp_k, partial_wave, peaks = best
    share = waves / (waves + partial_wave) * (k / (k + ramp_k))
    error = _error(np.exp(peaks[which]) * share, rate)
    return MatmulFit(dict(zip(names, np.exp(peaks).tolist(), strict=True)), ramp_k, partial_wave, error)


@dataclass(frozen=True)
class AttentionFit:
    """`share`: of the rate of matmuls, forward; `width`, `length`: at which half of it is reached; `backward`: time
    relative to the forward pass."""

    share: float
    width: float
    length: float
    backward: float
    error: float


def fit_attention(points: Sequence[AttentionPoint], matmul_flops_per_s: float) -> AttentionFit:
    """Both passes together."""
    backward = float(np.median([each.backward_s / each.forward_s for each in points]))
    seconds = np.array([each.forward_s + each.backward_s for each in points])
    rate = np.array([each.flops for each in points]) * (1 + backward) / seconds / matmul_flops_per_s
    c, s = (np.array([getattr(each, name) for each in points], dtype=float) for name in ("width", "length"))
    best = (np.inf, 0.0, 0.0, 0.0)
    for width in STEPS:
        for length in STEPS:
            left = np.log(rate) - np.log(c / (c + width) * (s / (s + length)))
            loss = float(((left - left.mean()) ** 2).sum())
            if loss < best[0]:
                best = loss, float(width), float(length), float(np.exp(left.mean()))
    _, width, length, share = best
    error = _error(share * c / (c + width) * (s / (s + length)), rate)
    return AttentionFit(share, width, length, backward, error)


def copy_bytes_per_s(points: Sequence[CopyPoint]) -> float:
    """Read and written, of the largest copy."""
    largest = max(points, key=lambda each: each.n_bytes)
    return 2 * largest.n_bytes / largest.seconds


def kernel_bytes(points: Iterable[KernelPoint], bytes_per_s: float) -> dict[str, float]:
    """Bytes that each operation seems to move for an element of 16 bits at that bandwidth; mean of the logarithms over
    sizes."""
    found: dict[str, list[float]] = {}
    for each in points:
        moved = each.seconds * bytes_per_s / (each.elements * each.passes * each.widths)
        found.setdefault(each.name, []).append(moved)
    return {name: float(np.exp(np.mean(np.log(values)))) for name, values in found.items()}


@dataclass(frozen=True)
class LinkFit:
    """As `cost.hardware.Link`."""

    bytes_per_s: float
    latency_s: float
    start_s: float
    half_bytes: float
    error: float


def fit_link(points: Sequence[MessagePoint]) -> LinkFit:
    """start + messages latency + (V + H^q V^(1-q)) / B over groups in which all ranks have the same link; V and the
    number of messages as `cost.collectives` counts them. Linear in its three times for each H; none is negative."""
    n = np.array([each.ranks for each in points], dtype=float)
    buffer = np.array([each.n_bytes for each in points], dtype=float)
    twice = np.array([each.collective == "all_reduce" for each in points])
    one = np.array([each.collective == "point_to_point" for each in points])
    messages = np.where(one, 1.0, (n - 1) * np.where(twice, 2, 1))
    sent = np.where(one, buffer, buffer * (n - 1) / n * np.where(twice, 2, 1))
    seconds = np.array([each.seconds for each in points])
    best: tuple[float, float, Floats, Floats] | None = None
    for half in np.concatenate([[0.0], np.geomspace(1 / 1024, 16, 29)]) * MiB:
        columns = np.stack([messages, sent + half**SATURATION * sent ** (1 - SATURATION), np.ones_like(sent)], axis=1)
        # Relative errors, of which large ones count little: a message that was interrupted is no measurement.
        found = not_negative(columns / seconds[:, None], np.ones_like(seconds))
        made = columns @ found
        loss = float(np.abs(np.log(np.maximum(made, 1e-12) / seconds)).sum())
        if found[1] > 0 and (best is None or loss < best[0]):
            best = loss, float(half), found, made
    assert best is not None
    _, half, (latency, per_byte, start), made = best
    return LinkFit(1 / per_byte, max(latency, 1e-9), start, half, _error(made, seconds))


def not_negative(columns: Floats, values: Floats) -> Floats:
    """Least squares with coefficients that are not negative; few columns, so every subset of them is tried."""
    best, least = np.zeros(columns.shape[1]), np.inf
    for count in range(1, columns.shape[1] + 1):
        for those in combinations(range(columns.shape[1]), count):
            found, *_ = np.linalg.lstsq(columns[:, those], values, rcond=None)
            loss = float(((columns[:, those] @ found - values) ** 2).sum())
            if (found >= 0).all() and loss < least:
                least, best = loss, np.zeros(columns.shape[1])
                best[list(those)] = found
    return best


def _error(made: Floats, measured: Floats) -> float:
    return float(np.abs(made / measured - 1).mean())
