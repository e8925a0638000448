"""Steps of an elementwise optimizer on this rank's shards as plain tensors."""

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwright.parallel.norm import as_part, local_part
from shardwright.system.torch_private import storage_id
from shardwright.system.units import in_groups

STORED_NARROW = torch.bfloat16
"""The type of states that are stored in fewer bits than they are computed in."""
BUCKET_BYTES = 64 * 2**20
"""Bytes of parameters whose states are widened at once, unless one parameter is larger."""

Members = list[tuple[dict[str, Any], list[nn.Parameter]]]


class OptimizerOnShards(Optimizer):
    """An optimizer whose `step` uses this rank's shards of parameters, gradients and states as plain tensors.

    The optimizer updates each element independently (`OptimizerKind`), so a shard is updated as the whole tensor would
    be. PyTorch's DTensor dispatch would take longer than the step of a small model. Groups and states contain the
    DTensors.

    States stored in bf16 are computed in the type of their parameter. For one bucket of parameters at a time, states
    are widened, updated, and rounded to the nearest bf16 number. The update uses the states before rounding.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.state = optimizer.state
        self._of_shards = optimizer

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        self._of_shards.state = self.state
        for bucket in self._buckets():
            shards = [[_shard_of(parameter, self.state) for parameter in members] for _, members in bucket]
            whole = [group["params"] for group, _ in bucket]
            for (group, _), local in zip(bucket, shards, strict=True):
                group["params"] = local
            self._of_shards.param_groups = [group for group, _ in bucket]
            self._of_shards.step()
            for (group, members), local, every in zip(bucket, shards, whole, strict=True):
                group["params"] = every
                for parameter, shard in zip(members, local, strict=True):
                    _keep_state(parameter, shard, self.state)

    def _buckets(self) -> Iterator[Members]:
        """Yield all parameters at once or, if states are stored in bf16, a few parameters of one group at a time."""
        groups = self.param_groups
        if not any(_stored_narrow(parameter, self.state) for group in groups for parameter in group["params"]):
            yield [(group, group["params"]) for group in groups]
            return
        for group in groups:
            for members in in_groups(group["params"], lambda member: local_part(member).nbytes, BUCKET_BYTES):
                yield [(group, members)]


def _stored_narrow(parameter: nn.Parameter, states: MutableMapping[Any, Any]) -> bool:
    return parameter.dtype != STORED_NARROW and any(
        isinstance(value, Tensor) and value.dtype == STORED_NARROW for value in states.get(parameter, {}).values()
    )


def _shard_of(parameter: nn.Parameter, states: MutableMapping[Any, Any]) -> nn.Parameter:
    """Return a parameter's shard with its gradient, and put the shard's state into `states`."""
    narrow = _stored_narrow(parameter, states)
    if not isinstance(parameter, DTensor) and not narrow:
        return parameter
    shard = nn.Parameter(local_part(parameter.detach()))
    shard.grad = None if parameter.grad is None else local_part(parameter.grad)
    if parameter in states:
        states[shard] = {name: _widened(local_part(value), shard) for name, value in states[parameter].items()}
    return shard


def _widened(value: Any, shard: Tensor) -> Any:
    return value.to(shard.dtype) if isinstance(value, Tensor) and value.dtype == STORED_NARROW else value


def _keep_state(parameter: nn.Parameter, shard: nn.Parameter, states: MutableMapping[Any, Any]) -> None:
    """Remove a shard's state from `states` and copy its values into the parameter's state."""
    if shard is parameter:
        return
    for name, value in states.pop(shard, {}).items():
        before = states[parameter].get(name)
        if isinstance(before, Tensor) and isinstance(value, Tensor):
            if storage_id(local_part(before).untyped_storage()) != storage_id(value.untyped_storage()):
                local_part(before).copy_(value)
        elif isinstance(parameter, DTensor) and isinstance(value, Tensor) and value.shape == shard.shape:
            states[parameter][name] = as_part(value, parameter, parameter.device_mesh, parameter.placements)
        else:
            states[parameter][name] = value
