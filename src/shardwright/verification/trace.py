"""The trace of a run: numbers, and the ranks' shards of every tensor.

A rank records the start of each of its shards and a hash of its bytes; the first rank that holds a shard writes its
bytes. So replicas can be compared bit for bit, and whole tensors are assembled here, one at a time, by offsets alone,
without the code that is being verified.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from shardwright.parallel.boxes import TensorShard, local_box
from shardwright.parallel.objects import gathered
from shardwright.system.units import MiB, in_groups
from shardwright.training.checkpoint.storage import xxh3_128_of


class TracedQuantity(NamedTuple):
    """A result of a training in a step; step 0 is before the first."""

    kind: str
    """`initial`, `loss`, `grad norm`, `gradient`, `parameter`, or `evaluation`: the loss without gradients, in
    evaluation mode; `mtp loss` and `mtp evaluation`: the losses of multi-token prediction modules."""
    training: str
    """Name of the optimizer of this training, as there are two."""
    step: int


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""The start of a piece in the whole tensor, and its shape."""


class TracePiece(NamedTuple):
    """A part of a tensor that one rank holds."""

    box: Box
    digest: str
    file: int | None
    """Number of the rank's file of this quantity that has its bytes; None if another rank has written them."""


@dataclass
class RankTrace:
    """The records of one rank; the bytes are in its files."""

    scalars: dict[TracedQuantity, float] = field(default_factory=dict)
    pieces: dict[TracedQuantity, dict[str, TracePiece]] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    clip_norms: dict[str, list[float]] = field(default_factory=dict)
    """For each training of a reference the norms that its steps are clipped to."""
    ignored: list[str] = field(default_factory=list)
    """The properties of a batch that a user's trainer has not read."""


class TraceRecorder:
    """Records on a rank, into a folder that all ranks share. Every rank records the same, in the same order."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trace = RankTrace()

    def scalar(self, quantity: TracedQuantity, value: Tensor) -> None:
        """Record a number that all ranks have to agree on."""
        self.trace.scalars[quantity] = float(value)

    def tensors(self, quantity: TracedQuantity, tensors: Mapping[str, Tensor | TensorShard]) -> list[str]:
        """Record whole tensors or shards of them; a collective, in which ranks agree on who writes. Returns the names
        of the shards that this rank writes."""
        boxes: dict[str, Box] = {}
        local: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            part, offsets = local_box(tensor)
            local[name] = part.contiguous()
            boxes[name] = (tuple(offsets), tuple(part.shape))
            self.trace.shapes[name] = tuple(tensor.shape)
        everyone: list[dict[str, Box]] = gathered(boxes, dict[str, Box])
        rank = dist.get_rank()
        written = [
            name
            for name, box in boxes.items()
            if prod(box[1]) > 0 and not any(before.get(name) == box for before in everyone[:rank])
        ]
        files: dict[str, int] = {}
        for number, names in enumerate(in_groups(written, lambda name: local[name].nbytes, _FILE_BYTES)):
            save_file({name: local[name] for name in names}, _file(self.folder, quantity, rank, number))
            files |= dict.fromkeys(names, number)
        self.trace.pieces[quantity] = {
            name: TracePiece(box, xxh3_128_of(local[name]), files.get(name)) for name, box in boxes.items()
        }
        return written


_FILE_BYTES = 64 * MiB
"""Bytes of tensors that are saved together: saving copies them, and a model near the machine's memory has no room."""


def _file(folder: Path, quantity: TracedQuantity, rank: int, number: int) -> Path:
    return folder / f"{'-'.join(map(str, quantity)).replace(' ', '-')}-{rank}-{number}.safetensors"


class Trace:
    """All ranks' records of one run."""

    def __init__(self, folder: Path, ranks: list[RankTrace]) -> None:
        self.folder = folder
        self.ranks = ranks
        self.scalars = ranks[0].scalars
        self.quantities = list(ranks[0].pieces)
        self._files: dict[tuple[TracedQuantity, int, int], Any] = {}

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name and shape of every whole tensor."""
        return {name: shape for rank in self.ranks for name, shape in rank.shapes.items()}

    def tensor(self, quantity: TracedQuantity, name: str) -> Tensor | None:
        """Return the whole tensor, or None if the pieces do not cover each element exactly once."""
        shape = self.shapes[name]
        pieces = [(rank, piece) for rank, trace in enumerate(self.ranks) if (piece := trace.pieces[quantity].get(name))]
        written = [(rank, piece.file, piece.box) for rank, piece in pieces if piece.file is not None]
        if sum(prod(extent) for *_, (_, extent) in written) != prod(shape):
            return None
        whole: Tensor | None = None
        covered = torch.zeros(shape, dtype=torch.bool)
        for rank, number, (offsets, extent) in written:
            part = self._open(quantity, rank, number).get_tensor(name)
            whole = torch.empty(shape, dtype=part.dtype) if whole is None else whole
            box = tuple(slice(first, first + size) for first, size in zip(offsets, extent, strict=True))
            whole[box] = part
            covered[box] = True
        return whole if bool(covered.all()) else None

    def _open(self, quantity: TracedQuantity, rank: int, number: int) -> Any:
        key = (quantity, rank, number)
        if key not in self._files:
            self._files[key] = safe_open(_file(self.folder, *key), framework="pt")
        return self._files[key]

    def replicas(self) -> Iterator[tuple[TracedQuantity, str, list[list[int]]]]:
        """Yield everything that several ranks hold: quantity, name, and those ranks, grouped by their bits."""
        if len(self.ranks) == 1:
            return
        for quantity in self.scalars:
            yield quantity, "", _groups((trace.scalars[quantity].hex(), rank) for rank, trace in enumerate(self.ranks))
        for quantity in self.quantities:
            holders: dict[tuple[str, Box], list[tuple[str, int]]] = defaultdict(list)
            for rank, trace in enumerate(self.ranks):
                for name, piece in trace.pieces[quantity].items():
                    holders[name, piece.box].append((piece.digest, rank))
            for (name, _), hashes in holders.items():
                if len(hashes) > 1:
                    yield quantity, name, _groups(hashes)


def _groups(hashes: Any) -> list[list[int]]:
    ranks: dict[str, list[int]] = defaultdict(list)
    for bits, rank in hashes:
        ranks[bits].append(rank)
    return list(ranks.values())
