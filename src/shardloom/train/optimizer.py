"""AdamW over whole parameters or shards of them, with its state there from the beginning."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim.adamw import AdamW

from shardloom.config import OptimizerSection


def build_optimizer(parameters: Iterable[tuple[str, nn.Parameter]], config: OptimizerSection) -> AdamW:
    """AdamW (arXiv 1711.05101), fused, decaying matrices and embeddings but no vector (norms, biases).

    The state is allocated here and not in the first step, so that a run that does not fit fails at its start, and
    a checkpoint has somewhere to be read into. It is on the device and of the type and sharding of its parameter.
    """
    named = list(parameters)
    decayed = [p for _, p in named if p.dim() >= 2]
    plain = [p for _, p in named if p.dim() < 2]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    optimizer = AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )
    for _, parameter in named:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }
    return optimizer


def set_learning_rate(optimizer: AdamW, rate: float) -> None:
    """The rate of the next step, for every group."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def named_state(optimizer: AdamW, parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
    """The tensors of the optimizer's state as `exp_avg/layers.0.ffn.up.weight`, the very ones it updates."""
    return {
        f"{kind}/{name}": tensor
        for name, parameter in parameters
        for kind, tensor in optimizer.state[parameter].items()
    }
