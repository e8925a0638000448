"""The numbers of a logged step: the one place of the step path where values are read back from the device."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardwright.config import RunConfig
from shardwright.data.mixture import MixtureOrder
from shardwright.parallel.expert import take_sent_bytes
from shardwright.parallel.model import ExpertLoad
from shardwright.run_folder import MOST_RANKS_LOGGED, PHASES, Logged, Record, now
from shardwright.training.clock import Clock
from shardwright.training.device import DTYPES, peak_flops_per_s, peak_memory_bytes
from shardwright.training.load import expert_numbers
from shardwright.training.sources import Sources
from shardwright.training.step import StepResult, Trainer
from shardwright.training.stragglers import Change, Stragglers, Times, gathered_times


@dataclass(frozen=True)
class Gathered:
    """Loss, gradient norm and target tokens of a step; of the `n_steps` steps since the record before the bytes that
    this rank has sent for experts, and the own times of all ranks, where they are known."""

    n_steps: int
    loss: float
    norm: float
    n_targets: int
    sent_bytes: int
    own_s: Times | None


class Numbers:
    """Makes the records of logged steps of one run; every rank has one."""

    def __init__(
        self, config: RunConfig, trainer: Trainer, sources: Sources, device: torch.device, clock: Clock
    ) -> None:
        self.clock = clock
        self.config, self.trainer, self.sources, self.device = config, trainer, sources, device
        self.layout, self.spec = config.layout.layout(), config.model.spec()
        self.compute_dtype = DTYPES[config.precision.compute]
        # On a GPU a rank's own time is not measured.
        compared = device.type == "cpu" and self.layout.world_size > 1
        self.stragglers = Stragglers(self.layout) if compared else None

    def gather(self, result: StepResult, n_steps: int) -> Gathered:
        """What all ranks together know of the last `n_steps` steps; every rank calls this."""
        model = self.trainer.model
        model.sum_over_losses(result.loss_part)
        if result.mtp_part is not None:
            model.sum_over_losses(result.mtp_part)
        loss, norm, n_targets = (float(value) for value in (result.loss_part, result.gradient_norm, result.n_targets))
        sent_bytes = sum(take_sent_bytes(part) for part in model.parts)
        own_s = None if self.stragglers is None else gathered_times(self.clock.own_s)
        return Gathered(n_steps, loss, norm, int(n_targets), sent_bytes, own_s)

    def record(
        self, step: int, found: Gathered, n_samples: int, rate: float, result: StepResult, order: MixtureOrder
    ) -> tuple[Logged, Sequence[Change]]:
        """The record of step number `step`, and the ranks that have become stragglers in the steps since the record
        before, or are none any more. `n_samples`: consumed by the run so far."""
        compared, changes = self._ranks(step, found.own_s)
        told = Logged(
            step=step,
            loss=found.loss,
            grad_norm=found.norm,
            lr=rate,
            target_tokens=found.n_targets,
            **self._speed(step, found.n_steps),
            **self._experts(found),
            **compared,
            loss_scale=None if self.trainer.scaler is None else self.trainer.loss_scale,
            skipped_steps=self.trainer.skipped_steps,
            mtp_loss=None if result.mtp_part is None else float(result.mtp_part),
            epochs=self.sources.by_name(order.epochs(n_samples)),
            time=now(),
        )
        return told, changes

    def _speed(self, step: int, n_steps: int) -> Record:
        phases = self.clock.read()
        phase_means_s: Record = {f"{phase}_s": phases[phase] / n_steps for phase in PHASES}
        step_s = sum(phase_means_s.values())
        batch = self.config.batch
        tokens_per_s = batch.global_batch * batch.seq_len / step_s
        attended = self.sources.attended_tokens(step)
        flops_per_s = tokens_per_s / self.layout.world_size * self.spec.train_flops_per_token(attended)
        peak = peak_flops_per_s(self.device, self.compute_dtype, self.config.precision.tf32)
        return {
            "tokens_per_s": tokens_per_s,
            "tokens_per_s_per_device": tokens_per_s / self.layout.world_size,
            "tflops_per_s_per_device": flops_per_s / 1e12,
            "mfu": None if peak is None else flops_per_s / peak,
            "memory_bytes": peak_memory_bytes(self.device),
            "step_s": step_s,
            **phase_means_s,
        }

    def _experts(self, found: Gathered) -> Record:
        load, moe = self.trainer.model.load, self.spec.moe
        if load is None or moe is None:
            return {}
        experts = expert_numbers(ExpertLoad(*(values.cpu() for values in load)), moe)
        if self.layout.ep > 1:
            experts["expert_sent_bytes"] = found.sent_bytes // found.n_steps
        return experts

    def _ranks(self, step: int, own_s: Times | None) -> tuple[Record, Sequence[Change]]:
        """What is known of each rank's own time."""
        if self.stragglers is None or own_s is None:
            return {}, []
        changes = self.stragglers.judge(own_s, step)
        slowest = self.stragglers.slowest(own_s)
        numbers: Record = {
            "slowest_rank": slowest.rank,
            "slowest_costs_s": slowest.costs_s,
            "stragglers": tuple(sorted(self.stragglers.named)),
        }
        if self.layout.world_size <= MOST_RANKS_LOGGED:
            numbers["own_s_by_rank"] = tuple(float(f"{each:.4g}") for each in own_s.mean(0))
        return numbers, changes
