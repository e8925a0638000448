"""An optimizer with its states on a disk; its update of each element depends only on that element."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwright.parallel.norm import as_part, local_part
from shardwright.parallel.observer import NO_OBSERVER, DiskUpdate, Observer
from shardwright.system.torch_private import storage_id
from shardwright.training.offload.states import Chunk, Disk, OffloadedParameter, StatePiece, StatesOnDisk, StoredTensor


class OptimizerOnDisk(Optimizer):
    """An optimizer whose `step` updates one chunk of elements at a time (`StatesOnDisk`), with bitwise the same result.

    `state[parameter]` has the counters, which stay in memory, and for each state a meta tensor with its shape, type and
    sharding; `stored` has the values.
    """

    def __init__(
        self, optimizer: Optimizer, members: Sequence[OffloadedParameter], disk: Disk, observer: Observer = NO_OBSERVER
    ) -> None:
        """`members`: all parameters of `optimizer`."""
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._of_pieces, self.observer = optimizer, observer
        self.states_on_disk = StatesOnDisk(members, disk)
        self.counters = [number for member in members for number in member.counters.values()]
        """The counters, which stay in memory."""
        for member in members:
            shapes = {name: _without_values(member.parameter, dtype) for name, dtype in member.dtypes.items()}
            self.state[member.parameter] = {**member.counters, **shapes}

    def stored(self, parameter: nn.Parameter) -> dict[str, StoredTensor]:
        """Return the states of this rank's shard of a parameter, by name."""
        return self.states_on_disk.stored_states(parameter)

    @property
    def chunks(self) -> Sequence[Chunk]:
        """The chunks of a step, in order."""
        return self.states_on_disk.chunks

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for chunk, data in self.states_on_disk.in_turn():
            with self.observer.during(DiskUpdate(chunk.n_bytes, chunk.used)):
                self._update(chunk, data)

    def _update(self, chunk: Chunk, data: Tensor) -> None:
        inner, groups = self._of_pieces, defaultdict[int, list[nn.Parameter]](list)
        inner.state = defaultdict(dict)
        updates = []
        for piece in chunk.pieces:
            shard = _shard_of(piece)
            before = _states_of(piece, data)
            counters = {name: number.clone() for name, number in piece.member.counters.items()}
            inner.state[shard] = counters | {n: state.to(shard.device, shard.dtype) for n, state in before.items()}
            groups[id(piece.member.group)].append(shard)
            updates.append((piece, shard, before))
        inner.param_groups = [
            {**group, "params": groups[id(group)]} for group in self.param_groups if id(group) in groups
        ]
        assert len(inner.param_groups) == len(groups), "`OptimizerKind.make` has to keep the groups that it is given"
        inner.step()
        for piece, shard, before in updates:
            self._keep(piece, inner.state.pop(shard), before)
        inner.param_groups = []  # they reference gradients

    def _keep(self, piece: StatePiece, after: dict[str, Any], before: dict[str, Tensor]) -> None:
        """Copy the states of a piece into its chunk, and the counters with the last piece of a parameter."""
        for name, value in after.items():
            if name not in before:
                if piece.last:
                    piece.member.counters[name].copy_(value)
            elif storage_id(value.untyped_storage()) != storage_id(before[name].untyped_storage()):
                before[name].copy_(value)


def _shard_of(piece: StatePiece) -> nn.Parameter:
    """Return the elements of a piece as a view of its parameter, with their gradient."""
    parameter, part = piece.member.parameter, slice(piece.first, piece.first + piece.count)
    shard = nn.Parameter(local_part(parameter.detach()).view(-1)[part])
    if parameter.grad is not None:
        shard.grad = local_part(parameter.grad).reshape(-1)[part]
    return shard


def _states_of(piece: StatePiece, data: Tensor) -> dict[str, Tensor]:
    """Return the states of a piece as views of its chunk's bytes."""
    return {
        name: data[at : at + piece.count * piece.member.dtypes[name].itemsize].view(piece.member.dtypes[name])
        for name, at in piece.at.items()
    }


def _without_values(parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
    """Return a meta tensor with the shape and sharding of a parameter."""
    empty = torch.empty_like(local_part(parameter.detach()), dtype=dtype, device="meta")
    if not isinstance(parameter, DTensor):
        return empty
    return as_part(empty, parameter, parameter.device_mesh, parameter.placements)
