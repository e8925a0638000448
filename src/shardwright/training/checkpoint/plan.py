"""Which rank writes which boxes of which tensors, as PyTorch's checkpoint planner decides it.

The tensors of a run keep their names, shapes and shardings, so this is asked once and kept: each time, every rank would
send its list of tensors to rank 0 and get its part back.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import StorageWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import find_state_dict_object
from torch.futures import Future

from shardwright.hugging_face.writer import Entry
from shardwright.training.checkpoint.manifest import key_of
from shardwright.training.checkpoint.storage import AsPlanned, name_of


@dataclass(frozen=True)
class Piece:
    """A box of the tensor `name` that this rank writes; `entry` has its key in the file, its type and its shape."""

    name: str
    offsets: tuple[int, ...]
    entry: Entry
    index: MetadataIndex

    def of(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The box itself, a view of the tensor in training."""
        found = find_state_dict_object(dict(tensors), self.index)
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
    asked = _Asked()
    dcp.save(dict(tensors), storage_writer=asked)
    return Plan(tuple(asked.pieces), asked.tensors)


class _Asked(AsPlanned, StorageWriter):
    """Takes down what PyTorch has planned, and writes nothing."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.tensors: dict[str, tuple[tuple[int, ...], str]] = {}

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        for item in plan.items:
            assert item.tensor_data is not None, f"{item.index.fqn} is no tensor; there is nothing else here"
            offsets, chunk = tuple(item.tensor_data.chunk.offsets), item.tensor_data.chunk
            entry = Entry(
                key_of(item.index.fqn, offsets), name_of(item.tensor_data.properties.dtype), tuple(chunk.sizes)
            )
            self.pieces.append(Piece(item.index.fqn, offsets, entry, item.index))
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            self.tensors[name] = tuple(entry.size), name_of(entry.properties.dtype)
