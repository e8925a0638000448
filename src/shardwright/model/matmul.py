"""Every matmul of activations with a weight goes through three functions: `forward`, `input_gradient` and
`weight_gradient`. Code that counts matmuls changes only these three.

    y = x W^T + b          dx = dy W          dW = dy^T x          db = the sum of dy over its rows

With `counts_E` the matmul is grouped (grouped GEMM): rows of x are sorted by expert, counts_E[e] of them (integers)
belong to expert e and are multiplied by its matrix W_e; the bias is (E, F). Rows after the last counted one have
undefined outputs and do not contribute to weight gradients. With a `recipe` of fp8 the operands are rounded to fp8
(`model/fp8.py`), except in weight gradients of grouped matmuls, whose scales would depend on which tokens are sent to a
rank. With a `StoredRow` as recipe the weight is quantised, (..., Y) bytes, and is decoded for the matmul
(`model/quantised.py`); it is frozen, so it has no gradient. With an `InputMask` as recipe the matmul reads x with
dropout, which is drawn again in the backward pass, so that x is saved once for all matmuls that read it.

`linear` is the differentiable function that the modules of a model call. Layers with collectives between the matmuls
(parallel/tensor.py) call the three functions themselves, and `weight_gradient_or_defer` in the backward pass.

Shapes: x (..., D), W (F, D), y (..., F); grouped: x (R, D), W (E, F, D), y (R, F), for R rows and E experts.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwright.model.batch_invariant import replace_operator
from shardwright.model.dropout import InputDropout, InputMask
from shardwright.model.fp8 import FORWARD, Fp8Linear
from shardwright.model.lora_sizes import StoredRow
from shardwright.model.quantised import decode
from shardwright.system.torch_private import grouped_mm

Recipe = Fp8Linear | StoredRow | InputMask
"""How a matmul takes its operands, other than as they are."""


def forward(
    x: Tensor,
    weight: Tensor,
    bias_F: Tensor | None = None,
    counts_E: Tensor | None = None,
    out: Tensor | None = None,
    recipe: Recipe | None = None,
) -> Tensor:
    """Compute y; written into `out` (contiguous, not grouped) if given. The bias of a grouped matmul is (E, F)."""
    weight, fp8 = _operand(weight, recipe, x.dtype)
    if isinstance(recipe, InputMask):
        x = recipe.drop(x)
    if counts_E is not None:
        y_RF = _grouped(x, weight, counts_E, fp8, FORWARD)
        return y_RF if bias_F is None else y_RF + rows_of_experts(bias_F, counts_E, y_RF.shape[0])
    if fp8 is not None:
        y = fp8.forward(x, weight)
        y = y if bias_F is None else y + bias_F
        return y if out is None else out.copy_(y)
    if out is None:
        return F.linear(x, weight, bias_F)
    x_ND, out_NF = x.flatten(0, -2), out.flatten(0, -2)
    torch.mm(x_ND, weight.T, out=out_NF) if bias_F is None else torch.addmm(bias_F, x_ND, weight.T, out=out_NF)
    return out


def input_gradient(
    dy: Tensor,
    weight: Tensor,
    counts_E: Tensor | None = None,
    add_to: Tensor | None = None,
    recipe: Recipe | None = None,
) -> Tensor:
    """Compute dx; added to `add_to` (contiguous, not grouped) in place if given."""
    weight, fp8 = _operand(weight, recipe, dy.dtype)
    if counts_E is not None:
        return _grouped(dy, weight.mT, counts_E, fp8, FORWARD if fp8 is None else fp8.gradient)
    if isinstance(recipe, InputMask):
        dx = recipe.drop(dy @ weight)
        return dx if add_to is None else add_to.add_(dx)
    if fp8 is not None:
        dx = fp8.input_gradient(dy, weight)
        return dx if add_to is None else add_to.add_(dx)
    if add_to is None:
        return dy @ weight
    add_to.flatten(0, -2).addmm_(dy.flatten(0, -2), weight)
    return add_to


def weight_gradient(
    dy: Tensor,
    x: Tensor,
    counts_E: Tensor | None = None,
    add_to: Tensor | None = None,
    recipe: Recipe | None = None,
) -> Tensor:
    """Compute dW; added in place to `add_to`, which may have a wider type, if given. Without rows an expert gets 0."""
    if counts_E is not None:
        dweight_EFD = grouped_weight_gradient(dy, x, counts_E)
        return dweight_EFD if add_to is None else add_to.add_(dweight_EFD)
    if isinstance(recipe, InputMask):
        x = recipe.drop(x)
    if isinstance(recipe, Fp8Linear) and recipe.settings.weight_gradient:
        dweight = recipe.weight_gradient(dy, x)
        return dweight if add_to is None else add_to.add_(dweight)
    dy_FN, x_ND = dy.flatten(0, -2).T, x.flatten(0, -2)
    if add_to is None:
        return dy_FN @ x_ND
    return add_to.addmm_(dy_FN, x_ND) if add_to.dtype == x_ND.dtype else add_to.add_(dy_FN @ x_ND)


def _operand(weight: Tensor, recipe: Recipe | None, dtype: torch.dtype) -> tuple[Tensor, Fp8Linear | None]:
    """Return the weight as a matmul reads it, and the recipe of fp8, if there is one."""
    if isinstance(recipe, StoredRow):
        return decode(weight, recipe, dtype), None
    return weight, recipe if isinstance(recipe, Fp8Linear) else None


def for_pass(recipe: Recipe | None) -> Recipe | None:
    """Return the recipe for one forward pass and its backward pass; see `Fp8Linear.for_pass`."""
    return recipe.for_pass() if isinstance(recipe, Fp8Linear) else recipe


def for_backward(recipe: Recipe | None) -> Recipe | None:
    """Return the recipe for one backward pass; see `Fp8Linear.for_backward`."""
    return recipe.for_backward() if isinstance(recipe, Fp8Linear) else recipe


def _grouped(x_RK: Tensor, weight_ENK: Tensor, counts_E: Tensor, fp8: Fp8Linear | None, dtype: torch.dtype) -> Tensor:
    """Compute x W_e^T for the rows of each expert; with `fp8` the rows are rounded to `dtype`."""
    if fp8 is None:
        return grouped_matmul(x_RK, weight_ENK, counts_E)
    return grouped_matmul(*fp8.grouped(x_RK, weight_ENK, dtype), counts_E).to(x_RK.dtype)


Defer = Callable[[Tensor, Tensor, Tensor, Tensor | None, Recipe | None], None]
"""Takes (weight, dy, x, counts_E, recipe); computes the weight's gradient later and adds it to its `.grad`."""

