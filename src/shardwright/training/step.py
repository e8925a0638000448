"""One optimizer step: forward and backward passes (`forward_backward.py`), reduction of gradients, clipping, update.

This module and `forward_backward.py` read no value back from the device, except for the decision whether a step is
taken in fp16 (`loss_scale.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwright.config.sections import NO_PREFERENCE, PreferenceSection
from shardwright.data.batches import Batch
from shardwright.parallel.model import ParallelModel
from shardwright.parallel.observer import StepPhase
from shardwright.training.average import WeightAverage
from shardwright.training.checkpoint.manifest import BaseRecord
from shardwright.training.forward_backward import ForwardBackward
from shardwright.training.loss_scale import LossScaler
from shardwright.training.optimizer import set_learning_rate
from shardwright.training.resilience.spikes import Recheck, Spike, SpikeGuard


@dataclass(frozen=True)
class StepResult:
    """Scalars on the device: this rank's part of the loss (the parts of all ranks sum to it), the gradient norm
    before clipping, the number of target tokens of the global batch, and this rank's parts of the MTP loss and of
    `parallel.preference.METRICS`, (4,), or None."""

    loss_part: Tensor
    gradient_norm: Tensor
    n_targets: Tensor
    mtp_part: Tensor | None = None
    pair_parts: Tensor | None = None


class Trainer(ForwardBackward):
    """A model and its optimizer, which take steps together."""

    def __init__(
        self,
        model: ParallelModel,
        optimizer: Optimizer,
        *,
        device: torch.device,
        seed: int,
        clip_norm: float = 0.0,
        compile_loss: bool = False,
        restart_positions: bool = False,
        scaler: LossScaler | None = None,
        preference: PreferenceSection = NO_PREFERENCE,
        spikes: SpikeGuard | None = None,
        average: WeightAverage | None = None,
        base: BaseRecord | None = None,
    ) -> None:
        """`average` takes in the weights after each `step`. `spikes` judges each step before weights change.
        `base`: the frozen weights of a run with adapters. Phases are reported to the model's observers."""
        super().__init__(
            model,
            device=device,
            seed=seed,
            compile_loss=compile_loss,
            restart_positions=restart_positions,
            scaler=scaler,
            preference=preference,
        )
        self.optimizer = optimizer
        self.clip_norm = clip_norm
        self.spikes = spikes
        self.average, self.base = average, base
        self._before_change: list[Callable[[], None]] = []
        self._rules: list[Callable[[Tensor], bool]] = []
        self._loss_part: Tensor | None = None

    def call_before_change(self, act: Callable[[], None]) -> None:
        """Register `act` to be called each time before weights and optimizer states change."""
        self._before_change.append(act)

    def announce_change(self) -> None:
        """Call the functions registered with `call_before_change`."""
        for act in self._before_change:
            act()

    def take_steps_if(self, rule: Callable[[Tensor], bool]) -> None:
        """Register a rule: a step changes weights and optimizer states only if `rule` returns true for the norm of
        its gradients, which are in `.grad`. The result must be equal on every rank."""
        self._rules.append(rule)

    @property
    def skipped_steps(self) -> int:
        """Steps of the run so far that changed nothing: a gradient overflowed in fp16, or the step was a spike."""
        overflows = 0 if self.scaler is None else self.scaler.state.skipped
        return overflows + (0 if self.spikes is None else self.spikes.state.skipped)

    @property
    def spike(self) -> Spike | None:
        """The last step's spike, if it was one and thus was not taken, otherwise None."""
        return None if self.spikes is None else self.spikes.seen

    @property
    def recheck(self) -> Recheck | None:
        """The two tries of the last step if it was run again, otherwise None."""
        return None if self.spikes is None else self.spikes.recheck

    def step(self, batch: Batch, step: int, rate: float) -> StepResult:
        """Take optimizer step number `step` at learning rate `rate` on this rank's part of the global batch. If the
        result is not finite and `faults.recheck` is on, nothing changes and the step is run a second time."""
        result = self._try(batch, step, rate)
        if self.spikes is not None and self.spikes.doubts:
            result = self._try(batch, step, rate)
        if self.average is not None:
            self.announce_change()  # also after a step without targets, which changes no weights
            self.average.update(step + 1)
        return result

    def _try(self, batch: Batch, step: int, rate: float) -> StepResult:
        with self.model.observers.during(StepPhase("forward_backward", step)):
            loss_part, n_targets, mtp_part, pair_parts = self.forward_backward(batch, step)
        if self.lacks_targets:
            self.local_norms = []
            if self.spikes is not None:
                self.spikes.pass_over()
            return StepResult(loss_part, torch.zeros_like(loss_part), n_targets, mtp_part, pair_parts)
        if self.spikes is not None:
            self._loss_part = loss_part
        with self.model.observers.during(StepPhase("optimizer", step)):
            norm = self.update(rate)
        return StepResult(loss_part, norm, n_targets, mtp_part, pair_parts)

    def update(self, rate: float, clip_norm: float | None = None) -> Tensor:
        """Clip the gradients in `.grad`, apply the optimizer, free the gradients, and return their norm before
        clipping. Weights and states do not change if the step is a spike, or if there is a loss scale and the norm
        is not finite. `clip_norm`: limit for this step only, instead of the trainer's."""
        norm = self.clip(self.clip_norm if clip_norm is None else clip_norm)
        taken = self.scaler is None or self.scaler.takes(norm)
        if self.spikes is not None:
            taken = self.spikes.takes(overflowed=not taken) and taken
        taken = taken and all(rule(norm) for rule in self._rules)
        self.announce_change()
        if taken:
            set_learning_rate(self.optimizer, rate)
            self.optimizer.step()
        self.model.learn_from_load(update=taken)
        self.model.after_change()
        self.model.forget_gradients()
        return norm.to(self.device)  # gradients may be on the host

    def _norm_known(self, norm: Tensor) -> None:
        if self.spikes is not None:
            assert self._loss_part is not None
            self.spikes.start(self._loss_part, norm.to(self.device))
