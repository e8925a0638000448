"""PowerSGD as one process computes it on whole gradients (Vogels et al., arXiv 1905.13727): each logical matrix becomes
the product of two thin ones, and the remainder is added to the next gradient."""

import torch
from torch import Tensor, nn

from shardwright.model.modules import row_of
from shardwright.model.random import normal
from shardwright.verification.case import Case


class Products:
    """The errors and bases of every matrix of a model."""

    def __init__(self, parameters: dict[str, nn.Parameter], case: Case) -> None:
        self.rank = case.powersgd_rank
        self.parameters = {name: p for name, p in parameters.items() if row_of(case.spec, name).hidden}
        self.rows = {name: row_of(case.spec, name) for name in self.parameters}
        self.errors: dict[str, Tensor] = {}
        self.bases: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            n_experts = parameter.shape[0] if parameter.dim() > 2 else 1
            shape = (n_experts * len(self.rows[name].parts), parameter.shape[-1], self.rank)
            self.bases[name] = normal(case.seed, f"powersgd/{name}", shape, (0, 0, 0), shape, 1.0, parameter.dtype)
            self.errors[name] = torch.zeros_like(parameter).detach()

    @torch.no_grad()
    def replace_gradients(self) -> None:
        """Replace the gradient of each matrix, if the product is smaller than the matrix."""
        for name, parameter in self.parameters.items():
            at = self._outputs(name)
            columns = parameter.shape[-1]
            if any(self.rank * (len(rows) + columns) >= len(rows) * columns for rows in at):
                continue
            assert parameter.grad is not None
            stacked, errors = (tensor.view(-1, *parameter.shape[-2:]) for tensor in (parameter.grad, self.errors[name]))
            for part, rows in enumerate(at):
                for expert in range(len(stacked)):
                    basis = self.bases[name][part * len(stacked) + expert]
                    whole = stacked[expert, rows] + errors[expert, rows]
                    left = orthonormal(whole @ basis)
                    product = left @ (left.T @ whole)
                    stacked[expert, rows], errors[expert, rows] = product, whole - product
                    used = left.norm(dim=0) > 0  # a basis that gave no direction stays
                    basis[:, used] = whole.T @ left[:, used]

    def _outputs(self, name: str) -> list[Tensor]:
        """Return the rows of each logical matrix of a parameter."""
        row = self.rows[name]
        of_head = torch.cat([torch.full((n,), part) for part, (_, n) in enumerate(row.parts)]).repeat(row.heads)
        return [(of_head == part).nonzero().flatten() for part in range(len(row.parts))]


def orthonormal(matrix: Tensor) -> Tensor:
    """Return orthonormal columns by Gram-Schmidt; zeros for a column with less than 1e-10 left."""
    basis = torch.zeros_like(matrix)
    for number, column in enumerate(matrix.unbind(1)):
        rest = column.clone()
        for other in (*basis.unbind(1), *basis.unbind(1)):
            rest -= other * (other @ rest)
        if rest.norm() > 1e-10 * column.norm():
            basis[:, number] = rest / rest.norm()
    return basis
