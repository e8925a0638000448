"""Muon: momentum, orthogonalized matrix by matrix. AdamW updates all parameters except hidden matrices.

    m <- mu m + (1 - mu) G        u = mu m + (1 - mu) G
    W <- (1 - lr weight_decay) W - lr update_rms sqrt(max(rows, columns)) orthogonal(u)

Sources: K. Jordan et al., https://kellerjordan.github.io/posts/muon (2024), for the iteration and its coefficients;
Moonlight, arXiv 2502.16982, section 2.2, for weight decay and the scale, which gives an update the root mean square of
AdamW's update, so that both use the same learning rate.

Updates are of whole logical matrices in every layout: the rows of `model.modules` list the matrices that are stacked in
a parameter. Each expert is a matrix; K and V of latent attention are two matrices, each with the rows of all heads.
Shards are gathered on one rank (`parallel.whole_matrices`), and the scale uses the size of the whole matrix.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwright.model.device_type import device_type
from shardwright.model.row import Row, flops_of_matrices
from shardwright.optimizers import NEWTON_SCHULZ_ITERATIONS, newton_schulz_flops
from shardwright.parallel.norm import local_part
from shardwright.parallel.whole_matrices import WholeMatrices
from shardwright.training.on_shards import OptimizerOnShards
from shardwright.training.optimizers.adamw import adamw

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
SMALLEST_NORM = 1e-7


class Muon(Optimizer):
    """Muon for groups with `hidden`, with each parameter described by its row in `rows`; otherwise AdamW on shards."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, options: Mapping[str, float]) -> None:
        super().__init__(groups, {"lr": lr, **options})
        others = [group for group in self.param_groups if not group["hidden"]]
        self._others = OptimizerOnShards(adamw(others, lr, options)) if others else None
        if self._others is not None:
            self._others.state = self.state
        self._groups = [group for group in self.param_groups if group["hidden"] for _ in group["params"]]
        self._matrices = [p for group in self.param_groups if group["hidden"] for p in group["params"]]
        self._rows = [row for group in self.param_groups if group["hidden"] for row in group["rows"]]
        self._exchange = WholeMatrices(
            self._matrices, [flops_of_matrices(row, newton_schulz_flops) for row in self._rows]
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        if self._others is not None:
            self._others.step()
        self._exchange.update(self._direction, self._orthogonal, self._apply)

    def _direction(self, number: int) -> Tensor:
        """Return this rank's shard of u and add the gradient to the momentum, which may be stored in fewer bits."""
        parameter, mu = self._matrices[number], self._groups[number]["momentum"]
        weights, stored = local_part(parameter), local_part(self.state[parameter]["momentum"])
        gradient = torch.zeros_like(weights) if parameter.grad is None else local_part(parameter.grad)
        momentum = stored.to(weights.dtype).lerp_(gradient, 1 - mu)
        stored.copy_(momentum)
        return gradient.lerp(momentum, mu).to(_compute_type(momentum))

    def _orthogonal(self, number: int, whole: Tensor) -> Tensor:
        group, row = self._groups[number], self._rows[number]
        return map_logical_matrices(whole, row, lambda matrix: orthogonal(matrix) * scale(matrix, group["update_rms"]))

    def _apply(self, number: int, update: Tensor) -> None:
        group, weights = self._groups[number], local_part(self._matrices[number])
        weights.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update.to(weights.dtype), alpha=group["lr"])


def map_logical_matrices(whole: Tensor, row: Row, compute: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `compute` of each logical matrix, (..., rows, columns), of a parameter, in the parameter's shape."""
    if len(row.parts) < 2:
        return compute(whole)
    sizes = [n for _, n in row.parts]
    by_head = whole.unflatten(-2, (row.heads, -1)).split(sizes, -2)
    matrices = [compute(part.flatten(-3, -2)).unflatten(-2, (row.heads, -1)) for part in by_head]
    return torch.cat(matrices, -2).flatten(-3, -2)


def orthogonal(matrix: Tensor) -> Tensor:
    """Return an approximation of U V^T for a matrix U S V^T, (..., rows, columns), by Newton-Schulz iterations of
    degree 5. Singular values become about 1, from 0.7 to 1.2, with the coefficients' own number of iterations."""
    a, b, c = COEFFICIENTS
    wide = matrix.shape[-2] <= matrix.shape[-1]
    x = matrix if wide else matrix.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=SMALLEST_NORM)
    for _ in range(NEWTON_SCHULZ_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.mT


def scale(matrix: Tensor, update_rms: float) -> float:
    """Return the factor that gives an orthogonal matrix about the root mean square `update_rms`."""
    return update_rms * max(matrix.shape[-2:]) ** 0.5


def _compute_type(momentum: Tensor) -> torch.dtype:
    """Return bf16 on a GPU, as published. A CPU multiplies fp32 faster, and proofs are in float64."""
    if momentum.dtype == torch.float64 or device_type(momentum) == "cpu":
        return momentum.dtype
    return torch.bfloat16
