"""The feed-forward network of a layer.

Shapes: B batch, T tokens, D model, F ffn.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.model.matmul import Linear
from shardwright.model.recompute import part
from shardwright.model.spec import ModelSpec


class FeedForward(nn.Module):
    """down(act(gate x) * up x) (SwiGLU, GEGLU, Shazeer, arXiv 2002.05202), or down(act(up x)) as in GPT-2."""

    def __init__(self, spec: ModelSpec, d_ffn: int) -> None:
        super().__init__()
        self.activate = ACTIVATIONS[spec.activation]
        self.gate = Linear(spec.d_model, d_ffn, bias=spec.bias) if spec.gated else None
        self.up = Linear(spec.d_model, d_ffn, bias=spec.bias)
        self.down = Linear(d_ffn, spec.d_model, bias=spec.bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        if self.gate is None:
            return self.down(part("activation", self.activate, self.up(x_BTD)))
        return self.down(part("activation", self.activate, self.gate(x_BTD), self.up(x_BTD)))


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


LIMIT, SLOPE = 7.0, 1.702


def swiglu_clamped(gate: Tensor, up: Tensor) -> Tensor:
    """Return g sigmoid(1.702 g) (u + 1), with g = min(gate, 7) and u = up within -7 and 7 (gpt-oss)."""
    result: Tensor = _ClampedSwiglu.apply(gate, up)
    return result


class _ClampedSwiglu(torch.autograd.Function):
    """Saves gate and up alone, as many tensors as swiglu needs with a fused kernel."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        g = gate.clamp(max=LIMIT)
        return g * torch.sigmoid(SLOPE * g) * (up.clamp(-LIMIT, LIMIT) + 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (gate, up), dy = ctx.saved_tensors, grads[0]
        g = gate.clamp(max=LIMIT)
        gain = torch.sigmoid(SLOPE * g)
        slope = gain * (1 + SLOPE * g * (1 - gain))
        dgate = dy * (up.clamp(-LIMIT, LIMIT) + 1) * slope * (gate <= LIMIT)
        return dgate, dy * g * gain * (up.abs() <= LIMIT)


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate) * up


def geglu_tanh(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * up


def gelu_tanh(up: Tensor) -> Tensor:
    return F.gelu(up, approximate="tanh")


def relu2(up: Tensor) -> Tensor:
    """Return relu(up)^2 (So et al., arXiv 2109.08668)."""
    return F.relu(up).square()


ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "swiglu": swiglu,
    "swiglu_clamped": swiglu_clamped,
    "geglu": geglu,
    "geglu_tanh": geglu_tanh,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "relu2": relu2,
}
"""The function of gate and up, or of up alone, for each value of `activation`."""
