"""The optimizer of a run, over whole parameters or shards of them, with its state allocated before the first step."""

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.adamw import AdamW

from shardwright.config import OptimizerSection
from shardwright.model.modules import row_of
from shardwright.model.spec import ModelSpec
from shardwright.parallel.norm import as_part, local_part


def adamw(groups: list[dict[str, Any]], lr: float, options: Mapping[str, float]) -> Optimizer:
    """Fused AdamW."""
    return AdamW(groups, lr=lr, betas=(options["beta1"], options["beta2"]), eps=options["eps"], fused=True)


def build_optimizer(parameters: Mapping[str, nn.Parameter], spec: ModelSpec, config: OptimizerSection) -> Optimizer:
    """The optimizer of the run for `parameters`, by global name, with weight decay on matrices and embeddings only."""
    by_matrix = config.kind.matrix_state is not None
    return make_optimizer(parameter_groups(parameters, spec, config.weight_decay, by_matrix), config)


def make_optimizer(groups: list[dict[str, Any]], config: OptimizerSection) -> Optimizer:
    """The optimizer of the run for groups of parameters with their weight decay.

    The state is allocated here and not in the first step, so that a run that does not fit fails at its start, and
    a checkpoint has somewhere to be read into. It is on the device and of the type and sharding of its parameter.
    """
    optimizer: Optimizer = config.kind.build(groups, config.lr, config.options)
    for group in groups:
        state, counters = config.kind.held(group.get("hidden", False))
        for parameter in group["params"]:
            numbers = {name: torch.zeros((), dtype=torch.float32, device=parameter.device) for name in counters}
            tensors = {name: torch.zeros_like(parameter, memory_format=torch.preserve_format) for name in state}
            optimizer.state[parameter] = numbers | tensors
    return optimizer if config.kind.matrix_state is not None else on_shards(optimizer)


def on_shards(optimizer: Optimizer) -> Optimizer:
    """The optimizer, whose `step` is given this rank's shards of parameters, gradients and states as plain tensors.

    Its optimizer updates each element on its own (`OptimizerKind`), so that a shard is updated as the whole
    would be; and PyTorch's dispatch of DTensors takes longer than the step of a small model. Outside of `step` groups
    and states hold the DTensors.
    """
    held: list[tuple[list[nn.Parameter], list[nn.Parameter]]] = []

    def take_shards(*_: Any) -> None:
        held.clear()
        for group in optimizer.param_groups:
            whole = group["params"]
            group["params"] = [_shard_of(parameter, optimizer.state) for parameter in whole]
            held.append((whole, group["params"]))

    def put_back(*_: Any) -> None:
        for group, (whole, shards) in zip(optimizer.param_groups, held, strict=True):
            group["params"] = whole
            for parameter, shard in zip(whole, shards, strict=True):
                _keep_state(parameter, shard, optimizer.state)
        held.clear()  # which would keep the gradients alive

    optimizer.register_step_pre_hook(take_shards)
    optimizer.register_step_post_hook(put_back)
    return optimizer


def _shard_of(parameter: nn.Parameter, states: MutableMapping[Any, Any]) -> nn.Parameter:
    """The shard of a parameter, with its gradient and with a state in `states`."""
    if not isinstance(parameter, DTensor):
        return parameter
    shard = nn.Parameter(local_part(parameter.detach()))
    shard.grad = None if parameter.grad is None else local_part(parameter.grad)
    if parameter in states:
        states[shard] = {name: local_part(value) for name, value in states[parameter].items()}
    return shard


def _keep_state(parameter: nn.Parameter, shard: nn.Parameter, states: MutableMapping[Any, Any]) -> None:
    """Take the state of a shard out of `states`; what the step has put in the place of a tensor is copied into it."""
    if not isinstance(parameter, DTensor):
        return
    for name, value in states.pop(shard, {}).items():
        before = states[parameter].get(name)
        if isinstance(before, Tensor) and isinstance(value, Tensor):
            if local_part(before).data_ptr() != value.data_ptr():
                local_part(before).copy_(value)
        elif isinstance(value, Tensor) and value.shape == shard.shape:
            states[parameter][name] = as_part(value, parameter, parameter.device_mesh, parameter.placements)
        else:
            states[parameter][name] = value


def parameter_groups(
    parameters: Mapping[str, nn.Parameter], spec: ModelSpec, weight_decay: float, by_matrix: bool = False
) -> list[dict[str, Any]]:
    """Groups of parameters with equal weight decay on the same mesh, as one call of a fused update needs them.

    With `by_matrix` hidden matrices have groups of their own: those with `hidden`; and `rows` are those of the
    parameters."""
    groups: dict[tuple[bool, bool, DeviceMesh | None], dict[str, Any]] = {}
    for name, parameter in parameters.items():
        row = row_of(spec, name)
        if not row.trained:
            continue
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        decay = weight_decay if row.decays else 0.0
        hidden = by_matrix and row.hidden
        group = groups.setdefault((row.decays, hidden, mesh), {"params": [], "weight_decay": decay})
        group["params"].append(parameter)
        if by_matrix:
            group["hidden"] = hidden
            group.setdefault("rows", []).append(row)
    return list(groups.values())


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """The rate of the next step, for every group, times its `lr_scale` if it has one."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)


def named_state(optimizer: Optimizer, parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
    """The optimizer states, by name, as `exp_avg/layers.0.ffn.up.weight`, the very ones it updates."""
    return {
        f"{kind}/{name}": tensor
        for name, parameter in parameters
        for kind, tensor in optimizer.state.get(parameter, {}).items()
    }
