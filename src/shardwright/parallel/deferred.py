"""Weight gradients computed later than the rest of the backward pass, as a zero-bubble schedule asks (op W).

The backward pass of a matrix product has two halves, dx = dy W and dW = dy^T x. Only dx is waited for by the stage
before, so a schedule may put dW where a rank would otherwise be idle (Qi et al., arXiv 2401.10241, section 2). While
`hold` is on, products leave their dW with a `WeightGradients` instead of computing it; `take` gives what was left,
to be called once. Everything else (norms, biases, embeddings, routers) is cheap and stays in the first half.

Shapes: N = B x T rows of tokens, D inputs, F outputs; of grouped products R rows sorted by expert, E experts.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.model.experts import Experts, grouped_product, weights_product


class WeightGradients:
    """The dW of one pipeline stage that are still to be computed."""

    def __init__(self) -> None:
        self._holding = False
        self._left: list[tuple[Tensor, Tensor, Tensor, Tensor | None]] = []

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Backward passes in here leave their weight gradients for later."""
        self._holding = True
        try:
            yield
        finally:
            self._holding = False

    def product(self, weight: Tensor, dy: Tensor, x: Tensor, counts_E: Tensor | None = None) -> Tensor | None:
        """dy^T x, the gradient of `weight` (F, D), of dy_NF and x_ND; of `weight` (E, F, D), where `counts_E` says how
        many of the rows dy_RF and x_RD are for each expert. None if it is left for later."""
        if not self._holding:
            return _weight_gradient(dy, x, counts_E)
        # Detached, or the whole graph would stay, and with it the stage's input and its gradient.
        self._left.append((weight, dy.detach(), x.detach(), counts_E))
        return None

    def take(self) -> Callable[[], None]:
        """What was left since the last call, as a function that adds it to the weights' `.grad`."""
        left, self._left = self._left, []

        def compute() -> None:
            while left:
                _add_product(*left.pop())

        return compute


def _weight_gradient(dy: Tensor, x: Tensor, counts_E: Tensor | None) -> Tensor:
    return dy.T @ x if counts_E is None else weights_product(dy, x, counts_E)


@torch.no_grad()
def _add_product(weight: Tensor, dy: Tensor, x: Tensor, counts_E: Tensor | None) -> None:
    if not weight.is_leaf:  # the plain tensor under a DTensor: autograd knows the way to the parameter
        torch.autograd.backward(weight, _weight_gradient(dy, x, counts_E))
    elif weight.grad is None:
        weight.grad = _weight_gradient(dy, x, counts_E)
    elif counts_E is None:
        weight.grad.addmm_(dy.T, x)
    else:
        weight.grad.add_(weights_product(dy, x, counts_E))


AT_ONCE = WeightGradients()
"""For models whose backward pass is in one piece: nothing is ever held."""


def defer_products(model: nn.Module, gradients: WeightGradients) -> None:
    """Let linears and experts of a model, in place, leave their weights' gradients with `gradients` when that holds."""
    for module in list(model.modules()):
        if isinstance(module, Experts):
            module.product = partial(grouped_product, weight_gradient=gradients.product)
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                setattr(module, name, DeferredLinear(child, gradients))


class DeferredLinear(nn.Module):
    """A linear whose weight's gradient may be computed later; (..., D) -> (..., F)."""

    def __init__(self, linear: nn.Linear, gradients: WeightGradients) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.gradients = gradients

    def forward(self, x: Tensor) -> Tensor:
        return deferred_linear(x, self.weight, self.bias, self.gradients)


def deferred_linear(x: Tensor, weight_FD: Tensor, bias_F: Tensor | None, gradients: WeightGradients) -> Tensor:
    """x W^T + b; (..., D) -> (..., F)."""
    y: Tensor = _Linear.apply(x, weight_FD, bias_F, gradients)
    return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_FD: Tensor, bias_F: Tensor | None, gradients: WeightGradients) -> Tensor:
        # The weight itself, and not as it is saved: where a block is computed again, what is saved is a copy.
        ctx.gradients, ctx.weight, ctx.has_bias = gradients, weight_FD, bias_F is not None
        ctx.save_for_backward(x)
        return F.linear(x, weight_FD, bias_F)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        dy_NF = dy.flatten(0, -2)
        dx = dy @ ctx.weight if ctx.needs_input_grad[0] else None
        dweight = ctx.gradients.product(ctx.weight, dy_NF, x.flatten(0, -2))
        return dx, dweight, dy_NF.sum(0) if ctx.has_bias else None, None
