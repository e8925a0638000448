"""Experts, whose weights are stacked in one tensor per matrix, and the dispatch and combine of tokens.

    rows_RD = dispatch(x_ND, rows)             one row for each pair of a token and its expert, sorted by expert
    out_RD = experts(rows_RD, counts_E)        the first counts_E[0] rows through expert 0, and so on
    y_ND = combine(out_RD, weights_NK, rows)   the weighted sum of each token's rows

With expert parallelism all-to-alls send the rows to the ranks of their experts after dispatch, and back before combine.
No step synchronises with the device: counts stay a tensor, and every shape follows from N and K.

Shapes: N tokens of all sequences, K experts of a token, R = N K rows, E experts, D model, F ffn.
"""

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from shardwright.model.feed_forward import ACTIVATIONS
from shardwright.model.matmul import Adapted, Recipe, linear
from shardwright.model.recompute import part
from shardwright.model.sizes import GATED
from shardwright.model.spec import ModelSpec


class ExpertRows(NamedTuple):
    """The permutation between pairs of a token and an expert and the rows sorted by expert."""

    order_R: Tensor
    """For each row its pair, token * K + choice; int64. Dropped pairs come last, after all experts."""
    slots_NK: Tensor
    """For each pair its row; for a dropped pair row 0, which belongs to another pair and gets weight 0."""
    kept_NK: Tensor | None
    """The pairs that are not dropped; None if none is dropped."""


def sort_rows(experts_NK: Tensor, kept_NK: Tensor | None, n_experts: int) -> ExpertRows:
    """Sort the pairs by expert, and for each expert by token. `kept_NK` is False for dropped pairs."""
    keys_NK = experts_NK if kept_NK is None else experts_NK.masked_fill(~kept_NK, n_experts)
    order_R = keys_NK.flatten().argsort(stable=True)
    places_R = torch.arange(order_R.numel(), device=order_R.device)
    slots_NK = torch.empty_like(order_R).scatter_(0, order_R, places_R).view_as(experts_NK)
    return ExpertRows(order_R, slots_NK if kept_NK is None else slots_NK.masked_fill(~kept_NK, 0), kept_NK)


def dispatch(x_ND: Tensor, rows: ExpertRows, weights_NK: Tensor | None = None) -> Tensor:
    """(N, D) -> (R, D): copy each token to its rows, times the weight of the pair if weights are given."""
    copied: Tensor = _Dispatch.apply(x_ND, weights_NK, *rows)
    return copied


def combine(y_RD: Tensor, weights_NK: Tensor | None, rows: ExpertRows) -> Tensor:
    """(R, D) -> (N, D): sum over a token's K rows of weight * row, or of the rows, in the type of the rows.

    Dropped pairs must have weight 0; the values of their rows are not used.
    """
    summed: Tensor = _Combine.apply(y_RD, weights_NK, *rows)
    return summed


def _weighted_sum(y_RD: Tensor, weights_NK: Tensor | None, slots_NK: Tensor, kept_NK: Tensor | None) -> Tensor:
    """Return for each token the sum of weight * row, or of the rows, as a batched matmul of K weights by K rows: it
    accumulates 16-bit rows in fp32, is deterministic, and is faster than a sum or an indexed addition (0.6 ms against
    1.7 ms and 1.1 ms for 2048 tokens of 256 with K = 2, one thread)."""
    rows_NKD = y_RD.index_select(0, slots_NK.flatten()).unflatten(0, slots_NK.shape)
    if kept_NK is not None:  # row 0 is undefined if all pairs are dropped
        rows_NKD.masked_fill_(~kept_NK.unsqueeze(2), 0)
    weights_NK = torch.ones_like(slots_NK) if weights_NK is None else weights_NK
    return (weights_NK.to(y_RD.dtype).unsqueeze(1) @ rows_NKD).squeeze(1)


