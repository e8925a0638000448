"""Tied parameters, which several pipeline stages hold: sums their gradients, so that the replicas stay equal.

A tied embedding is in the first and in the last stage; with DualPipe two ranks hold every stage. Each replica
accumulates the gradient of its own micro-batches and its own use; once a step these partial gradients are summed.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from shardwright.parallel.norm import local_part
from shardwright.parallel.reductions import sum_together

Parameters = Mapping[str, nn.Parameter]


class TiedParameters:
    """The parameters of this rank's stages that also belong to another stage of this rank or another rank of `pp`.

    Where two stages of this rank hold a parameter, the first replica is optimised and saved; the second, the duplicate,
    is overwritten with its value after every update.
    """

    def __init__(
        self,
        named: Sequence[Parameters],
        plain: Sequence[Parameters],
        holders: Mapping[str, tuple[int, ...]],
        groups: Mapping[tuple[int, ...], dist.ProcessGroup],
    ) -> None:
        """`named`: the parameters of each stage that are optimised; `plain`: the plain tensors that a stage uses
        instead of DTensors; `holders`: the ranks of `pp` that hold each parameter; `groups`: the process groups of sets
        of several ranks."""
        firsts = first_of_each(named)
        self._pairs = [
            (firsts[name], computed_with.get(name, parameter))
            for of_stage, computed_with in zip(named, plain, strict=True)
            for name, parameter in of_stage.items()
            if parameter is not firsts[name]
        ]
        self._shared: defaultdict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
        for name, parameter in sorted(firsts.items()):
            if len(holders[name]) > 1 and parameter.requires_grad:
                self._shared[holders[name]].append(parameter)
        self._groups = groups

    def group_of(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """Return the process group of a set of ranks of `pp` that hold a parameter; None for one rank."""
        return self._groups.get(ranks)

    @property
    def duplicates(self) -> list[nn.Parameter]:
        """The second replica of each parameter that two stages of this rank hold."""
        return [second for _, second in self._pairs]

    def sum_on_rank(self) -> None:
        """Add the gradients of the duplicates to the gradients of the first replicas."""
        for first, second in self._pairs:
            if not first.requires_grad:
                continue
            assert first.grad is not None
            assert second.grad is not None
            local_part(first.grad).add_(local_part(second.grad))

    def sum_over_ranks(self) -> None:
        """Sum gradients, in place, over the ranks that hold the parameters: one all-reduce for each set of ranks."""
        for ranks, parameters in sorted(self._shared.items()):
            gradients = [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
            assert len(gradients) == len(parameters)
            sum_together(gradients, self._groups[ranks])

    @torch.no_grad()
    def update_duplicates(self) -> None:
        """Copy the values of the first replicas to the duplicates."""
        for first, second in self._pairs:
            local_part(second).copy_(local_part(first))


def first_of_each(parts: Sequence[Parameters]) -> dict[str, nn.Parameter]:
    """Return all parameters by name; if several parts hold one, the replica of the first part."""
    firsts: dict[str, nn.Parameter] = {}
    for part in parts:
        for name, parameter in part.items():
            firsts.setdefault(name, parameter)
    return firsts
