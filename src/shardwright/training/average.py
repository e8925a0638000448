"""Averages of the weights over the steps of a run, sharded like the parameters; `[average]` of the run file.

The average is over the parameters that the optimizer updates, in their own type: with matmuls in 16 bits the fp32
master weights.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwright.config.average import AverageSection
from shardwright.parallel.model import ParallelModel
from shardwright.parallel.norm import as_part_on_host, local_part

AVERAGE = "average/"
"""Name prefix of averages of the weights in a checkpoint."""


class WeightAverage:
    """The average of a model's parameters on this rank. `tensors`: by `SLOT/NAME`, sharded like the parameters."""

    def __init__(self, model: ParallelModel, section: AverageSection, steps: int) -> None:
        self.model, self.section, self.steps = model, section, steps
        self.tensors: dict[str, Tensor] = {
            f"{slot}/{name}": _zeros(parameter, on_host=section.device == "cpu")
            for slot in section.slots
            for name, parameter in self._parameters.items()
        }

    @property
    def _parameters(self) -> Mapping[str, nn.Parameter]:
        return self.model.saved_parameters

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take the parameters after `step` steps into the average, if an update is due."""
        if (due := self.section.update(step, self.steps)) is None:
            return
        slot, weight = due
        for name, parameter in self._parameters.items():
            kept = local_part(self.tensors[f"{slot}/{name}"])
            kept.lerp_(local_part(parameter.detach()).to(kept.device), weight)

    @contextmanager
    def applied(self, step: int) -> Iterator[bool]:
        """Give the parameters the values of the average after `step` steps in the `with` block, then their own again.
        The value is False, and nothing changes, before the first update."""
        parts = self.section.parts(step, self.steps)
        own: dict[str, Tensor] = {}
        try:
            for name, parameter in self._parameters.items() if parts else ():
                shard = local_part(parameter.detach())
                own[name] = shard.clone()
                shard.zero_()
                for slot, weight in parts.items():
                    shard.add_(local_part(self.tensors[f"{slot}/{name}"]).to(shard.device), alpha=weight)
            if parts:
                self.model.after_change()
            yield bool(parts)
        finally:
            for name, values in own.items():
                local_part(self._parameters[name].detach()).copy_(values)
            if parts:
                self.model.after_change()


def _zeros(parameter: nn.Parameter, on_host: bool) -> Tensor:
    if not on_host or parameter.device.type == "cpu":
        return torch.zeros_like(parameter, requires_grad=False)
    local = torch.zeros_like(local_part(parameter.detach()), device="cpu", pin_memory=True)
    return as_part_on_host(local, parameter) if isinstance(parameter, DTensor) else local
