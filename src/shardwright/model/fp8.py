"""Matmuls of operands rounded to fp8 and scaled so that the largest absolute value is the end of the range.

For y = a b^T, with a (M, K) and b (N, K), and a scale s for each scaled part of an operand (`number_formats.py`):

    s = amax / largest        q = round(a / s)        y = (q_a s_a) (q_b s_b)^T        summed in fp32 or wider

Scales are fp32, computed in each forward and backward pass ("current scaling"), so no state is kept between steps. On a
GPU with fp8 matmuls (compute capability 8.9) PyTorch's `_scaled_mm` computes them, except blockwise. Elsewhere the
rounded operands are multiplied in fp32 (in fp64 if the operands are): results are rounded as in fp8, at the speed of
fp32.

Sharded operands: if ranks hold parts of a tensor with one scale, its amax is the maximum over them (`OperandShards`),
so that every layout has the scales of the whole tensor. The tensor of an activation is a micro-batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.model.number_formats import Fp8, Fp8Recipe
from shardwright.model.spec import ModelSpec
from shardwright.system.torch_private import fp8_mm

FORWARD = torch.float8_e4m3fn
GRADIENT = {"tensorwise": torch.float8_e5m2, "rowwise": torch.float8_e4m3fn, "blockwise": torch.float8_e4m3fn}
_LEAST = 1e-12
"""The smallest amax; a part that is all zeros gets a scale too."""

Maximum = Callable[[Tensor], None]
"""Replaces each element, in place, by its maximum over the ranks that hold other parts of the tensor."""


@dataclass(frozen=True)
class OperandShards:
    """The ranks over which the operands of one linear are sharded: along tokens, input and output features; None if
    every rank has all."""

    tokens: Maximum | None = None
    inputs: Maximum | None = None
    outputs: Maximum | None = None


@dataclass(frozen=True)
class Fp8Operand:
    """An operand (R, K) in fp8. `scale`: fp32, (), (R, 1) or (R / r, K / k), of blocks of r x k."""

    values: Tensor
    scale: Tensor

    def wide(self, dtype: torch.dtype) -> Tensor:
        """Return values x scale in `dtype`; in float64 the products are exact."""
        return self.values.to(dtype) * spread(self.scale, self.values.shape).to(dtype)


def spread(scale: Tensor, shape: torch.Size) -> Tensor:
    """Return the scale of each element of an (R, K) tensor, or a scale that broadcasts to it."""
    if scale.dim() == 0 or scale.shape == (shape[0], 1):
        return scale
    rows, columns = (n // max(m, 1) for n, m in zip(shape, scale.shape, strict=True))
    return scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)


class Fp8Linear:
    """The three matmuls of a linear in fp8: x (..., D), weight (F, D), dy (..., F).

    `scales`: of the operands of one forward and backward pass, by name; None if each matmul computes its own.
    """

    def __init__(
        self, settings: Fp8, shared: OperandShards = OperandShards(), scales: dict[str, Tensor] | None = None
    ) -> None:
        self.settings, self.shared, self.scales = settings, shared, scales

    def for_pass(self) -> "Fp8Linear":
        """Return the matmuls of one forward pass and its backward pass. Two matmuls read each operand, along different
        dims. A scale of the whole tensor is the same for both, so it is computed once.

        A compiler finds this by itself. The rounded operand is not kept: it takes 1 byte an element from the forward to
        the backward pass, where it would have to be transposed, which is one kernel, as rounding again is.
        """
        if self.settings.recipe != "tensorwise" or torch.compiler.is_compiling():
            return self
        return Fp8Linear(self.settings, self.shared, {})

    def for_backward(self) -> "Fp8Linear":
        """Return the matmuls of one backward pass: another one of the same forward pass has another dy."""
        return self if self.scales is None else Fp8Linear(self.settings, self.shared, dict(self.scales))

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return x W^T, summed over input features."""
        shared = self.shared
        a = self.scaled(x.flatten(0, -2), FORWARD, shared.tokens, shared.inputs, 1, "x")
        b = self.scaled(weight, FORWARD, shared.outputs, shared.inputs, self.settings.block, "weight")
        return product(a, b, x.dtype, fast=True).unflatten(0, x.shape[:-1])

    def input_gradient(self, dy: Tensor, weight: Tensor) -> Tensor:
        """Return dy W, summed over output features."""
        shared = self.shared
        a = self.scaled(dy.flatten(0, -2), self.gradient, shared.tokens, shared.outputs, 1, "dy")
        b = self.scaled(weight.T, FORWARD, shared.inputs, shared.outputs, self.settings.block, "weight")
        return product(a, b, dy.dtype).unflatten(0, dy.shape[:-1])

    def weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        """Return dy^T x, summed over tokens."""
        shared = self.shared
        a = self.scaled(dy.flatten(0, -2).T, self.gradient, shared.outputs, shared.tokens, 1, "dy")
        b = self.scaled(x.flatten(0, -2).T, FORWARD, shared.inputs, shared.tokens, 1, "x")
        return product(a, b, x.dtype)

    def grouped(self, rows_RK: Tensor, weight_ENK: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the rounded operands of a grouped matmul, of each row and its expert's matrix, in fp32 or wider.

        Every row has its own scale, or one for each 1 x k block. A scale of all rows would depend on which tokens are
        sent to a rank's experts, and so on the layout. An expert's matrix is scaled as a weight of the recipe.
        """
        wide = torch.promote_types(rows_RK.dtype, torch.float32)
        recipe: Fp8Recipe = "blockwise" if self.settings.recipe == "blockwise" else "rowwise"
        by_row = Fp8Linear(replace(self.settings, recipe=recipe, weight_gradient=False))
        rows = by_row.scaled(rows_RK, dtype, None, None, 1)
        # Tensorwise each expert is one row of all its elements.
        matrices = weight_ENK.flatten(1) if self.settings.recipe == "tensorwise" else weight_ENK.flatten(0, 1)
        weights = by_row.scaled(matrices, FORWARD, None, None, self.settings.block)
        return rows.wide(wide), weights.wide(wide).view(weight_ENK.shape)

    @property
    def gradient(self) -> torch.dtype:
        """The fp8 type of dy."""
        return GRADIENT[self.settings.recipe]

    def scaled(
        self,
        x_RK: Tensor,
        dtype: torch.dtype,
        along_rows: Maximum | None,
        along_k: Maximum | None,
        rows: int,
        name: str | None = None,
    ) -> Fp8Operand:
        """Return an operand in fp8, which is summed over its last dim. `along_rows`, `along_k`: maxima over the ranks
        that hold its other rows and columns; `rows`: the rows of a block; `name`: of its scale in `scales`."""
        if self.scales is None or name is None:
            return rounded(x_RK, dtype, self.scale(x_RK, dtype, along_rows, along_k, rows))
        if name not in self.scales:
            self.scales[name] = self.scale(x_RK, dtype, along_rows, along_k, rows)
        return rounded(x_RK, dtype, self.scales[name])

    def scale(
        self, x_RK: Tensor, dtype: torch.dtype, along_rows: Maximum | None, along_k: Maximum | None, rows: int
    ) -> Tensor:
        """Return the scale of an operand in fp8; arguments as in `scaled`."""
        largest = torch.finfo(dtype).max
        wide = torch.promote_types(x_RK.dtype, torch.float32)
        if self.settings.recipe == "blockwise":
            k = self.settings.block
            blocks = x_RK.unflatten(1, (-1, k)).unflatten(0, (-1, rows))
            amax = torch.linalg.vector_norm(blocks, torch.inf, (1, 3), dtype=wide)
        elif self.settings.recipe == "rowwise":
            amax = torch.linalg.vector_norm(x_RK, torch.inf, 1, keepdim=True, dtype=wide)
        else:
            amax = torch.linalg.vector_norm(x_RK, torch.inf, dtype=wide)
        crossed = {"tensorwise": (along_rows, along_k), "rowwise": (along_k,), "blockwise": ()}
        for maximum in crossed[self.settings.recipe]:
            if maximum is not None:
                maximum(amax)
        return (amax.clamp(min=_LEAST) / largest).float()


def rounded(x_RK: Tensor, dtype: torch.dtype, scale: Tensor) -> Fp8Operand:
    """Return round(x / scale), row-major; not differentiable. The rounding of the scale may make a quotient larger than
    the largest number of the format, by so little that it is rounded to this number."""
    # A divisor with dims widens x in the same kernel.
    divisor = spread(scale, x_RK.shape) if scale.dim() else scale.view(1, 1)
    if torch.compiler.is_compiling():
        return Fp8Operand((x_RK / divisor).to(dtype), scale)
    # One kernel reads x, along either dim, and writes fp8: no quotient in 32 bits is stored.
    values = torch.empty(x_RK.shape, dtype=dtype, device=x_RK.device)
    return Fp8Operand(torch.div(x_RK, divisor, out=values), scale)


def use_fp8(model: nn.Module, spec: ModelSpec, fp8: Fp8) -> None:
    """Make the linears of a whole `Transformer` compute in fp8."""
    for layer, row in fp8.linears(spec):
        linear: Any = model.get_submodule(f"layers.{layer}.{row.module}")
        setattr(linear, row.recipe, Fp8Linear(fp8))


def product(a: Fp8Operand, b: Fp8Operand, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """Return a b^T, (M, K) and (N, K) -> (M, N). `fast`: see `scaled_mm`."""
    in_blocks = any(x.scale.dim() and x.scale.shape != (len(x.values), 1) for x in (a, b))
    if has_fp8_matmul(a.values, b.values) and not in_blocks:
        return scaled_mm(a, b, dtype, fast)
    wide = torch.promote_types(dtype, torch.float32)
    return (a.wide(wide) @ b.wide(wide).T).to(dtype)


def has_fp8_matmul(a_MK: Tensor, b_NK: Tensor) -> bool:
    """Return whether `_scaled_mm` computes this on the device: multiples of 16, on a GPU of capability 8.9 or newer."""
    if not a_MK.is_cuda or a_MK.shape[1] % 16 or b_NK.shape[0] % 16:
        return False
    return torch.cuda.get_device_capability(a_MK.device) >= (8, 9)


def scaled_mm(a: Fp8Operand, b: Fp8Operand, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """Return `product` by PyTorch's fp8 matmul; scales of rows need an output in bf16. `fast`: sum products with the
    lower precision of the GPU's tensor cores, as torchao and Transformer Engine do in forward passes; otherwise partial
    sums are added up in fp32."""
    out = torch.bfloat16 if a.scale.dim() or dtype == torch.float64 else dtype
    # The operands of the kernel are row-major and column-major.
    q_MK, q_KN = a.values.contiguous(), b.values.contiguous().T
    y_MN = fp8_mm(
        q_MK, q_KN, scale_a=a.scale, scale_b=b.scale.T if b.scale.dim() else b.scale, out_dtype=out, use_fast_accum=fast
    )
    return y_MN.to(dtype)
