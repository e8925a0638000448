"""PowerSGD: gradients of matrices are summed over replicas as products of two thin matrices, with error feedback.

For each logical matrix (`model.modules.Row.parts`: Q, K and V apart) rank w has the gradient G_w (n x m) of its tokens,
the error E_w that it has not sent yet, and Q (m x r), the same on all ranks. A step computes

    M_w = G_w + E_w
    P   = orthonormal columns of sum_w M_w Q           all-reduce of r n elements
    Q   = sum_w M_w^T P                                all-reduce of r m elements
    G   = P Q^T                                        the gradient that the optimizer sees
    E_w = M_w - P P^T M_w

G is the projection of sum_w M_w, and the sum of all errors is the part that G leaves out. So G equals the result of one
process for the sum of all gradients, except for rounding, for any partition of the tokens. Q starts with random numbers
and is kept from step to step (warm start). r is `layout.compress_gradients` "powersgd-r".

Hidden matrices with r (n + m) < n m are compressed; all other gradients are all-reduced unchanged.
Source: Vogels et al., arXiv 1905.13727, algorithms 1 and 2. There gradients are averaged, and E_w is M_w minus the mean
product; those errors have the same sum.

Shapes: B matrices of equal shape (experts), N rows, M columns, R the rank of the products.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shardwright.model.modules import row_of
from shardwright.model.random import normal
from shardwright.model.row import Row
from shardwright.model.spec import ModelSpec
from shardwright.parallel.reductions import sum_together
from shardwright.split.compression import factored

_T = TypeVar("_T")
_U = TypeVar("_U")
_DEPENDENT = 1e-5
"""Largest fraction of a column's norm, after its projection on the columns before it is subtracted, that counts as
rounding, not as a direction; its square in float64."""


@dataclass(frozen=True)
class _CompressedParameter:
    """A parameter with its state: `error` has its shape; `bases` are the matrices Q of its logical matrices, (B, M, R),
    concatenated."""

    parameter: nn.Parameter
    row: Row
    error: Tensor
    bases: Tensor


class PowerSGD:
    """Sums the gradients of matrices over the ranks that hold replicas of them."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], spec: ModelSpec, rank: int, mesh: DeviceMesh, seed: int
    ) -> None:
        """`parameters`: plain tensors by global name; the `factored` ones are compressed. `mesh`: one axis, the ranks
        that hold replicas."""
        self.mesh, self.group = mesh, mesh.get_group()
        self._members: dict[str, _CompressedParameter] = {}
        for name, parameter in parameters.items():
            row = row_of(spec, name)
            if factored(row, rank):
                n_matrices = len(row.parts) * (row.shape[0] if len(row.shape) > 2 else 1)
                shape = (n_matrices, row.shape[-1], rank)
                drawn = normal(
                    seed, f"powersgd/{name}", shape, (0, 0, 0), shape, 1.0, parameter.dtype, parameter.device
                )
                bases = parameter.detach().new_empty(shape).copy_(drawn)  # keeps the fake tensors of a dry run
                self._members[name] = _CompressedParameter(parameter, row, torch.zeros_like(parameter).detach(), bases)

    def __contains__(self, name: str) -> bool:
        """Return whether the gradient of a parameter is compressed."""
        return name in self._members

    @property
    def state(self) -> dict[str, Tensor]:
        """The state for checkpoints: `basis/NAME`, and `error/NAME`, (ranks, *shape), all ranks' errors sharded over
        the ranks."""
        state: dict[str, Tensor] = {}
        for name, member in self._members.items():
            state[f"basis/{name}"] = member.bases
            state[f"error/{name}"] = DTensor.from_local(member.error[None], self.mesh, [Shard(0)], run_check=False)
        return state

    @torch.no_grad()
    def sum(self) -> None:
        """Replace every gradient by the compressed sum of all ranks."""
        members = [member for member in self._members.values() if member.parameter.grad is not None]
        matrices = []
        for member in members:
            assert member.parameter.grad is not None
            member.error.add_(member.parameter.grad)
            matrices.append(list(_matrices(member.error, member.row)))
        if not members:
            return
        # For each member the matrices of its parts; all have the same number of experts.
        counts = [[len(m_BNM) for m_BNM in group] for group in matrices]
        bases = [member.bases.split(count) for member, count in zip(members, counts, strict=True)]
        lefts = [[m_BNM @ q_BMR for m_BNM, q_BMR in _pairs(*pair)] for pair in _pairs(matrices, bases)]
        sum_together(_flat(lefts), self.group)
        lefts = [[_orthonormal(p_BNR) for p_BNR in group] for group in lefts]
        own = [[m_BNM.mT @ p_BNR for m_BNM, p_BNR in _pairs(*pair)] for pair in _pairs(matrices, lefts)]
        rights = [[matrix.clone() for matrix in group] for group in own]
        sum_together(_flat(rights), self.group)
        for member, p, own_q, q, before in zip(members, lefts, own, rights, bases, strict=True):
            assert member.parameter.grad is not None
            sent = _joined([p_BNR @ q_BMR.mT for p_BNR, q_BMR in _pairs(p, own_q)], member.row)
            member.error.sub_(sent.view_as(member.error))
            product = _joined([p_BNR @ q_BMR.mT for p_BNR, q_BMR in _pairs(p, q)], member.row)
            member.parameter.grad.copy_(product.view_as(member.error))
            # If a column of P is zero, the column of Q stays for the next step.
            directions = [p_BNR.norm(dim=-2, keepdim=True) > 0 for p_BNR in p]
            chosen = [torch.where(*arguments) for arguments in zip(directions, q, before, strict=True)]
            member.bases.copy_(torch.cat(chosen))


def _pairs(first: Iterable[_T], second: Iterable[_U]) -> Iterator[tuple[_T, _U]]:
    return zip(first, second, strict=True)


def _flat(factors: Iterable[Sequence[Tensor]]) -> list[Tensor]:
    return [factor for group in factors for factor in group]


def _matrices(whole: Tensor, row: Row) -> Iterator[Tensor]:
    """Yield the logical matrices of a parameter, each (B, N, M)."""
    stacked = whole.view(-1, *whole.shape[-2:])
    for part in stacked.unflatten(-2, (row.heads, -1)).split([n for _, n in row.parts], -2):
        yield part.flatten(-3, -2)


def _joined(matrices: Sequence[Tensor], row: Row) -> Tensor:
    """Return the inverse of `_matrices`, (B, rows, M)."""
    return torch.cat([matrix.unflatten(-2, (row.heads, -1)) for matrix in matrices], -2).flatten(-3, -2)


def _orthonormal(p_BNR: Tensor) -> Tensor:
    """Return Gram-Schmidt's orthonormal columns, each projected twice; a dependent column becomes zeros."""
    basis = torch.zeros_like(p_BNR)
    least = _DEPENDENT**2 if p_BNR.dtype == torch.float64 else _DEPENDENT
    for column in range(p_BNR.shape[-1]):
        given = rest = p_BNR[..., column : column + 1]
        for _ in range(2):
            rest = rest - basis @ (basis.mT @ rest)
        size = rest.norm(dim=-2, keepdim=True)
        independent = size > least * given.norm(dim=-2, keepdim=True)
        basis[..., column : column + 1] = torch.where(independent, rest / torch.where(independent, size, 1.0), 0.0)
    return basis