defer: Defer | None = None
"""While set, backward passes call it instead of computing the gradients of weights."""


def weight_gradient_or_defer(
    weight: Tensor, dy: Tensor, x: Tensor, counts_E: Tensor | None = None, recipe: Recipe | None = None
) -> Tensor | None:
    """Return dW as the result of a backward pass, or None if it is deferred."""
    # A compiled backward pass cannot be split, so it does not read `defer`, which changes at run time.
    if torch.compiler.is_compiling() or defer is None:
        return weight_gradient(dy, x, counts_E, recipe=recipe)
    defer(weight, dy, x, counts_E, recipe)
    return None


def linear(
    x: Tensor,
    weight: Tensor,
    bias_F: Tensor | None = None,
    counts_E: Tensor | None = None,
    *,
    saves_first: bool = False,
    recipe: Recipe | None = None,
) -> Tensor:
    """Return y, differentiable. `saves_first`: save the tensors for the backward pass before the matmul, not after."""
    if not torch.is_grad_enabled():
        return forward(x, weight, bias_F, counts_E, recipe=recipe)
    saves_first, recipe = saves_first and not torch.compiler.is_compiling(), for_pass(recipe)
    y: Tensor = _LinearFunction.apply(x, weight, bias_F, counts_E, saves_first, recipe)
    if saves_first:
        with torch.no_grad():
            forward(x, weight, bias_F, out=y, recipe=recipe)
    return y


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias_F: Tensor | None,
        counts_E: Tensor | None,
        saves_first: bool,
        recipe: Recipe | None,
    ) -> Tensor:
        # The weight itself, next to the saved tensor: activation checkpointing replaces the saved tensor.
        ctx.weight, ctx.recipe = weight, recipe
        # A frozen weight needs no gradient, so its input is not kept for it.
        ctx.save_for_backward(x if weight.requires_grad else None, weight, counts_E)
        if saves_first:
            return x.new_empty(*x.shape[:-1], weight.shape[0])
        return forward(x, weight, bias_F, counts_E, recipe=recipe)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, counts_E = ctx.saved_tensors
        dy = grads[0] if counts_E is None else grads[0].contiguous()
        recipe, wanted = for_backward(ctx.recipe), ctx.needs_input_grad[1]
        dx = input_gradient(dy, weight, counts_E, recipe=recipe) if ctx.needs_input_grad[0] else None
        dweight = weight_gradient_or_defer(ctx.weight, dy, x, counts_E, recipe) if wanted else None
        dbias = _bias_gradient(dy, counts_E) if ctx.needs_input_grad[2] else None
        return dx, dweight, dbias, None, None, None


def _bias_gradient(dy: Tensor, counts_E: Tensor | None) -> Tensor:
    """Return db: the sum of dy over all rows, or over the rows of each expert."""
    return dy.flatten(0, -2).sum(0) if counts_E is None else grouped_sum(dy, counts_E)


