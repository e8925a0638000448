"""The checkpoint plan: the boxes of each tensor that each rank writes.

Every rank lists its boxes. Rank 0 gathers the lists and assigns each box to one rank. Lists are sent as JSON, because
PyTorch's own planner would unpickle bytes from the network. A run's tensors keep their names, shapes and shardings, so
the plan is made once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from shardwright.hugging_face.writer import TensorToWrite
from shardwright.parallel.boxes import shard_of
from shardwright.parallel.norm import local_part
from shardwright.parallel.objects import gathered_by_first, scattered_by_first
from shardwright.training.checkpoint.manifest import key_of
from shardwright.training.checkpoint.storage import name_of


@dataclass(frozen=True)
class TensorPiece:
    """A box of the tensor `name` that this rank writes. `entry`: its key in the file, its type and its shape."""

    name: str
    offsets: tuple[int, ...]
    entry: TensorToWrite

    def view(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the box as a view of the training tensor."""
        return local_part(tensors[self.name]).detach()


@dataclass(frozen=True)
class CheckpointPlan:
    """This rank's `pieces`. `tensors`: name -> (shape, type) of all ranks' whole tensors; empty except on rank 0."""

    pieces: Sequence[TensorPiece]
    tensors: Mapping[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)

    @property
    def n_bytes(self) -> int:
        """Bytes of this rank's pieces."""
        return sum(piece.entry.n_bytes for piece in self.pieces)


def plan_of(tensors: Mapping[str, Tensor]) -> CheckpointPlan:
    """Return the plan for tensors, sharded or whole. Every rank calls this."""
    pieces, boxes = [], []
    for name, tensor in tensors.items():
        offsets, shape, _ = shard_of(tensor)
        if 0 in shape:
            continue  # other ranks have the whole tensor
        entry = TensorToWrite(key_of(name, offsets), name_of(tensor.dtype), shape)
        pieces.append(TensorPiece(name, offsets, entry))
        boxes.append(TensorBox(name, offsets, shape, entry.dtype, tuple(tensor.shape)))
    everyone = gathered_by_first(boxes, list[TensorBox])
    assigned: list[int] = scattered_by_first(writers(everyone), list[int])
    wholes = {box.name: (box.whole, box.dtype) for boxes in everyone for box in boxes}
    return CheckpointPlan(tuple(pieces[at] for at in assigned), wholes)


@dataclass(frozen=True)
class TensorBox:
    """A part of the tensor `name` on one rank. `whole`: the shape of the whole tensor."""

    name: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    whole: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        """Size of the part in bytes."""
        return TensorToWrite("", self.dtype, self.shape).n_bytes


def writers(everyone: Sequence[Sequence[TensorBox]]) -> list[list[int]]:
    """Return the indices of the boxes that each rank writes. `everyone`: the boxes of each rank. A box that several
    ranks have is written by the rank with the fewest bytes assigned so far."""
    holders: dict[tuple[str, tuple[int, ...]], list[tuple[int, int]]] = {}
    for rank, boxes in enumerate(everyone):
        for at, box in enumerate(boxes):
            holders.setdefault((box.name, box.offsets), []).append((rank, at))
    n_bytes, chosen = [0] * len(everyone), [list[int]() for _ in everyone]
    for places in holders.values():
        rank, at = min(places, key=lambda place: n_bytes[place[0]])
        n_bytes[rank] += everyone[rank][at].n_bytes
        chosen[rank].append(at)
    return chosen
