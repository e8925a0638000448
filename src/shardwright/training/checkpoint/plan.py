"""Which rank writes which boxes of which tensors.

Every rank lists the boxes that it holds. Rank 0 gets all lists and assigns each box to one rank. Between ranks lists
are JSON, where PyTorch's own planning would unpickle bytes from the network. The tensors of a run keep their names,
shapes and shardings, so this is done once and kept.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from shardwright.hugging_face.writer import TensorToWrite
from shardwright.parallel.boxes import shard_of
from shardwright.parallel.norm import local_part
from shardwright.parallel.objects import dealt_by_first, gathered_by_first
from shardwright.training.checkpoint.manifest import key_of
from shardwright.training.checkpoint.storage import name_of


@dataclass(frozen=True)
class TensorPiece:
    """A box of the tensor `name` that this rank writes; `entry` has its key in the file, its type and its shape."""

    name: str
    offsets: tuple[int, ...]
    entry: TensorToWrite

    def view(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The box itself, a view of the tensor in training."""
        return local_part(tensors[self.name]).detach()


@dataclass(frozen=True)
class CheckpointPlan:
    """`pieces` of this rank. `tensors`: whole tensors of all ranks by name, their shape and type; on rank 0 alone."""

    pieces: Sequence[TensorPiece]
    tensors: Mapping[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)

    @property
    def n_bytes(self) -> int:
        """Bytes of this rank's pieces."""
        return sum(piece.entry.n_bytes for piece in self.pieces)


def plan_of(tensors: Mapping[str, Tensor]) -> CheckpointPlan:
    """The plan for tensors, sharded or whole; every rank calls this."""
    pieces, boxes = [], []
    for name, tensor in tensors.items():
        offsets, shape, _ = shard_of(tensor)
        if 0 in shape:
            continue  # other ranks hold all of it
        entry = TensorToWrite(key_of(name, offsets), name_of(tensor.dtype), shape)
        pieces.append(TensorPiece(name, offsets, entry))
        boxes.append(TensorBox(name, offsets, shape, entry.dtype, tuple(tensor.shape)))
    everyone = gathered_by_first(boxes, list[TensorBox])
    mine: list[int] = dealt_by_first(writers(everyone), list[int])
    wholes = {box.name: (box.whole, box.dtype) for boxes in everyone for box in boxes}
    return CheckpointPlan(tuple(pieces[at] for at in mine), wholes)


@dataclass(frozen=True)
class TensorBox:
    """A part of the tensor `name` that a rank holds; `whole`: the shape of the tensor."""

    name: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    whole: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        """Of the part."""
        return TensorToWrite("", self.dtype, self.shape).n_bytes


def writers(everyone: Sequence[Sequence[TensorBox]]) -> list[list[int]]:
    """Which of its boxes each rank writes, by their numbers: each box one of the ranks that hold it, that which has the
    fewest bytes to write so far. `everyone`: the boxes of each rank."""
    holders: dict[tuple[str, tuple[int, ...]], list[tuple[int, int]]] = {}
    for rank, boxes in enumerate(everyone):
        for at, box in enumerate(boxes):
            holders.setdefault((box.name, box.offsets), []).append((rank, at))
    n_bytes, chosen = [0] * len(everyone), [list[int]() for _ in everyone]
    for held in holders.values():
        rank, at = min(held, key=lambda each: n_bytes[each[0]])
        n_bytes[rank] += everyone[rank][at].n_bytes
        chosen[rank].append(at)
    return chosen
