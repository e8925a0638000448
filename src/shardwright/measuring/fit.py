"""Fit the formulas of the cost model to measured points by least squares of logarithms, so that errors are relative."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, product

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.collectives import SATURATION
from shardwright.cost.matmuls import TILE_COLUMNS, TILE_ROWS
from shardwright.measuring.points import AttentionPoint, CachedPoint, CopyPoint, KernelPoint, MatmulPoint, MessagePoint
from shardwright.system.units import MiB

Floats = NDArray[np.float64]
STEPS = np.concatenate([[0.0], np.geomspace(0.01, 1024, 41)])
"""Candidate values for sizes at which half of a rate is reached."""


@dataclass(frozen=True)
class MatmulFit:
    """`flops_per_s`: by precision, of large matmuls; `ramp_k`, `partial_wave`: see `cost.matmuls.Matmul.seconds`.
    `error`: mean of the absolute relative errors."""

    flops_per_s: dict[str, float]
    ramp_k: float
    partial_wave: float
    error: float

    def share(self, shapes: Sequence[tuple[int, int, int]]) -> Floats:
        """Return the fraction of `flops_per_s` that is reached, by shape (m, k, n), on one multiprocessor."""
        m, k, n = np.array(shapes, dtype=float).T
        return _share(m, k, n, self.ramp_k, self.partial_wave)


def _share(m: Floats, k: Floats, n: Floats, ramp_k: float, partial_wave: float) -> Floats:
    """Return w / (w + partial_wave) k / (k + ramp_k), with w the tiles of the result, at least a quarter a side."""
    tiles = np.maximum(m / TILE_ROWS, 0.25) * np.maximum(n / TILE_COLUMNS, 0.25)
    return np.asarray(tiles / (tiles + partial_wave) * (k / (k + ramp_k)))


def fit_matmuls(points: Sequence[MatmulPoint]) -> MatmulFit:
    """Fit the dependence on shape, and its error, to the points of the first precision, which has the most points. The
    rates of the other precisions are means over their points."""
    names = list(dict.fromkeys(point.precision for point in points))
    which = np.array([names.index(point.precision) for point in points])
    rate = np.array([point.flops / point.seconds for point in points])
    m, k, n = np.array([(point.m, point.k, point.n) for point in points], dtype=float).T

    def loss(shape: tuple[float, float]) -> float:
        left = np.log(rate / _share(m, k, n, *shape))[which == 0]
        return float(((left - left.mean()) ** 2).sum())

    ramp_k, partial_wave = min(product(STEPS.tolist(), STEPS[STEPS < 16].tolist()), key=loss)
    reached = _share(m, k, n, ramp_k, partial_wave)
    peaks = [float(np.exp(np.log(rate / reached)[which == at].mean())) for at in range(len(names))]
    error = _error((peaks[0] * reached)[which == 0], rate[which == 0])
    return MatmulFit(dict(zip(names, peaks, strict=True)), ramp_k, partial_wave, error)


def fit_weights(points: Sequence[MatmulPoint], large: MatmulFit) -> tuple[float, float, float]:
    """Fit the weight-reading rate of matmuls of few tokens, as in `serving.host.matmul_s`.

    Returns bytes/s at which matmuls of one token read their weights, bytes/s at which matmuls of several tokens read
    them before multiplying, and the mean absolute relative error of the times with several tokens.
    """
    n_bytes = np.array([4.0 * point.k * point.n for point in points])
    seconds = np.array([point.seconds for point in points])
    alone = np.array([point.m == 1 for point in points])
    rates = np.array([large.flops_per_s[point.precision] for point in points])
    multiplying = np.array([point.flops for point in points]) / (rates * large.share([(p.m, p.k, p.n) for p in points]))
    row = float(np.exp(np.log(n_bytes / seconds)[alone].mean()))
    reading = n_bytes / seconds  # relative errors: 1 = reading x + multiplying / seconds
    rest = 1 - multiplying / seconds
    per_byte = float((reading * rest)[~alone].sum() / (reading**2)[~alone].sum())
    if per_byte <= 0:  # on this machine reading takes no time in addition to multiplying
        per_byte = 1e-6 / row
    error = _error(n_bytes[~alone] * per_byte + multiplying[~alone], seconds[~alone])
    return row, 1 / per_byte, error


def fit_cached(points: Sequence[CachedPoint]) -> tuple[float, float, float]:
    """Return the start-up seconds of one head of one sequence, the FLOP/s of its attention to the cache, and the mean
    absolute relative error."""
    seconds = np.array([point.seconds for point in points])
    heads = np.array([float(point.sequences * point.heads) for point in points])
    columns = np.stack([heads, np.array([point.flops for point in points])], axis=1)
    head_s, per_flop = not_negative(columns / seconds[:, None], np.ones_like(seconds))
    per_flop = max(float(per_flop), 1e-15)  # on this machine it takes no time in addition to its start
    return float(head_s), 1 / per_flop, _error(columns @ np.array([head_s, per_flop]), seconds)


@dataclass(frozen=True)
class AttentionFit:
    """`share`: fraction of the matmul rate, forward. `width`, `length`: values at which half of it is reached.
    `backward`: time relative to the forward pass."""

    share: float
    width: float
    length: float
    backward: float
    error: float


def fit_attention(points: Sequence[AttentionPoint], matmul_flops_per_s: float) -> AttentionFit:
    """Fit the forward and backward passes together."""
    backward = float(np.median([point.backward_s / point.forward_s for point in points]))
    seconds = np.array([point.forward_s + point.backward_s for point in points])
    rate = np.array([point.flops for point in points]) * (1 + backward) / seconds / matmul_flops_per_s
    c, s = (np.array([getattr(point, name) for point in points], dtype=float) for name in ("width", "length"))
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
    """Return the bandwidth of the largest copy, counting bytes read and written."""
    largest = max(points, key=lambda point: point.n_bytes)
    return 2 * largest.n_bytes / largest.seconds


def kernel_bytes(points: Iterable[KernelPoint], bytes_per_s: float) -> dict[str, float]:
    """Return the bytes per 16-bit element that each operation appears to move at that bandwidth, as a geometric mean
    over sizes."""
    seconds_by_name: dict[str, list[float]] = {}
    for point in points:
        moved = point.seconds * bytes_per_s / (point.elements * point.passes * point.widths)
        seconds_by_name.setdefault(point.name, []).append(moved)
    return {name: float(np.exp(np.mean(np.log(values)))) for name, values in seconds_by_name.items()}


@dataclass(frozen=True)
class LinkFit:
    """The values of a `cost.hardware.NetworkLink`."""

    bytes_per_s: float
    latency_s: float
    start_s: float
    half_bytes: float
    relative: dict[str, float]
    error: float


def fit_link(points: Sequence[MessagePoint]) -> LinkFit:
    """Fit relative (start + messages latency + (V + H^q V^(1-q)) / B) over groups in which all ranks have the same
    link. V and the number of messages are counted as in `cost.collectives`; `relative` is a factor of each kind of
    collective, with a mean of 1."""
    n = np.array([point.ranks for point in points], dtype=float)
    buffer = np.array([point.n_bytes for point in points], dtype=float)
    twice = np.array([point.collective == "all_reduce" for point in points])
    one = np.array([point.collective == "point_to_point" for point in points])
    messages = np.where(one, 1.0, (n - 1) * np.where(twice, 2, 1))
    sent = np.where(one, buffer, buffer * (n - 1) / n * np.where(twice, 2, 1))
    seconds = np.array([point.seconds for point in points])
    names = list(dict.fromkeys(point.collective for point in points))
    which = np.array([names.index(point.collective) for point in points])
    relative = np.ones(len(names))
    for _ in range(ROUNDS):
        *_, made = _common(messages, sent, seconds / relative[which])
        ratios = np.log(seconds / made)
        means = np.array([np.median(ratios[which == at]) for at in range(len(names))])
        relative = np.exp(means - means.mean())
    half, (latency, per_byte, start), made = _common(messages, sent, seconds / relative[which])
    error = _error(made * relative[which], seconds)
    by_name = dict(zip(names, relative.tolist(), strict=True))
    return LinkFit(float(1 / per_byte), max(float(latency), 1e-9), float(start), half, by_name, error)


ROUNDS = 4
"""Number of alternations between fitting the link and the factors of kinds of collective."""


def _common(messages: Floats, sent: Floats, seconds: Floats) -> tuple[float, Floats, Floats]:
    """Return H, then latency, 1 / B and start, and the predicted seconds. For each H the problem is linear in the three
    times, which are not negative."""
    best: tuple[float, float, Floats, Floats] | None = None
    for half in np.concatenate([[0.0], np.geomspace(1 / 1024, 16, 29)]) * MiB:
        columns = np.stack([messages, sent + half**SATURATION * sent ** (1 - SATURATION), np.ones_like(sent)], axis=1)
        factors = not_negative(columns / seconds[:, None], np.ones_like(seconds))
        made = columns @ factors
        loss = float(np.abs(np.log(np.maximum(made, 1e-12) / seconds)).sum())
        if factors[1] > 0 and (best is None or loss < best[0]):
            best = loss, float(half), factors, made
    assert best is not None
    return best[1:]


def not_negative(columns: Floats, values: Floats) -> Floats:
    """Return least squares with nonnegative coefficients. There are few columns, so every subset of them is tried."""
    best, least = np.zeros(columns.shape[1]), np.inf
    for count in range(1, columns.shape[1] + 1):
        for those in combinations(range(columns.shape[1]), count):
            solution, *_ = np.linalg.lstsq(columns[:, those], values, rcond=None)
            loss = float(((columns[:, those] @ solution - values) ** 2).sum())
            if (solution >= 0).all() and loss < least:
                least, best = loss, np.zeros(columns.shape[1])
                best[list(those)] = solution
    return best


def _error(made: Floats, measured: Floats) -> float:
    return float(np.abs(made / measured - 1).mean())
