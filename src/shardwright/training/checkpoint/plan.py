"""Which rank writes which boxes of which tensors.

PyTorch's checkpoint planner says which boxes a rank holds. Rank 0 gets the lists of all ranks and deals the boxes out;
between ranks they are JSON, where PyTorch's own planning would unpickle what comes over the network. The tensors of a
run keep their names, shapes and shardings, so this is done once and kept.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem
from torch.distributed.checkpoint.utils import find_state_dict_object

from shardwright.hugging_face.writer import Entry
from shardwright.parallel.objects import dealt_by_first, gathered_by_first
from shardwright.training.checkpoint.manifest import key_of
from shardwright.training.checkpoint.storage import name_of


@dataclass(frozen=True)
class Piece:
    """A box of the tensor `name` that this rank writes; `entry` has its key in the file, its type and its shape."""

    name: str
    offsets: tuple[int, ...]
    entry: Entry
    index: MetadataIndex

    def of(self, tensors: dict[str, Tensor]) -> Tensor:
        """The box itself, a view of the tensor in training."""
        found = find_state_dict_object(tensors, self.index)
        assert isinstance(found, Tensor), self.name
        return found.detach()


@dataclass(frozen=True)
class Plan:
    """`pieces` of this rank. `tensors`: whole tensors of all ranks by name, their shape and type; on rank 0 alone."""

    pieces: Sequence[Piece]
    tensors: Mapping[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)

    @property
    def n_bytes(self) -> int:
        """Bytes of this rank's pieces."""
        return sum(piece.entry.n_bytes for piece in self.pieces)


def plan_of(tensors: Mapping[str, Tensor]) -> Plan:
    """The plan for tensors, sharded or whole; every rank calls this."""
    items = create_default_local_save_plan(dict(tensors), is_coordinator=False).items
    pieces = [_piece(item) for item in items]
    boxes = [
        Box(piece.name, piece.offsets, piece.entry.shape, piece.entry.dtype, tuple(_data(item).size))
        for piece, item in zip(pieces, items, strict=True)
    ]
    everyone = gathered_by_first(boxes, list[Box])
    mine: list[int] = dealt_by_first(writers(everyone), list[int])
    wholes = {box.name: (box.whole, box.dtype) for boxes in everyone for box in boxes}
    return Plan(tuple(pieces[at] for at in mine), wholes)


@dataclass(frozen=True)
class Box:
    """A part of the tensor `name` that a rank holds; `whole`: the shape of the tensor."""

    name: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    whole: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        """Of the part."""
        return Entry("", self.dtype, self.shape).n_bytes


def writers(everyone: Sequence[Sequence[Box]]) -> list[list[int]]:
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


def _piece(item: WriteItem) -> Piece:
    data = _data(item)
    offsets = tuple(data.chunk.offsets)
    entry = Entry(key_of(item.index.fqn, offsets), name_of(data.properties.dtype), tuple(data.chunk.sizes))
    return Piece(item.index.fqn, offsets, entry, item.index)


def _data(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None, f"{item.index.fqn} is no tensor; there is nothing else here"
    return item.tensor_data