def rows_of_experts(bias_EF: Tensor, counts_E: Tensor, n_rows: int) -> Tensor:
    """Return for each row of a grouped matmul the vector of its expert, (R, F); 0 after the last counted row."""
    places_R = torch.arange(n_rows, device=counts_E.device)
    expert_R = torch.searchsorted(counts_E.cumsum(0), places_R, right=True)
    return F.pad(bias_EF, (0, 0, 0, 1)).index_select(0, expert_R)


class Adapted(nn.Module):
    """A module that may have low-rank adapters (`model/lora_sizes.py`)."""

    lora_scale = 0.0
    """The factor s; 0: there is no adapter."""

    def add_adapter(self, attribute: str, parameter: nn.Parameter, scale: float) -> None:
        """Add a parameter of an adapter."""
        setattr(self, attribute, parameter)
        self.lora_scale = scale


class Adaptable(Adapted):
    """A module with a matmul y = x W^T that may have an adapter: y + s (x A^T) B^T, with A (r, D) and B (F, r); with
    DoRA the sum is multiplied by (|W| + d) / |W + s B A|, (F,)."""

    weight: Tensor
    lora_a: nn.Parameter
    lora_b: nn.Parameter
    lora_magnitude: nn.Parameter
    """d of DoRA, if `lora.dora`: by how much the norm of a row differs from the base's. As a difference it is exact
    where parameters are cast to 16 bits."""
    dropout: InputDropout | None = None
    """The dropout of the adapter's input, if it has one."""

    def take_adapter(self, other: "Adaptable", **changes: Any) -> None:
        """Take the adapter of a module that this one replaces, if it has one. `changes`: fields of the dropout."""
        for attribute in (name for name in ("lora_a", "lora_b", "lora_magnitude") if hasattr(other, name)):
            self.add_adapter(attribute, getattr(other, attribute), other.lora_scale)
        self.dropout = None if other.dropout is None else replace(other.dropout, **changes)

    def input_mask(self) -> InputMask | None:
        """Return the mask of the adapter's input in the block that runs; None if nothing is dropped."""
        return self.dropout.mask() if self.dropout is not None and self.training else None

    def low_rank(self, x: Tensor) -> Tensor | None:
        """Return the adapter's output s (x A^T) B^T, or None if there is no adapter."""
        if not self.lora_scale:
            return None
        mask = self.input_mask()
        if mask is not None and torch.compiler.is_compiling():  # the compiler chooses what it computes again
            x, mask = mask.drop(x), None
        return self.widen(linear(x, _local(self.lora_a), recipe=mask))

    def widen(self, z: Tensor) -> Tensor:
        """Return s z B^T for z = x A^T."""
        return linear(z * self.lora_scale, _local(self.lora_b))

    def magnitude_change(
        self, recipe: Recipe | None, sum_over_ranks: Callable[[Tensor], Tensor] = lambda squares_2F: squares_2F
    ) -> Tensor | None:
        """Return (|W| + d) / |W + s B A| - 1 of each output, (F,), or None without DoRA. It is 0 at the start of a run.
        Norms are constants in the backward pass (Liu et al., arXiv 2402.09353, section 4.3).

        `recipe`: of W. `sum_over_ranks`: sums the squares of rows, where a rank has only some columns.
        """
        if not hasattr(self, "lora_magnitude"):
            return None
        magnitude_F, a_rD, b_Fr = (_local(weight) for weight in (self.lora_magnitude, self.lora_a, self.lora_b))
        with torch.no_grad():
            weight_FD, _ = _operand(_local(self.weight), recipe, a_rD.dtype)
            squares_2F = sum_over_ranks(squares_of_rows(weight_FD, a_rD, b_Fr * self.lora_scale))
            before_F, norms_F = squares_2F.clamp(min=torch.finfo(squares_2F.dtype).tiny).sqrt()
        return ((before_F - norms_F + magnitude_F) / norms_F).to(magnitude_F.dtype)


def squares_of_rows(weight_FD: Tensor, a_rD: Tensor, b_Fr: Tensor) -> Tensor:
    """Return the squared norm of each row of W, and of W + B A, (2, F), in 32 bits or wider, without the product B A:
    |w + b A|^2 = |w|^2 + b (2 A w + A A^T b)."""
    wide = torch.promote_types(weight_FD.dtype, torch.float32)
    aw_Fr, wide_a_rD, wide_b_Fr = (weight_FD @ a_rD.T).to(wide), a_rD.to(wide), b_Fr.to(wide)
    squares_F = torch.linalg.vector_norm(weight_FD, dim=-1, dtype=wide).square()
    added_F = (wide_b_Fr * (2 * aw_Fr + wide_b_Fr @ (wide_a_rD @ wide_a_rD.T))).sum(-1)
    return torch.stack((squares_F, squares_F + added_F))


