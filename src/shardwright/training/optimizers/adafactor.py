"""Adafactor (Shazeer & Stern, arXiv 1804.04235, algorithms 4 and 5): for the second moment of a matrix only the means
over its rows and columns are stored, and steps are relative to the size of the parameter.

    beta = 1 - t^-decay_power, t the number of the step
    r <- beta r + (1 - beta) mean of g^2 over each row      c <- beta c + (1 - beta) mean of g^2 over each column
    u = g / sqrt(r c / mean(r))                             of a vector: u = g / sqrt(v), v <- beta v + (1 - beta) g^2
    w <- (1 - lr weight_decay) w - lr max(least_rms, rms(w)) u / max(1, rms(u) / clip_threshold)

As `torch.optim.Adafactor`, with two differences. lr follows the run's schedule and is not bounded by 1 / sqrt(t). r, c
and v are at least 1e-30, as in the paper, instead of the squared epsilon of the data type, which gradients of large
models reach. There is no momentum.

Means and rms values are over whole logical matrices in every layout: the rows of `model.modules` list the matrices that
are stacked in a parameter, and each expert is a matrix. A rank sums over its shard. The sums are all-reduced over the
ranks that shard the summed dimension, for all parameters of a process group together, three times a step.

Shapes: E experts (1 for a plain matrix), R rows and C columns of the shard, P logical matrices stacked in the rows. A
vector is a matrix of one row that keeps the second moment of each element.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwright.model.row import Row
from shardwright.parallel.boxes import local_box
from shardwright.parallel.norm import local_part
from shardwright.parallel.reductions import ReducedOver, groups_that_shard, reduce_together

LEAST_SQUARE = 1e-30


class Adafactor(Optimizer):
    """Adafactor for parameters described by their `rows`; they may be DTensors. A step overwrites the gradients."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, options: Mapping[str, float]) -> None:
        super().__init__(groups, {"lr": lr, **options})
        self._members = [
            _AdafactorParameter(parameter, row, group)
            for group in self.param_groups
            for parameter, row in zip(group["params"], group["rows"], strict=True)
        ]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        members = self._members
        reduce_together(total for member in members for total in member.squares(self.state[member.parameter]))
        reduce_together(total for member in members for total in member.moments())
        reduce_together(total for member in members for total in member.direction())
        for member in members:
            member.apply()


