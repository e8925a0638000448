"""The optimizer of a run, over whole parameters or shards, with its states allocated before the first step; and the
learning rate of each step."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from shardwright.config import OptimizerSection, ScheduleSection
from shardwright.model.modules import row_of
from shardwright.model.spec import ModelSpec
from shardwright.parallel.norm import as_part, local_part
from shardwright.parallel.observer import NO_OBSERVER, Observer
from shardwright.training.offload.on_disk import OptimizerOnDisk
from shardwright.training.offload.on_host import OptimizerOnHost
from shardwright.training.offload.states import Disk, Host, OffloadedParameter, StoredTensor, Where
from shardwright.training.on_shards import STORED_NARROW, OptimizerOnShards


def build_optimizer(
    parameters: Mapping[str, nn.Parameter],
    spec: ModelSpec,
    config: OptimizerSection,
    where: Where = None,
    observer: Observer = NO_OBSERVER,
) -> Optimizer:
    """Build the run's optimizer for `parameters`, by global name, with the learning rate and weight decay of their
    kinds. The states are allocated at `where`; `observer` receives copies and updates outside of the device."""
    return make_optimizer(parameter_groups(parameters, spec, config), config, where, observer)


def make_optimizer(
    groups: list[dict[str, Any]], config: OptimizerSection, where: Where = None, observer: Observer = NO_OBSERVER
) -> Optimizer:
    """Build the run's optimizer for groups of parameters (`parameter_groups`).

    The states are allocated here instead of in the first step, so that a run that does not fit fails at its start, and
    a checkpoint can be loaded into them. They have the device and sharding of their parameter, or are at `where`, which
    requires an optimizer with states of each element (`OptimizerKind.can_offload`).
    """
    optimizer: Optimizer = config.kind.build(groups, config.lr, config.options)
    stored = STORED_NARROW if config.state_dtype == "bf16" else None
    members = []
    for group in groups:
        for parameter, row in zip(group["params"], group["rows"], strict=True):
            beside = torch.device("cpu") if isinstance(where, Host) else parameter.device
            numbers = {
                name: torch.zeros((), dtype=torch.float32, device=beside) for name in config.kind.counters_of(row)
            }
            shapes = config.kind.shapes(row, config.options)
            codes = config.kind.state if config.kind.has_codes(row, config.options) else ()
            if where is not None:
                members.append(
                    OffloadedParameter(group, parameter, dict.fromkeys(shapes, stored or parameter.dtype), numbers)
                )
                continue
            optimizer.state[parameter] = numbers | {
                name: torch.zeros_like(parameter, dtype=torch.uint8 if name in codes else stored)
                if shape == row.shape
                else _zero_means(parameter, shape)
                for name, shape in shapes.items()
            }
    if isinstance(where, Disk):
        return OptimizerOnDisk(optimizer, members, where, observer)
    if isinstance(where, Host):
        return OptimizerOnHost(optimizer, members, where, observer)
    return OptimizerOnShards(optimizer) if config.kind.by_element else optimizer


def _zero_means(parameter: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return zeros of a shape that differs from a matrix's shape in one of the last two dims (for means, or scales
    of blocks). They are sharded as the matrix, except in that dim, which every rank has completely."""
    means, meant = torch.empty(shape, device="meta"), next(d for d in (-1, -2) if shape[d] != parameter.shape[d])
    local = list(local_part(parameter).shape)
    local[meant] = shape[meant]
    zeros = torch.zeros(local, dtype=parameter.dtype, device=parameter.device)
    if not isinstance(parameter, DTensor):
        return zeros
    over = parameter.dim() + meant
    placements = [Replicate() if getattr(place, "dim", None) == over else place for place in parameter.placements]
    return as_part(zeros, means, parameter.device_mesh, placements)


def parameter_groups(
    parameters: Mapping[str, nn.Parameter], spec: ModelSpec, config: OptimizerSection
) -> list[dict[str, Any]]:
    """Return groups of parameters with equal weight decay, `lr_scale` and `eps` on the same mesh, as required for one
    call of a fused update.

    `rows`: the parameters' rows. Hidden matrices are in separate groups, with `hidden` set. PyTorch's optimizers need a
    group, so a stage whose layers have no adapter has one group without parameters.
    """
    groups: dict[tuple[float, float, float | None, bool, DeviceMesh | None], dict[str, Any]] = {}
    for name, parameter in parameters.items():
        row = row_of(spec, name)
        if not row.trained:
            continue
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        hidden = row.hidden and config.kind.matrix_state is not None
        decay, scale, eps = config.weight_decay_of(row), config.lr_scale_of(row), config.eps_of(row)
        group = groups.setdefault(
            (decay, scale, eps, hidden, mesh),
            {"params": [], "rows": [], "weight_decay": decay, "lr_scale": scale, "hidden": hidden}
            | ({} if eps is None else {"eps": eps}),
        )
        group["params"].append(parameter)
        group["rows"].append(row)
    if not groups:
        return [{"params": [], "rows": [], "weight_decay": 0.0, "lr_scale": 1.0, "hidden": False}]
    return list(groups.values())


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """Set the learning rate of the next step in every group, times the group's `lr_scale` if it has one."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)


def named_state(optimizer: Optimizer, parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
    """Return the optimizer states by name, such as `exp_avg/layers.0.ffn.up.weight`. They are the optimizer's own
    tensors, on the meta device for states that are on a disk (`stored_state`)."""
    return {
        f"{kind}/{name}": tensor
        for name, parameter in parameters
        for kind, tensor in optimizer.state.get(parameter, {}).items()
    }


def stored_state(optimizer: Optimizer, parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, StoredTensor]:
    """Return this rank's shards of the optimizer states that are on a disk, by name."""
    if not isinstance(optimizer, OptimizerOnDisk):
        return {}
    return {
        f"{kind}/{name}": tensor
        for name, parameter in parameters
        if parameter in optimizer.state
        for kind, tensor in optimizer.stored(parameter).items()
    }


def learning_rate(
    step: int,
    steps: int,
    peak: float,
    schedule: ScheduleSection,
    progress: Callable[[int], float] = lambda step: step,
) -> float:
    """Return the learning rate of step number `step` (0-based) of `steps`. `progress`: the steps or tokens before a
    step (`RunConfig.clock`), p(step).

    Linear warm-up over W = warmup_steps: peak * p(step + 1) / p(W). Then, with f = final_fraction and the last step
    L = steps - 1:
    - cosine (arXiv 1608.03983, one period): peak * (f + (1 - f) * (1 + cos(pi * x)) / 2), x = (p(step) - p(W)) /
      (p(L) - p(W)), from 0 at the end of the warm-up to 1 at the last step;
    - wsd (warm-up, stable, decay; arXiv 2404.06395): peak, then linear in p to f * peak over the last decay_steps;
    - constant: peak.
    """
    warm, end = schedule.warmup_steps, steps - 1
    if step < warm:
        return peak * progress(step + 1) / progress(warm)
    final = schedule.final_fraction
    if schedule.shape == "cosine":
        done = (progress(step) - progress(warm)) / max(1, progress(end) - progress(warm))
        return peak * (final + (1 - final) * (1 + math.cos(math.pi * min(1.0, done))) / 2)
    if schedule.shape == "wsd" and schedule.decay_steps:
        left = progress(end) - progress(step)
        length = progress(steps) - progress(steps - schedule.decay_steps)
        return peak * (final + (1 - final) * min(1.0, left / length))
    return peak
