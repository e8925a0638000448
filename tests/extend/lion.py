"""An optimizer of one's own: Lion (Chen et al., arXiv 2302.06675, algorithm 2), with one moment instead of two.

w -= lr * (sign(beta1 m + (1 - beta1) g) + weight_decay w)        m = beta2 m + (1 - beta2) g
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from shardwright.optimizers import OptimizerKind, Option, register


class Lion(torch.optim.Optimizer):
    """Parameters may be DTensors: every operation is element-wise."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, options: Mapping[str, float]) -> None:
        super().__init__(groups, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    mean = self.state[parameter]["mean"]
                    direction = torch.sign(mean * group["beta1"] + parameter.grad * (1 - group["beta1"]))
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction * group["lr"])
                    mean.mul_(group["beta2"]).add_(parameter.grad * (1 - group["beta2"]))


register(
    OptimizerKind(
        name="lion",
        help="Lion (arXiv 2302.06675)",
        options={
            "beta1": Option(default=0.9, below=1.0, help="share of the mean in the direction of a step"),
            "beta2": Option(default=0.99, below=1.0, help="decay of the mean of gradients"),
        },
        state=("mean",),
        make=Lion,
    )
)