class _AdafactorParameter:
    """The optimizer step of one parameter."""

    def __init__(self, parameter: nn.Parameter, row: Row, group: dict[str, Any]) -> None:
        self.parameter, self.group = parameter, group
        self.is_matrix = parameter.dim() > 1
        local = local_part(parameter.detach())
        self.shape_ERC = (1,) * (3 - local.dim()) + tuple(local.shape)
        # Sizes of the means of the whole parameter: columns, and the rows of each logical matrix.
        self.n_columns, sizes = parameter.shape[-1], [n * row.heads for _, n in row.parts]
        n_rows = sizes or [parameter.shape[-2] if self.is_matrix else 1]
        self.n_rows_P = torch.tensor(n_rows, dtype=local.dtype, device=local.device)
        self.over_rows = groups_that_shard(parameter, -2) if self.is_matrix else ()
        self.over_columns = groups_that_shard(parameter, -1)
        self.part_R = None
        if len(sizes) > 1:
            self.part_R = _part_of_rows(row, local_box(parameter)[1][-2], local.shape[-2], local.device)

    @property
    def over_all(self) -> ReducedOver:
        return (*self.over_rows, *self.over_columns)

    def squares(self, state: dict[str, Tensor]) -> Iterable[tuple[Tensor, ReducedOver]]:
        """Start the step; yield the sums of g^2 and w^2 to all-reduce."""
        weights = local_part(self.parameter)
        gradient = weights.new_zeros(weights.shape) if self.parameter.grad is None else local_part(self.parameter.grad)
        self.w_ERC, self.u_ERC = weights.view(self.shape_ERC), gradient.reshape(self.shape_ERC)
        self.state = {name: local_part(value) for name, value in state.items()}
        self.state["step"] += 1
        self.w_square_EP = self._by_part(self.w_ERC.square().sum(-1))
        yield self.w_square_EP, self.over_all
        if self.is_matrix:
            g2_ERC = self.u_ERC.square()
            self.of_rows_ER, self.of_columns_EPC = g2_ERC.sum(-1), self._by_part(g2_ERC)
            yield self.of_rows_ER, self.over_columns
            yield self.of_columns_EPC, self.over_rows

    def moments(self) -> Iterable[tuple[Tensor, ReducedOver]]:
        """Update the second moment with the gradient; yield the sums of r to all-reduce."""
        # 1 - beta, in the type of the parameter
        fresh = self.state["step"].to(self.w_ERC.dtype) ** -self.group["decay_power"]
        if not self.is_matrix:
            self.state["variance"].lerp_(self.u_ERC.square().view(-1), fresh)
            return
        shape_r, shape_c = self.state["row"].shape, self.state["column"].shape
        self.state["row"].lerp_(self.of_rows_ER.div_(self.n_columns).view(shape_r), fresh)
        self.state["column"].lerp_(self.of_columns_EPC.div_(self.n_rows_P[:, None]).view(shape_c), fresh)
        self.r_mean_EP = self._by_part(self.state["row"].view(self.shape_ERC[:2])) / self.n_rows_P
        yield self.r_mean_EP, self.over_rows

    def direction(self) -> Iterable[tuple[Tensor, ReducedOver]]:
        """Replace the gradient by u in place; yield the sums of u^2 to all-reduce."""
        if self.is_matrix:
            c_EPC = self.state["column"].view(self.shape_ERC[0], len(self.n_rows_P), self.shape_ERC[2])
            r_ER = self.state["row"].view(self.shape_ERC[:2]) / self._for_rows(self.r_mean_EP.clamp(min=LEAST_SQUARE))
            self.u_ERC *= r_ER.clamp(min=LEAST_SQUARE).rsqrt()[..., None]
            self.u_ERC *= self._for_rows(c_EPC.clamp(min=LEAST_SQUARE).rsqrt())
        else:
            self.u_ERC *= self.state["variance"].clamp(min=LEAST_SQUARE).rsqrt()
        self.u_square_EP = self._by_part(self.u_ERC.square().sum(-1))
        yield self.u_square_EP, self.over_all

    def apply(self) -> None:
        """Update the parameter and free the temporaries of the step."""
        group, numel_P = self.group, self.n_rows_P * self.n_columns
        w_rms_EP, u_rms_EP = ((square / numel_P).sqrt() for square in (self.w_square_EP, self.u_square_EP))
        size_EP = w_rms_EP.clamp(min=group["least_rms"]) / (u_rms_EP / group["clip_threshold"]).clamp(min=1)
        self.w_ERC *= 1 - group["lr"] * group["weight_decay"]
        self.w_ERC -= self.u_ERC * self._for_rows(group["lr"] * size_EP)[..., None]
        for name in ("w_ERC", "u_ERC", "state", "of_rows_ER", "of_columns_EPC"):
            self.__dict__.pop(name, None)

    def _by_part(self, x_ER: Tensor) -> Tensor:
        """Return (E, R, ...) summed over the rows of each logical matrix: (E, P, ...)."""
        if self.part_R is None:
            return x_ER.sum(1, keepdim=True)
        x_EP = x_ER.new_zeros(x_ER.shape[0], len(self.n_rows_P), *x_ER.shape[2:])
        return x_EP.index_add_(1, self.part_R, x_ER)

    def _for_rows(self, x_EP: Tensor) -> Tensor:
        """Return for each row the value of its logical matrix: (E, P, ...) -> (E, R, ...), or (E, 1, ...) if P = 1."""
        return x_EP if self.part_R is None else x_EP[:, self.part_R]


def _part_of_rows(row: Row, first: int, n: int, device: torch.device) -> Tensor:
    """Return the index of the logical matrix of each of `n` rows from row `first`, (R,)."""
    sizes = [size for _, size in row.parts]
    of_head = [part for part, size in enumerate(sizes) for _ in range(size)]
    return torch.tensor(
        [of_head[at % len(of_head)] for at in range(first, first + n)], device=device, dtype=torch.int64
    )
