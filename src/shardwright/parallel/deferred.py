"""Weight gradients computed later than the rest of the backward pass, as a zero-bubble schedule asks (op W).

The backward pass of a linear has two matmuls, dx = dy W and dW = dy^T x. The stage before waits for dx alone, so a
schedule may put dW where a rank would otherwise be idle (Qi et al., arXiv 2401.10241, section 2). While `hold` is on,
every backward pass leaves its dW with a `WeightGradients` instead of computing it (`model/matmul.py`); `take` gives
those, to be computed once. Everything else (norms, biases, embeddings, routers) is cheap and is computed in the first
half; so is all of a block that is compiled, whose backward pass is one piece.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from shardwright.model import matmul


class WeightGradients:
    """The dW of one pipeline stage that are still to be computed."""

    def __init__(self) -> None:
        self._left: list[tuple[Tensor, Tensor, Tensor, Tensor | None]] = []

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Backward passes in here leave their weight gradients for later; one stage's at a time."""
        assert matmul.defer is None
        matmul.defer = self._leave
        try:
            yield
        finally:
            matmul.defer = None

    def _leave(self, weight: Tensor, dy: Tensor, x: Tensor, counts_E: Tensor | None) -> None:
        # Detached, or the whole graph would stay, and with it the stage's input and its gradient.
        self._left.append((weight, dy.detach(), x.detach(), counts_E))

    def take(self) -> Callable[[], None]:
        """What was left since the last call, as a function that adds it to the weights' `.grad`."""
        left, self._left = self._left, []

        def compute() -> None:
            while left:
                _add_gradient(*left.pop())

        return compute


@torch.no_grad()
def _add_gradient(weight: Tensor, dy: Tensor, x: Tensor, counts_E: Tensor | None) -> None:
    if not weight.is_leaf:  # the plain tensor under a DTensor: autograd knows the way to the parameter
        torch.autograd.backward(weight, matmul.weight_gradient(dy, x, counts_E))
    elif weight.grad is None:
        weight.grad = matmul.weight_gradient(dy, x, counts_E)
    else:
        matmul.weight_gradient(dy, x, counts_E, add_to=weight.grad)
