"""Parameters that more than one pipeline stage holds: their gradients summed, and so their values kept equal.

A tied embedding is in the first stage and in the last; under DualPipe every stage lies on two ranks. Each holder has
the gradient of what it computed, and the gradient is their sum, added up once a step.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from shardwright.layout import Layout
from shardwright.parallel.copies import sum_together
from shardwright.parallel.mesh import Groups
from shardwright.parallel.norm import local_part

Parameters = Mapping[str, nn.Parameter]


class Twins:
    """A parameter that two parts on this rank have (where first and last stage share a rank): the first part's is
    optimised and saved, and the other follows it."""

    def __init__(self, named: Sequence[Parameters], plain: Sequence[Parameters]) -> None:
        """Parameters of each part as they are optimised, and plain ones that stand in for them."""
        firsts = self.held(named)
        self._pairs = [
            (firsts[name], standing_in.get(name, parameter))
            for of_part, standing_in in zip(named, plain, strict=True)
            for name, parameter in of_part.items()
            if parameter is not firsts[name]
        ]

    @staticmethod
    def held(parts: Sequence[Parameters]) -> dict[str, nn.Parameter]:
        """All parameters by name, of twins the first."""
        found: dict[str, nn.Parameter] = {}
        for part in parts:
            for name, parameter in part.items():
                found.setdefault(name, parameter)
        return found

    @property
    def seconds(self) -> list[nn.Parameter]:
        """Those that follow."""
        return [second for _, second in self._pairs]

    def sum_gradients(self) -> None:
        """Add the gradient of the second to that of the first."""
        for first, second in self._pairs:
            assert first.grad is not None
            assert second.grad is not None
            local_part(first.grad).add_(local_part(second.grad))

    @torch.no_grad()
    def follow(self) -> None:
        """Give the second the value of the first."""
        for first, second in self._pairs:
            local_part(second).copy_(local_part(first))


class StageCopies:
    """Parameters that several ranks of `pp` hold."""

    def __init__(self, layout: Layout, groups: Groups, names: Sequence[str]) -> None:
        """`names` are those of this rank's parameters. Every rank of the world has to call this."""
        self._others: dict[str, tuple[int, ...]] = {}
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._rank = 0
        self.all_names = frozenset(names)
        if groups.pp is None:
            return
        self._rank = groups.pp.rank()
        everyone: list[Sequence[str]] = [[] for _ in range(groups.pp.size())]
        dist.all_gather_object(everyone, list(names), group=groups.pp)
        holders: dict[str, tuple[int, ...]] = {}
        for rank, held in enumerate(everyone):
            for name in held:
                holders[name] = (*holders.get(name, ()), rank)
        self.all_names = frozenset(holders)
        self._others = {name: holders[name] for name in names if len(holders[name]) > 1}
        for shared in sorted({ranks for ranks in holders.values() if len(ranks) > 1}):
            for line in layout.groups("pp"):
                group = dist.new_group([line[rank] for rank in shared])
                if dist.get_rank() in line and self._rank in shared:
                    self._groups[shared] = group

    def holders(self, name: str) -> int:
        """How many ranks of `pp` hold this parameter."""
        return len(self._others.get(name, (self._rank,)))

    def sum_gradients(self, parameters: Parameters) -> None:
        """Add up, in place, the gradients of the holders: one all-reduce for each group of them."""
        for ranks, group in self._groups.items():
            parts = []
            names = (name for name, shared in self._others.items() if shared == ranks)
            for name in sorted(name for name in names if parameters[name].requires_grad):
                gradient = parameters[name].grad
                assert gradient is not None
                parts.append(local_part(gradient))
            sum_together(parts, group)
