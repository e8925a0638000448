"""Dropout of the embedding, of residual branches and of the inputs of adapters, with the same masks for every layout.

Attention probabilities are never dropped: a fused attention kernel does not store them, so its mask could not depend
on the position alone, and would differ between layouts.

Linears get no keys as arguments. `draw` sets the keys and positions for the block that runs next, and mechanisms that
run a block, or a part of it, again in the backward pass set the draw of its forward pass (`drawn_again`).

Shapes: B sequences, T positions, D features.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwright.model.random import keep_mask, keep_probability, matrix_keys


def drop(x_BTD: Tensor, site_keys_B: Tensor, positions_T: Tensor, p: float, first: int = 0) -> Tensor:
    """Return `x_BTD` with dropout, whose mask is a function of key, global position and feature. `first`: the global
    number of its first feature."""
    keep_BTD = keep_mask(site_keys_B, positions_T, x_BTD.shape[-1], p, first)
    return torch.where(keep_BTD, x_BTD * (1 / keep_probability(p)), 0.0)


class KeyedDropout(nn.Module):
    """Drops elements with probability `p` and divides the others by the probability that an element is kept."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x_BTD: Tensor, site_keys_B: Tensor | None, positions_T: Tensor) -> Tensor:
        """Return `drop` of `x_BTD`; unchanged in evaluation, with p = 0, or without keys."""
        if site_keys_B is None or self.p == 0 or not self.training:
            return x_BTD
        return drop(x_BTD, site_keys_B, positions_T, self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}"


class Draw(NamedTuple):
    """The random keys of a layer's sequences, (B,), and the global positions of the tokens, (T,) or (B, T)."""

    keys_B: Tensor
    positions_T: Tensor


_draw: Draw | None = None
"""The draw of the block that runs."""


def draw(site_keys_2B: Tensor | None, positions_T: Tensor) -> None:
    """Set the keys and positions with which adapters of the next block drop their inputs; without keys nothing is
    dropped."""
    global _draw
    _draw = None if site_keys_2B is None else Draw(site_keys_2B[0], positions_T)


def drawn_again(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Return `compute`, which has the draw of now whenever it is called."""
    of_now = _draw
    if of_now is None:
        return compute

    def run(*args: Any, **kwargs: Any) -> Any:
        global _draw
        before, _draw = _draw, of_now
        try:
            return compute(*args, **kwargs)
        finally:
            _draw = before

    return run


@dataclass(frozen=True, eq=False)
class InputMask:
    """Dropout of one matmul's input, for one forward pass and its backward pass."""

    drawn: Draw
    p: float
    first: int

    def drop(self, x_BTD: Tensor) -> Tensor:
        """Return the input with dropout; of a gradient of the dropped input, the gradient of the input."""
        return drop(x_BTD, *self.drawn, self.p, self.first)


@dataclass(frozen=True, kw_only=True)
class InputDropout:
    """Dropout of the input of one matrix's adapter.

    `key`: the matrix's `random.matrix_key`; `place`: the draw of the sequences and tokens that the matrix reads, if a
    rank reads others than the block, or in another order; `first`: the global number of the first feature.
    """

    p: float
    key: int
    place: Callable[[Draw], Draw] | None = None
    first: int = 0

    def mask(self) -> InputMask | None:
        """Return the mask for the block that runs; None if nothing is dropped."""
        if _draw is None:
            return None
        placed = _draw if self.place is None else self.place(_draw)
        return InputMask(Draw(matrix_keys(placed.keys_B, self.key), placed.positions_T), self.p, self.first)
