"""The feed-forward network of a layer.

Shapes: B batch, T tokens, D model, F ffn.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.model.matmul import Linear
from shardwright.model.recompute import part
from shardwright.model.spec import ModelSpec


class FeedForward(nn.Module):
    """down(silu(gate x) * up x) (SwiGLU, Shazeer, arXiv 2002.05202), or down(gelu(up x)) as in GPT-2."""

    def __init__(self, spec: ModelSpec, d_ffn: int) -> None:
        super().__init__()
        gated = spec.activation == "swiglu"
        self.gate = Linear(spec.d_model, d_ffn, bias=spec.bias) if gated else None
        self.up = Linear(spec.d_model, d_ffn, bias=spec.bias)
        self.down = Linear(d_ffn, spec.d_model, bias=spec.bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        if self.gate is None:
            return self.down(part("activation", gelu, self.up(x_BTD)))
        return self.down(part("activation", gated, self.gate(x_BTD), self.up(x_BTD)))


def gelu(up: Tensor) -> Tensor:
    """Return gelu(up) in its approximation by tanh, as in GPT-2."""
    return F.gelu(up, approximate="tanh")


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up."""
    return F.silu(gate) * up
