"""AdamW over whole parameters or shards of them, with its state there from the beginning."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.adamw import AdamW

from shardwright.config import OptimizerSection


def build_optimizer(parameters: Iterable[tuple[str, nn.Parameter]], config: OptimizerSection) -> AdamW:
    """AdamW (arXiv 1711.05101), fused, decaying matrices and embeddings but no vector (norms, biases).

    The state is allocated here and not in the first step, so that a run that does not fit fails at its start, and
    a checkpoint has somewhere to be read into. It is on the device and of the type and sharding of its parameter.
    """
    named = list(parameters)
    optimizer = AdamW(
        parameter_groups(named, config.weight_decay),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )
    for _, parameter in ((name, parameter) for name, parameter in named if parameter.requires_grad):
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }
    return optimizer


def parameter_groups(named: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> list[dict[str, Any]]:
    """Groups of parameters that are decayed alike and lie on one mesh, as one call of a fused update needs them."""
    groups: dict[tuple[bool, DeviceMesh | None], dict[str, Any]] = {}
    for _, parameter in named:
        if not parameter.requires_grad:
            continue
        decayed = parameter.dim() >= 2
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        group = groups.setdefault((decayed, mesh), {"params": [], "weight_decay": weight_decay if decayed else 0.0})
        group["params"].append(parameter)
    return list(groups.values())


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """The rate of the next step, for every group."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def named_state(optimizer: Optimizer, parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
    """The tensors of the optimizer's state as `exp_avg/layers.0.ffn.up.weight`, the very ones it updates."""
    return {
        f"{kind}/{name}": tensor
        for name, parameter in parameters
        for kind, tensor in optimizer.state.get(parameter, {}).items()
    }