def _copied(x_ND: Tensor, order_R: Tensor, slots_NK: Tensor) -> Tensor:
    """Return each token in its rows."""
    return x_ND.index_select(0, order_R // slots_NK.shape[1])


def _weigh(x_RD: Tensor, weights_NK: Tensor, order_R: Tensor) -> Tensor:
    """Multiply rows by the weights of their pairs, in place, and return them."""
    weights_R = weights_NK.flatten().index_select(0, order_R).to(x_RD.dtype)
    return x_RD.mul_(weights_R.unsqueeze(1))


def _weight_gradient(of_RD: Tensor, by_RD: Tensor, weights_NK: Tensor, slots_NK: Tensor) -> Tensor:
    """Return for each pair the product of two rows, (N, K)."""
    dots_R = (of_RD.unsqueeze(1) @ by_RD.unsqueeze(2)).flatten()
    return dots_R.index_select(0, slots_NK.flatten()).view_as(slots_NK).to(weights_NK.dtype)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weights_NK: Tensor | None,
        order_R: Tensor,
        slots_NK: Tensor,
        kept_NK: Tensor | None,
    ) -> Tensor:
        scaled = () if weights_NK is None else (x_ND, weights_NK, order_R)
        ctx.save_for_backward(slots_NK, kept_NK, *scaled)
        x_RD = _copied(x_ND, order_R, slots_NK)
        return x_RD if weights_NK is None else _weigh(x_RD, weights_NK, order_R)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        slots_NK, kept_NK, *scaled = ctx.saved_tensors
        weights_NK = dweights_NK = None
        if scaled:
            x_ND, weights_NK, order_R = scaled
            dweights_NK = _weight_gradient(grads[0], _copied(x_ND, order_R, slots_NK), weights_NK, slots_NK)
        return _weighted_sum(grads[0], weights_NK, slots_NK, kept_NK), dweights_NK, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y_RD: Tensor, weights_NK: Tensor | None, order_R: Tensor, slots_NK: Tensor, kept_NK: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(order_R, slots_NK, *(() if weights_NK is None else (y_RD, weights_NK)))
        return _weighted_sum(y_RD, weights_NK, slots_NK, kept_NK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        order_R, slots_NK, *weighted = ctx.saved_tensors
        d_RD = _copied(grads[0], order_R, slots_NK)
        if not weighted:
            return d_RD, None, None, None, None
        y_RD, weights_NK = weighted
        dweights_NK = _weight_gradient(d_RD, y_RD, weights_NK, slots_NK)
        return _weigh(d_RD, weights_NK, order_R), dweights_NK, None, None, None


class ExpertMatrix(NamedTuple):
    """One matrix of all experts with its bias and its adapter, A (E, r, D) and B (E, F, r), if it has them."""

    weight: Tensor
    bias: Tensor | None
    lora_a: Tensor | None
    lora_b: Tensor | None
    scale: float

    @property
    def tensors(self) -> list[Tensor]:
        """The parameters."""
        return [tensor for tensor in self[:4] if tensor is not None]

    def multiply(self, x_RD: Tensor, counts_E: Tensor, recipe: Recipe | None) -> Tensor:
        """Return x W^T + b + s (x A^T) B^T for the rows of each expert, (R, D) -> (R, F), in grouped matmuls."""
        y_RF = linear(x_RD, self.weight, self.bias, counts_E, recipe=recipe)
        if self.lora_a is None or self.lora_b is None:
            return y_RF
        z_Rr = linear(x_RD, self.lora_a, None, counts_E)
        return y_RF + linear(z_Rr * self.scale, self.lora_b, None, counts_E)


class Experts(Adapted):
    """E networks like `FeedForward`: down(act(gate x) * up x), or down(act(up x)).

    The number of experts follows from the shapes of the matrices, so the module also works with a shard of the experts.
    """

    recipe: Recipe | None = None
    """The recipe of the matmuls of gate and up, or None."""
    down_recipe: Recipe | None = None
    """The recipe of the last matmul, or None."""

    def __init__(self, n_experts: int, d_model: int, d_ffn: int, activation: str, bias: bool = False) -> None:
        super().__init__()
        self.activate = ACTIVATIONS[activation]
        gated = activation in GATED
        self.gate = nn.Parameter(torch.empty(n_experts, d_ffn, d_model)) if gated else None
        self.up = nn.Parameter(torch.empty(n_experts, d_ffn, d_model))
        self.down = nn.Parameter(torch.empty(n_experts, d_model, d_ffn))
        self.gate_bias = nn.Parameter(torch.empty(n_experts, d_ffn)) if gated and bias else None
        self.up_bias = nn.Parameter(torch.empty(n_experts, d_ffn)) if bias else None
        self.down_bias = nn.Parameter(torch.empty(n_experts, d_model)) if bias else None

    def forward(self, x_RD: Tensor, counts_E: Tensor) -> Tensor:
        """(R, D) -> (R, D); rows are sorted by expert, and `counts_E` (integers) counts the rows of each expert. The
        outputs of rows after the last counted one are undefined, and those rows have no gradient."""
        # With expert parallelism the parameters are this rank's during the forward pass only.
        recipe, activate = self.recipe, self.activate
        matrices = [self._matrix(name) for name in (("up",) if self.gate is None else ("gate", "up"))]

        def inner(x_RD: Tensor) -> Tensor:
            outputs = [matrix.multiply(x_RD, counts_E, recipe) for matrix in matrices]
            return cast(Tensor, part("activation", activate, *outputs))

        weights = [tensor for matrix in matrices for tensor in matrix.tensors]
        inner_RF = part("experts", inner, x_RD, weights=weights)
        return self._matrix("down").multiply(inner_RF, counts_E, self.down_recipe)

    def _matrix(self, name: str) -> ExpertMatrix:
        """Return a matrix with its bias and its adapter, if it has them."""
        bias, lora_a, lora_b = (getattr(self, f"{name}_{which}", None) for which in ("bias", "lora_a", "lora_b"))
        return ExpertMatrix(getattr(self, name), bias, lora_a, lora_b, self.lora_scale)


def build_experts(spec: ModelSpec) -> Experts:
    """Return the experts of one layer of a spec that has experts."""
    assert spec.moe is not None
    return Experts(spec.moe.n_experts, spec.d_model, spec.moe.d_ffn, spec.activation, spec.moe.bias)
