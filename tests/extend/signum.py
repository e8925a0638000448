"""An optimizer of one's own: Signum (Bernstein et al., arXiv 1802.04434, algorithm 2), with one moment instead of two.

m = momentum m + (1 - momentum) g        w -= lr * (sign(m) + weight_decay w)
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from shardwright.optimizers import OptimizerKind, Option, register


class Signum(torch.optim.Optimizer):
    """Parameters may be DTensors: every operation is element-wise."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, options: Mapping[str, float]) -> None:
        super().__init__(groups, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    mean = self.state[parameter]["mean"]
                    mean.mul_(group["momentum"]).add_(parameter.grad * (1 - group["momentum"]))
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(torch.sign(mean) * group["lr"])


register(
    OptimizerKind(
        name="signum",
        help="Signum (arXiv 1802.04434)",
        options={"momentum": Option(default=0.9, below=1.0, decay=True, help="decay of the mean of gradients")},
        state=("mean",),
        make=Signum,
    )
)
