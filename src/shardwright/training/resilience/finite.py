"""Stops a run at a loss or gradient norm that is not finite, without reading from the device at each step.

Each step leaves its part of the loss, its gradient norm and the norms of its gradients on the device. They are read
when the host waits for the device anyway: before a step is logged, evaluated or saved. So no checkpoint or record is
written after a step with non-finite numbers, and the error names the first such step and the tensor.
"""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.parallel.norm import LocalNorms
from shardwright.parallel.objects import gathered
from shardwright.training.hooks import Hook, TakenStep
from shardwright.training.resilience.after_spike import AfterSpike
from shardwright.training.resilience.spikes import Spike, origin
from shardwright.training.step import StepResult, Trainer

MOST_UNREAD = 256
"""Number of steps after which the numbers are read even if no step is logged."""
OVERFLOWS_AT_LEAST_SCALE = 10
"""Number of consecutive steps that overflow at `precision.min_loss_scale` after which a run stops."""


@dataclass(frozen=True)
class _UnreadNumbers:
    """The numbers of step number `step` on the device. `samples`: its first sample and the one after its last."""

    step: int
    samples: tuple[int, int]
    loss_part: Tensor
    norm: Tensor
    local_norms: LocalNorms


@dataclass(frozen=True)
class NotFinite:
    """The first step with a non-finite number, and its samples."""

    step: int
    samples: tuple[int, int]
    spike: Spike


class FiniteCheck:
    """The numbers of the steps since the last check. Every rank calls each method at the same step.

    With `faults.spike`, steps are judged before weights change, and this check does nothing. In fp16, the loss scale
    handles a gradient that overflows, unless the scale cannot be halved further.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._unread: list[_UnreadNumbers] = []
        self._overflows = 0

    def note(self, step: int, samples: tuple[int, int], result: StepResult, overflowed: bool) -> None:
        """Record the numbers of step number `step`. `overflowed`: fp16 skipped the step."""
        trainer = self.trainer
        scaler = trainer.scaler
        at_least = overflowed and scaler is not None and scaler.scale <= scaler.least
        self._overflows = self._overflows + 1 if at_least else 0
        if trainer.spikes is None or self.exhausted:
            unread = _UnreadNumbers(step, samples, result.loss_part, result.gradient_norm, trainer.local_norms)
            self._unread.append(unread)

    @property
    def exhausted(self) -> bool:
        """Return whether fp16 overflows even at the smallest loss scale."""
        return self._overflows >= OVERFLOWS_AT_LEAST_SCALE

    @property
    def due(self) -> bool:
        """Return whether the numbers should be read now."""
        return self.exhausted or len(self._unread) >= MOST_UNREAD

    def first(self) -> NotFinite | None:
        """Read the numbers since the last call and return the first step with a non-finite number, or None."""
        unread, self._unread = self._unread, []
        if not unread:
            return None
        judges_norm = self.trainer.scaler is None or self.exhausted
        numbers = torch.stack([torch.stack([step.loss_part.double(), step.norm.double()]) for step in unread]).tolist()
        bad = [
            i
            for i, (loss_part, norm) in enumerate(numbers)
            if not (math.isfinite(loss_part) and (math.isfinite(norm) or not judges_norm))
        ]
        index = torch.tensor(min(bad, default=len(unread)))
        dist.all_reduce(index, dist.ReduceOp.MIN)  # on the CPU; the ranks have the same steps
        if int(index) == len(unread):
            return None
        return self._described(unread[int(index)], *numbers[int(index)])

    def _described(self, at: _UnreadNumbers, loss_part: float, norm: float) -> NotFinite:
        model = self.trainer.model
        names = list(model.named_parameters)
        bad = [
            names[position]
            for positions, norms in at.local_norms
            for position, finite in zip(positions, torch.isfinite(norms).tolist(), strict=True)
            if not finite
        ]
        # Ranks of tp compute the same part of the loss.
        loss = sum(gathered(loss_part, float)) / model.layout.tp
        where, losing = origin(model, not math.isfinite(loss_part), bad)
        name, value = ("loss", loss) if not math.isfinite(loss) else ("gradient norm", norm)
        why = f"the {name} is {value}"
        if self.exhausted:
            why += (
                f" in {OVERFLOWS_AT_LEAST_SCALE} steps in a row at the least loss scale, {self.trainer.loss_scale:g} "
                f"(precision.min_loss_scale)"
            )
        return NotFinite(at.step, at.samples, Spike(loss, norm, why, where, losing))


class StopAtNotFinite(Hook):
    """Stops the run on every rank at a number that is not finite."""

    def __init__(self, trainer: Trainer, after_spike: AfterSpike) -> None:
        self.check, self.after_spike = FiniteCheck(trainer), after_spike

    def after_step(self, taken: TakenStep) -> None:
        self.check.note(taken.step, taken.samples, taken.result, taken.overflowed)
        if self.check.due:
            self.before_reading(taken)

    def before_reading(self, taken: TakenStep) -> None:
        """Raise SpikeError if a number of the steps since the last check is not finite."""
        if (first := self.check.first()) is not None:
            self.after_spike.stop(first.spike, first.step, first.samples, done=taken.step)
