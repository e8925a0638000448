"""Gradients compressed with error feedback, as one process computes them: products (PowerSGD) and largest elements."""

import torch
from torch import Tensor, nn

from shardwright.model.modules import row_of
from shardwright.model.random import normal
from shardwright.verification.case import Case


class Products:
    """The errors and bases of every matrix of a model."""

    def __init__(self, parameters: dict[str, nn.Parameter], case: Case) -> None:
        self.rank = case.powersgd_rank
        self.parameters = {
            name: p for name, p in parameters.items() if (row := row_of(case.spec, name)).hidden and row.trained
        }
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


class LargestElements:
    """The largest elements of the gradients of each replica, and the errors that replicas have not sent."""

    def __init__(self, parameters: dict[str, nn.Parameter], case: Case) -> None:
        assert case.largest_gradients is not None
        self.k, self.replicas, tp = case.largest_gradients
        self.blocks: dict[str, list[slice]] = {}
        """The columns of each block of a row."""
        self.parameters: dict[str, nn.Parameter] = {}
        for name, parameter in parameters.items():
            row = row_of(case.spec, name)
            sharded = row.split in ("row", "column") or (row.split == "kv_column" and tp <= case.spec.n_kv_heads)
            n_columns = parameter.shape[-1] // (tp if row.split == "row" else 1)
            per_block = columns_of_block(n_columns)
            if row.hidden and row.trained and (sharded or tp == 1) and 5 * self.k < 4 * per_block:
                self.parameters[name] = parameter
                self.blocks[name] = [
                    slice(first, min(first + per_block, shard + n_columns))
                    for shard in range(0, parameter.shape[-1], n_columns)
                    for first in range(shard, shard + n_columns, per_block)
                ]
        self.errors = [
            {name: torch.zeros_like(p).detach() for name, p in self.parameters.items()} for _ in range(self.replicas)
        ]
        self.sums: dict[str, Tensor] = {}

    @torch.no_grad()
    def after_pass(self, number: int, case: Case) -> None:
        """After forward pass `number` of a step, 1-based, choose from the gradients of a replica if the pass is its
        last; after the last pass of all replace the gradients by the sums."""
        per_replica = case.global_batch // n_sequences(case) // self.replicas
        if number % per_replica:
            return
        replica = number // per_replica - 1
        for name, parameter in self.parameters.items():
            whole = self.errors[replica][name]
            whole += 0.0 if parameter.grad is None else parameter.grad
            parameter.grad = None
            for columns in self.blocks[name]:
                block = whole[..., columns]
                order = block.abs().argsort(-1, descending=True)
                largest = order.argsort(-1) < self.k
                self.sums.setdefault(name, torch.zeros_like(whole))[..., columns] += torch.where(largest, block, 0.0)
                block[largest] = 0.0
        if replica == self.replicas - 1:
            for name, parameter in self.parameters.items():
                parameter.grad = self.sums.pop(name)


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


def columns_of_block(columns: int) -> int:
    """Return the columns of a block of a row: a row has the fewest blocks of at most 128; the last may be shorter."""
    return -(-columns // -(-columns // 128))


def n_sequences(case: Case) -> int:
    """Return the sequences of a forward pass: all, or all of a replica if replicas choose elements of gradients; with
    fp8 a micro-batch's, because each micro-batch has its own scales; and with padding one, from which it is removed."""
    replicas = case.largest_gradients.replicas if case.largest_gradients else 1
    return 1 if case.padded else case.global_batch // replicas if case.fp8 is None else case.micro_batch
