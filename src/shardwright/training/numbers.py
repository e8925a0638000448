"""Hooks that write the records of a run: the numbers of logged steps, read from the device here, the load of
experts, and evaluations.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import takewhile
from pathlib import Path

import torch
from torch import Tensor

from shardwright.config import RunConfig
from shardwright.data.batches import Batch
from shardwright.model.balance import entropy, max_over_mean
from shardwright.model.sections import MoESpec
from shardwright.parallel.expert import take_sent_bytes
from shardwright.parallel.model import ExpertLoad
from shardwright.parallel.observer import StepPhase
from shardwright.parallel.preference import METRICS
from shardwright.parallel.similarity import similar_experts, similar_routers
from shardwright.runs.folder import MOST_LOADS_LOGGED, PHASES, now
from shardwright.runs.records import EvaluationRecord, Record, TrainRecord, lacks_evaluation
from shardwright.training.clock import PhaseClock
from shardwright.training.device import DTYPES, peak_flops_per_s, peak_memory_bytes
from shardwright.training.hooks import Hook, RunStart, TakenStep, due_after
from shardwright.training.resuming import from_first
from shardwright.training.run_log import RunLog
from shardwright.training.sources import RunSamples
from shardwright.training.step import Trainer
from shardwright.training.writers.writer import StepSpan

_FIELDS = {field.name for field in fields(TrainRecord)}


class LogNumbers(Hook):
    """Writes the `train` record of a logged step, with the numbers of all hooks, and shows the progress of the run."""

    def __init__(
        self,
        config: RunConfig,
        trainer: Trainer,
        samples: RunSamples,
        device: torch.device,
        clock: PhaseClock,
        log: RunLog,
    ) -> None:
        self.config, self.trainer, self.samples, self.device = config, trainer, samples, device
        self.clock, self.log = clock, log
        self.layout, self.spec = config.layout.layout(), config.spec()
        self.compute_dtype = DTYPES[config.precision.compute]
        self._logged = 0
        """Number of completed steps at the last record."""

    def on_start(self, start: RunStart) -> None:
        self._logged = start.step
        self.clock.restart()

    def on_rollback(self, start: RunStart) -> None:
        self.log.rewind(start.step)

    def after_step(self, taken: TakenStep) -> None:
        self.log.screen.show_step(taken.step)

    def numbers(self, taken: TakenStep) -> Record:
        """Sum the numbers over all ranks and return them. Every rank calls this."""
        model, result, n_steps = self.trainer.model, taken.result, taken.step - self._logged
        model.sum_over_losses(result.loss_part)
        if result.mtp_part is not None:
            model.sum_over_losses(result.mtp_part)
        if result.pair_parts is not None:
            model.sum_over_losses(result.pair_parts)
        loss, norm, n_targets = (float(value) for value in (result.loss_part, result.gradient_norm, result.n_targets))
        sent_bytes = sum(take_sent_bytes(part) for part in model.parts)
        similar_L3 = similar_routers(model)
        if not self.log.writes or not n_targets:  # a step without targets has no loss
            return {}
        return {
            "loss": loss,
            "grad_norm": norm,
            "lr": taken.rate,
            "target_tokens": int(n_targets),
            **self._speed(taken.step, n_steps),
            **self._experts(n_steps, sent_bytes, similar_L3),
            "loss_scale": None if self.trainer.scaler is None else self.trainer.loss_scale,
            "skipped_steps": self.trainer.skipped_steps,
            "mtp_loss": None if result.mtp_part is None else float(result.mtp_part),
            **({} if result.pair_parts is None else dict(zip(METRICS, result.pair_parts.tolist(), strict=True))),
            "epochs": self.samples.sources.by_name(self.samples.order.epochs(taken.samples[1])),
        }

    def on_log(self, taken: TakenStep, numbers: Record) -> None:
        if "loss" in numbers:
            known = {name: value for name, value in numbers.items() if name in _FIELDS}
            more = {name: value for name, value in numbers.items() if name not in _FIELDS}
            self.log.write(TrainRecord(step=taken.step, time=now(), **known), more)
        if self.log.traces:
            self.log.trace(step_spans(self._logged, self.clock.spans(), self.log.rank))
        self._logged = taken.step
        self.clock.restart()

    def close(self) -> None:
        self.log.close()

    def _speed(self, step: int, n_steps: int) -> Record:
        tokens, flops, sources = 0, 0.0, self.samples.sources
        for stage, n in sources.schedule.parts(step - n_steps, step):
            tokens += n * stage.tokens
            flops += n * stage.tokens * self.spec.train_flops_per_token(sources.attended_tokens(step, stage.seq_len))
        peak = peak_flops_per_s(self.device, self.compute_dtype, self.config.precision.tf32)
        return speed_numbers(
            {phase: seconds / n_steps for phase, seconds in self.clock.read().items()},
            tokens / n_steps,
            self.layout.world_size,
            flops / tokens,
            peak,
        ) | {"memory_bytes": peak_memory_bytes(self.device)}

    def _experts(self, n_steps: int, sent_bytes: int, similar_L3: Tensor | None) -> Record:
        load, moe = self.trainer.model.load, self.spec.moe
        if load is None or moe is None:
            return {}
        layers = [layer for layer in range(self.spec.n_blocks) if self.spec.has_experts(layer)]
        on_host = ExpertLoad(*(values.cpu() for values in load))
        experts = expert_numbers(on_host, moe, layers)
        experts["tokens_by_expert"] = tokens_by_expert(on_host, [n for n in layers if n < self.spec.n_layers])
        if similar_L3 is not None:
            values = similar_L3[:, 0].tolist()
            experts["router_similarity_by_layer"] = [round(values[layer], 4) for layer in layers]
        if self.layout.ep > 1:
            experts["expert_sent_bytes"] = sent_bytes // n_steps
        return experts


class Evaluate(Hook):
    """Writes an `evaluation` record before the first step of a run and whenever one is due. `asked_to_stop`: as in
    `TrainLoop`; an evaluation during which it becomes True ends at once, without a record, so that the run can save. It
    is repeated when the run resumes. The evaluation after the last step, `steps`, is always finished."""

    def __init__(
        self,
        trainer: Trainer,
        samples: RunSamples,
        log: RunLog,
        config: RunConfig,
        asked_to_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.trainer, self.samples, self.log = trainer, samples, log
        self.config, self.asked_to_stop, self._stopped = config, asked_to_stop, False

    def on_start(self, start: RunStart) -> None:
        if start.step == 0 or (
            due_after(self.config, start.step).evaluate
            and from_first(lambda: lacks_evaluation(Path(self.config.out), start.step), bool)
        ):
            self.on_evaluation(start.step)

    def on_evaluation(self, step: int) -> None:
        sources = self.samples.sources
        if not sources.validation:
            return
        with self.trainer.model.observers.during(StepPhase("evaluation", step)):
            means = self._means(step)
            averaged: dict[str, list[float]] | None = {}
            if self.trainer.average is not None and means:
                with self.trainer.average.applied(step) as applied:
                    averaged = self._means(step) if applied else {}
            similar_L3 = similar_experts(self.trainer.model)
        if means is None or averaged is None:
            what = "evaluation" if means is None else "evaluation of the averaged weights"
            self.log.say(f"{what} after step {step} not finished: the run was asked to stop; a resumed run repeats it")
            return
        for name in [name for name in sources.validation if name not in means]:
            self.log.say(f"no validation loss of {name}: none of the sequences has a token that counts")
        if not means:
            return
        loss, *others = self._mixed(step, means)
        losses = {name: of_source[0] for name, of_source in means.items()}
        more: Record = {}
        if self.trainer.pair_loss is not None:
            more |= dict(zip(METRICS, others, strict=True))
        elif others:
            more["mtp_loss"] = sum(others) / len(others)
        if averaged:
            more["average_loss"] = self._mixed(step, averaged)[0]
        if similar_L3 is not None:
            layers = [row for row in similar_L3.tolist() if row[1] >= 0]
            more["expert_similarity_by_layer"] = [round(cosine, 4) for cosine, _, _ in layers]
            more["most_similar_experts"] = [(int(first), int(second)) for _, first, second in layers]
        self.log.write(EvaluationRecord(step, loss, now(), losses if sources.mixed else None, **more))

    def _continues(self, batch: Batch) -> bool:
        """Return whether the evaluation continues with a batch, equal on every rank, which all have as many."""
        self._stopped = self._stopped or self.asked_to_stop()
        return not self._stopped

    def _means(self, step: int) -> dict[str, list[float]] | None:
        """Return the means of `evaluation_sums` of each source that has a token that counts; None if the run is asked
        to stop before its last step."""
        means: dict[str, list[float]] = {}
        may_stop = step < self.config.steps
        for name, samples in self.samples.sources.validation.items():
            batches = self.samples.evaluation_batches(samples)
            sums, counts = self.trainer.evaluation_sums(
                takewhile(self._continues, batches) if may_stop else batches
            ).tolist()
            if may_stop and self._stopped:
                return None
            if counts[0]:
                means[name] = [total / max(n, 1) for total, n in zip(sums, counts, strict=True)]
        return means

    def _mixed(self, step: int, means: Mapping[str, list[float]]) -> list[float]:
        """Return the mean of each number over the sources, weighted as the run mixes them at `step`."""
        places = range(len(next(iter(means.values()))))
        return [self.samples.sources.mean(step, {name: values[at] for name, values in means.items()}) for at in places]


def step_spans(step: int, spans: Iterable[tuple[str, float, float]], rank: int = 0) -> list[StepSpan]:
    """Return phases of a rank in the order of time with the numbers of their steps. `step`: steps done before them. A
    step starts with data."""
    numbered = []
    for phase, start_s, end_s in spans:
        step += phase == PHASES[0]
        numbered.append(StepSpan(step, phase, start_s, end_s, rank))
    return numbered


def speed_numbers(
    phases_s: Mapping[str, float], tokens_per_step: float, world_size: int, flops_per_token: float, peak: float | None
) -> Record:
    """Return the record's keys for the speed of a step. `phases_s`: the mean seconds of each phase. `peak`: FLOP/s of a
    device, or None if they are not known."""
    step_s = sum(phases_s[phase] for phase in PHASES)
    tokens_per_s = tokens_per_step / step_s
    flops_per_s = tokens_per_s / world_size * flops_per_token
    return {
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_per_device": tokens_per_s / world_size,
        "tflops_per_s_per_device": flops_per_s / 1e12,
        "mfu": None if peak is None else flops_per_s / peak,
        "step_s": step_s,
        **{f"{phase}_s": phases_s[phase] for phase in PHASES},
    }


def tokens_by_expert(load: ExpertLoad, layers: Sequence[int]) -> list[list[int]]:
    """Return the tokens of each expert of each layer. If these are more than `MOST_LOADS_LOGGED` numbers, only of the
    layer with the median load of its busiest expert."""
    if len(layers) * load.counts_LE.shape[1] > MOST_LOADS_LOGGED:
        by_load = sorted(layers, key=lambda layer: float(max_over_mean(load.counts_LE[layer])))
        layers = [by_load[len(by_load) // 2]]
    return [[int(n) for n in load.counts_LE[layer].tolist()] for layer in layers]


def expert_numbers(load: ExpertLoad, moe: MoESpec, layers: Sequence[int]) -> Record:
    """Return the record's keys for the experts of one step, from `load` on the host.

    `layers`: the numbers of the layers with experts. The load is the mean over them, and `load_by_layer` has the load
    of the busiest expert of each. The auxiliary losses are their contributions to the cross-entropy, summed over
    layers. A loss that is off has no key.
    """
    busiest = [float(max_over_mean(load.counts_LE[layer])) for layer in layers]
    balance_loss, z_loss = load.losses_L2.sum(0).tolist()
    record: Record = {
        "load_max_over_mean": sum(busiest) / len(busiest),
        "load_entropy": sum(float(entropy(load.counts_LE[layer])) for layer in layers) / len(busiest),
        "load_by_layer": [round(value, 4) for value in busiest],
    }
    if moe.capacity_factor:
        record["dropped_fraction"] = int(load.dropped_L.sum()) / int(load.counts_LE.sum())
    if moe.aux_loss:
        record["balance_loss"] = balance_loss
    if moe.z_loss:
        record["z_loss"] = z_loss
    return record
