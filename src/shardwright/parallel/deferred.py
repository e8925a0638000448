"""Defers weight gradients to a later action (op W) than the rest of the backward pass, for zero-bubble schedules.

The backward pass of a linear has two matmuls, dx = dy W and dW = dy^T x. The previous stage needs only dx, so a
schedule may run dW where the rank would otherwise be idle (Qi et al., arXiv 2401.10241, section 2). While `hold` is
active, backward passes hand the inputs of dW to a `WeightGradients` instead of computing dW (`model/matmul.py`); `take`
returns a function that computes them. The gradients of norms, biases, embeddings and routers are cheap and are computed
in I; so are all gradients of a compiled block, whose backward pass cannot be split.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from shardwright.model import matmul
from shardwright.model.fp8 import Fp8Linear


class WeightGradients:
    """The deferred weight gradients (dW) of one pipeline stage."""

    def __init__(self) -> None:
        self._left: list[tuple[Tensor, Tensor, Tensor, Tensor | None, Fp8Linear | None]] = []

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Context in which backward passes defer their weight gradients; for one stage at a time."""
        assert matmul.defer is None
        matmul.defer = self._leave
        try:
            yield
        finally:
            matmul.defer = None

    def _leave(self, weight: Tensor, dy: Tensor, x: Tensor, counts_E: Tensor | None, fp8: Fp8Linear | None) -> None:
        # Detached: otherwise dy and x would keep the autograd graph alive, with the stage's input and its gradient.
        self._left.append((weight, dy.detach(), x.detach(), counts_E, fp8))

    def take(self) -> Callable[[], None]:
        """Return a function that computes the gradients deferred since the last call and adds them to `.grad`."""
        left, self._left = self._left, []

        def compute() -> None:
            while left:
                _add_gradient(*left.pop())

        return compute


@torch.no_grad()
def _add_gradient(weight: Tensor, dy: Tensor, x: Tensor, counts_E: Tensor | None, fp8: Fp8Linear | None) -> None:
    if not weight.is_leaf:  # the local tensor of a DTensor: autograd passes the gradient on to the parameter
        torch.autograd.backward(weight, matmul.weight_gradient(dy, x, counts_E, fp8=fp8))
    elif weight.grad is None:
        weight.grad = matmul.weight_gradient(dy, x, counts_E, fp8=fp8)
    else:
        matmul.weight_gradient(dy, x, counts_E, add_to=weight.grad, fp8=fp8)