def with_magnitude(y: Tensor, change_F: Tensor, bias_F: Tensor | None = None) -> Tensor:
    """Return y with a `magnitude_change`, plus the bias."""
    scaled = torch.addcmul(y, y, change_F)
    return scaled if bias_F is None else scaled + bias_F


def _local(weight: Tensor) -> Tensor:
    """Return this rank's shard of a weight, differentiable."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


class Linear(Adaptable, nn.Linear):
    """`nn.Linear` that uses the matmuls of this file."""

    saves_first = False
    """Set for blocks under activation checkpointing: recomputation stops when all tensors are saved again, and so skips
    the last matmul."""
    recipe: Recipe | None = None
    """The recipe of the matmuls, or None."""

    def forward(self, x: Tensor) -> Tensor:
        also, change_F = self.low_rank(x), self.magnitude_change(self.recipe)
        if also is not None and change_F is not None:  # the product keeps its input, so no matmul is skipped
            return with_magnitude(linear(x, self.weight, recipe=self.recipe) + also, change_F, self.bias)
        y = linear(x, self.weight, self.bias, saves_first=self.saves_first, recipe=self.recipe)
        return y if also is None else y + also


def has_grouped_mm(x: Tensor, *widths: int) -> bool:
    """Return whether PyTorch's grouped matmul supports this type: 16- and 32-bit floats, in rows whose bytes are a
    multiple of 16 (torch 2.13 raises for 64 bits and for other rows)."""
    aligned = all(width * x.element_size() % 16 == 0 for width in widths)
    return x.dtype in (torch.bfloat16, torch.float16, torch.float32) and aligned


# Custom operators hide two limits of PyTorch's grouped matmul: it rejects 32-bit fake tensors (and so fails under
# torch.compile), and it does not support 64 bits, for which a loop reads the counts on the host.


@torch.library.custom_op("shardwright::grouped_matmul", mutates_args=())
def grouped_matmul(x_RD: Tensor, weight_EFD: Tensor, counts_E: Tensor) -> Tensor:
    """Return x W_e^T for the rows of each expert e; (R, D) -> (R, F). Not differentiable."""
    if has_grouped_mm(x_RD, *weight_EFD.shape[1:]):
        return grouped_mm(x_RD, weight_EFD.mT, offs=counts_E.cumsum(0, dtype=torch.int32))
    y_RF = x_RD.new_empty(x_RD.shape[0], weight_EFD.shape[1])
    start = 0
    for weight_FD, count in zip(weight_EFD, counts_E.tolist(), strict=True):
        torch.mm(x_RD[start : start + count], weight_FD.T, out=y_RF[start : start + count])
        start += count
    return y_RF


replace_operator(torch.ops.shardwright.grouped_matmul.default)


@torch.library.custom_op("shardwright::grouped_weight_gradient", mutates_args=())
def grouped_weight_gradient(dy_RF: Tensor, x_RD: Tensor, counts_E: Tensor) -> Tensor:
    """Return dy^T x over the rows of each expert; (R, F), (R, D) -> (E, F, D), 0 for an expert without rows."""
    if has_grouped_mm(x_RD, dy_RF.shape[1], x_RD.shape[1]):
        return grouped_mm(dy_RF.T, x_RD, offs=counts_E.cumsum(0, dtype=torch.int32))
    dweight_EFD = x_RD.new_empty(counts_E.shape[0], dy_RF.shape[1], x_RD.shape[1])
    start = 0
    for dweight_FD, count in zip(dweight_EFD, counts_E.tolist(), strict=True):
        torch.mm(dy_RF[start : start + count].T, x_RD[start : start + count], out=dweight_FD)
        start += count
    return dweight_EFD


@torch.library.custom_op("shardwright::grouped_sum", mutates_args=())
def grouped_sum(dy_RF: Tensor, counts_E: Tensor) -> Tensor:
    """Return the sum of the rows of each expert; (R, F) -> (E, F), 0 for an expert without rows."""
    ones_R1 = dy_RF.new_ones(dy_RF.shape[0], 16 // dy_RF.element_size())  # rows of 16 bytes, for the grouped matmul
    return grouped_weight_gradient(dy_RF, ones_R1, counts_E)[..., 0].contiguous()


@grouped_sum.register_fake
def _(dy_RF: Tensor, counts_E: Tensor) -> Tensor:
    return dy_RF.new_empty(counts_E.shape[0], dy_RF.shape[1])


@grouped_matmul.register_fake
def _(x_RD: Tensor, weight_EFD: Tensor, counts_E: Tensor) -> Tensor:
    return x_RD.new_empty(x_RD.shape[0], weight_EFD.shape[1])


@grouped_weight_gradient.register_fake
def _(dy_RF: Tensor, x_RD: Tensor, counts_E: Tensor) -> Tensor:
    return x_RD.new_empty(counts_E.shape[0], dy_RF.shape[1], x_RD.shape[1])
