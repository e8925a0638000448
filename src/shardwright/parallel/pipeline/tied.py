"""Parameters that more than one stage holds: their gradients summed, and so their values kept equal.

A tied embedding is in the first stage and in the last; under DualPipe every stage lies on two ranks. Each holder has
the gradient of what it computed, and the gradient is their sum, added up once a step.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from shardwright.parallel.copies import sum_together
from shardwright.parallel.norm import local_part

Parameters = Mapping[str, nn.Parameter]


class TiedParameters:
    """Of the parameters of this rank's stages, those that a second stage of the rank, or another rank of `pp`, holds.

    Of two on one rank the first is optimised and saved, and the second follows it.
    """

    def __init__(
        self,
        named: Sequence[Parameters],
        plain: Sequence[Parameters],
        holders: Mapping[str, tuple[int, ...]],
        groups: Mapping[tuple[int, ...], dist.ProcessGroup],
    ) -> None:
        """`named` are the parameters of each stage as they are optimised, `plain` those that are computed with in their
        place; `holders` the ranks of `pp` that hold each parameter, `groups` the groups of those that are several."""
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

    @property
    def seconds(self) -> list[nn.Parameter]:
        """Those that follow."""
        return [second for _, second in self._pairs]

    def sum_on_rank(self) -> None:
        """Add the gradients of the seconds to those of the firsts."""
        for first, second in self._pairs:
            assert first.grad is not None
            assert second.grad is not None
            local_part(first.grad).add_(local_part(second.grad))

    def sum_over_ranks(self) -> None:
        """Sum gradients, in place, over the ranks that hold them: one all-reduce for each set of ranks."""
        for ranks, parameters in sorted(self._shared.items()):
            gradients = [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
            assert len(gradients) == len(parameters)
            sum_together(gradients, self._groups[ranks])

    @torch.no_grad()
    def follow(self) -> None:
        """Give the seconds the values of the firsts."""
        for first, second in self._pairs:
            local_part(second).copy_(local_part(first))


def first_of_each(parts: Sequence[Parameters]) -> dict[str, nn.Parameter]:
    """All parameters by name; of one that two parts hold, that of the first."""
    found: dict[str, nn.Parameter] = {}
    for part in parts:
        for name, parameter in part.items():
            found.setdefault(name, parameter)
    return found
