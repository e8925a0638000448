"""`shardwright merge`: the weighted mean of the weights of several checkpoints of one model.

    merged = share_1 W_1 + ... + share_n W_n,    share_1 + ... + share_n = 1

With equal shares it is the mean of the last checkpoints of a run (LAWA, Kaddour, arXiv 2209.14981; stochastic weight
averaging, Izmailov et al., arXiv 1803.05407). With two sources and other shares it is a point on the line through both.
Sums are in float64; each element is rounded once, to its type in the first source.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shardwright.data.tokenizer import tokenizer_difference
from shardwright.model.saved import differences
from shardwright.runs.folder import CHECKPOINTS, published
from shardwright.system.errors import CheckpointError, InputError
from shardwright.system.units import counted
from shardwright.training.exporting import write_tokenizer
from shardwright.training.importing import write_weights_folder
from shardwright.training.sources import tokenizer_file
from shardwright.training.weights import Weights, open_weights

ROUNDING = 1e-9
"""Largest distance of the sum of the shares from 1; shares are typed in decimal."""


class MergedWeights:
    """The weighted mean of weights of the same model, computed when it is read. Names, shapes, types and the model come
    from the first source."""

    def __init__(self, sources: Sequence[Weights], shares: Sequence[float]) -> None:
        first = sources[0]
        self.sources, self.shares = sources, shares
        self.path, self.spec, self.shapes, self.dtypes = first.path, first.spec, first.shapes, first.dtypes
        self.left_out = {name: reason for source in sources for name, reason in source.left_out.items()}

    def read(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Return a box of the mean of a parameter. Raises as the sources do."""
        total = torch.zeros(tuple(shape), dtype=torch.float64)
        for share, source in zip(self.shares, self.sources, strict=True):
            total.add_(source.read(name, offsets, shape), alpha=share)
        return total.to(getattr(torch, self.dtypes[name]))

    def describe(self) -> str:
        """Return a description in one line."""
        return f"the mean of {len(self.sources)} checkpoints, from {self.path}"


@dataclass(frozen=True)
class MergeResult:
    """The merged weights, and remarks for the user."""

    weights: MergedWeights
    remarks: tuple[str, ...]


def merge(
    sources: Sequence[str | Path], out: str | Path, shares: Sequence[float] | None = None, last: int | None = None
) -> MergeResult:
    """Write the weighted mean of weights to the new folder `out`, in the format of `shardwright import`. In memory at
    a time: one block of at most 256 MiB of one source, its sum in float64 and the result.

    `sources`: checkpoints, runs (the newest checkpoint), or folders of weights. `last`: take the last N checkpoints of
    the only source, which is a run. `shares`: one for each source, which add up to 1; default: equal. Raises InputError
    with every problem: fewer than two sources, weights with adapters (the mean of B A is not the product of the means),
    other models or tokenizers, shares that do not fit, damaged weights.
    """
    paths = _last_checkpoints(sources, last) if last is not None else list(sources)
    if len(paths) < 2:
        raise InputError(f"{len(paths)} checkpoint to merge; name two or more, or a run with --last N")
    opened = [open_weights(path) for path in paths]
    if adapted := [str(weights.path) for weights in opened if weights.spec.lora is not None]:
        raise InputError(f"adapters have no mean: {', '.join(adapted)}; export each with --merge first")
    given = [1 / len(paths)] * len(paths) if shares is None else list(shares)
    if problems := [*_share_problems(given, len(paths)), *_misfits(opened)]:
        raise InputError(*problems)
    merged = MergedWeights(opened, given)
    remarks: list[str] = []

    def add_tokenizer(folder: Path) -> dict[str, int | list[int]]:
        with_tokenizer = (weights.path for weights in opened if tokenizer_file(weights.path) is not None)
        notes, ids = write_tokenizer(next(with_tokenizer, merged.path), folder, None, merged.spec.max_seq_len)
        remarks.extend(notes)
        return ids

    names = " ".join(map(str, sources)) + ("" if last is None else f" --last {last}")
    write_weights_folder(merged, names, Path(out), add_tokenizer, verb="merge")
    return MergeResult(merged, tuple(remarks))


def _last_checkpoints(sources: Sequence[str | Path], last: int) -> list[Path]:
    if len(sources) != 1:
        raise InputError(f"--last {last} takes the checkpoints of one run, and {len(sources)} sources are named")
    saved = published(Path(sources[0]) / CHECKPOINTS)
    if not 2 <= last <= len(saved):
        valid = ", ".join(map(str, range(2, len(saved) + 1))) or "none, as two or more are needed"
        raise CheckpointError(
            f"--last {last}: {sources[0]} has {counted(len(saved), 'checkpoint')}; valid: {valid} "
            f"(checkpoint.keep_last sets how many a run keeps)"
        )
    return saved[-last:]


def _share_problems(shares: Sequence[float], n_sources: int) -> Iterator[str]:
    text = ",".join(f"{share:.12g}" for share in shares)
    if len(shares) != n_sources:
        yield f"--shares {text}: {counted(len(shares), 'share')} for {n_sources} checkpoints; give one for each"
    elif not all(map(math.isfinite, shares)):
        yield f"--shares {text}: a share is a finite number"
    elif abs(math.fsum(shares) - 1) > ROUNDING:
        yield f"--shares {text}: they add up to {math.fsum(shares):.12g}; they have to add up to 1"


def _misfits(opened: Sequence[Weights]) -> Iterator[str]:
    """Yield how the weights differ from the first in model, parameters or tokenizer."""
    first = opened[0]
    ours = tokenizer_file(first.path)
    for other in opened[1:]:
        changed = [f"{key}={theirs!r} and {wanted!r}" for key, wanted, theirs in differences(first.spec, other.spec)]
        if changed:
            yield f"{other.path} is of another model than {first.path}: {', '.join(changed)}"
        elif first.shapes != other.shapes:
            odd = sorted(first.shapes.keys() ^ other.shapes.keys())
            yield f"{other.path} and {first.path} do not have the same parameters; one lacks {odd[0]}"
        file = tokenizer_file(other.path)
        if ours is not None and file is not None and (difference := tokenizer_difference(file, ours)):
            yield f"{other.path} has another tokenizer than {first.path} ({difference}), so token ids mean other texts"
