"""AdamW (Loshchilov & Hutter, arXiv 1711.05101): PyTorch's, fused."""

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.adamw import AdamW


def adamw(groups: list[dict[str, Any]], lr: float, options: Mapping[str, float]) -> Optimizer:
    """Return PyTorch's fused AdamW."""
    return AdamW(groups, lr=lr, betas=(options["beta1"], options["beta2"]), eps=options["eps"], fused=True)
