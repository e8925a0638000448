"""Lion (Chen et al., arXiv 2302.06675, algorithm 2): steps of constant size along the sign of a mean of gradients.

    w <- (1 - lr weight_decay) w - lr sign(beta1 m + (1 - beta1) g)        m <- beta2 m + (1 - beta2) g

sign(0) = 0, so the embedding row of a token that has never occurred does not change.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from shardwright.system.torch_private import foreach_add_, foreach_lerp, foreach_lerp_, foreach_mul_, foreach_sign_


class Lion(torch.optim.Optimizer):
    """Lion for plain tensors. `mean` of each parameter must be in its state before the first step."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, options: Mapping[str, float]) -> None:
        super().__init__(groups, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            changed = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not changed:
                continue
            gradients = [parameter.grad for parameter in changed]
            means = [self.state[parameter]["mean"] for parameter in changed]
            directions = foreach_lerp(means, gradients, 1 - group["beta1"])
            foreach_sign_(directions)
            foreach_mul_(changed, 1 - group["lr"] * group["weight_decay"])
            foreach_add_(changed, directions, alpha=-group["lr"])
            foreach_lerp_(means, gradients, 1 - group["beta2"])
