"""Dropout of the embedding and of the residual branches, with the same masks for every layout.

Attention probabilities are never dropped: a fused attention kernel does not store them, so its mask could not depend
on the position alone, and would differ between layouts.

Shapes: B sequences, T positions, D model.
"""

import torch
from torch import Tensor, nn

from shardwright.model.random import keep_mask, keep_probability


class KeyedDropout(nn.Module):
    """Drops elements with probability `p` and divides the others by the probability that an element is kept."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x_BTD: Tensor, site_keys_B: Tensor | None, positions_T: Tensor) -> Tensor:
        """Return `x_BTD` with dropout, whose mask is a function of key, global position and feature; unchanged in
        evaluation, with p = 0, or without keys."""
        if site_keys_B is None or self.p == 0 or not self.training:
            return x_BTD
        keep_BTD = keep_mask(site_keys_B, positions_T, x_BTD.shape[-1], self.p)
        return torch.where(keep_BTD, x_BTD * (1 / keep_probability(self.p)), 0.0)

    def extra_repr(self) -> str:
        return f"p={self.p}"
