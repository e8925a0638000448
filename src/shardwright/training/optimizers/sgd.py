"""SGD with momentum (Sutskever et al. 2013, section 2): PyTorch's, with weight decay decoupled from the gradient.

    m <- momentum m + g        u = m, or with Nesterov momentum m + g
    w <- (1 - lr weight_decay) w - lr u

PyTorch's own weight decay adds weight_decay w to g, and thus to m. Here it is decoupled, as in all other optimizers
(arXiv 1711.05101, algorithm 1).
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from shardwright.system.torch_private import foreach_mul_


class SGD(torch.optim.SGD):
    """SGD for plain tensors."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, options: Mapping[str, float]) -> None:
        for group in groups:
            group["decoupled_weight_decay"] = group.pop("weight_decay")
        nesterov = bool(options["nesterov"])
        super().__init__(groups, lr=lr, momentum=options["momentum"], nesterov=nesterov, fused=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            kept = 1 - group["lr"] * group["decoupled_weight_decay"]
            changed = [parameter for parameter in group["params"] if parameter.grad is not None]
            if changed and kept != 1:
                foreach_mul_(changed, kept)
        super().step()
