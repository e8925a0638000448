"""Handles a step that was a spike or was run again: applies the policy `faults.spike` and reports it."""

from collections.abc import Callable, Sequence
from typing import NoReturn

from shardwright.config.batch import BatchSchedule
from shardwright.config.faults import IN_A_ROW, FaultsSection
from shardwright.runs.folder import EVENTS
from shardwright.runs.records import SamplePlace
from shardwright.system.errors import SpikeError
from shardwright.system.processes import ranks_in_words
from shardwright.training.hooks import Hook, RunStart, TakenStep
from shardwright.training.loss_scale import skipped_in_words
from shardwright.training.resilience.spikes import Spike
from shardwright.training.run_log import RunLog
from shardwright.training.sources import RunSamples
from shardwright.training.step import Trainer

PLACES_SHOWN = 4
"""Maximum number of samples of a step whose places in the data are printed."""


class AfterSpike(Hook):
    """Decides, identically on every rank, how a run continues after an abnormal step."""

    def __init__(
        self,
        config: FaultsSection,
        trainer: Trainer,
        samples: RunSamples,
        log: RunLog,
        newest_checkpoint: Callable[[], RunStart | None],
    ) -> None:
        """`newest_checkpoint`: loads the newest complete checkpoint, on every rank."""
        self.policy, self.trainer, self.samples, self.log = config.spike, trainer, samples, log
        self._newest_checkpoint = newest_checkpoint
        self._went_back: dict[int, int] = {}
        """Step of a checkpoint -> number of rollbacks to it by this process."""

    def after_step(self, taken: TakenStep) -> RunStart | None:
        self._report_recheck(taken.step)
        return None if self.trainer.spike is None else self.next(self.trainer.spike, taken)

    def _report_recheck(self, step: int) -> None:
        """Report step number `step` if it was run again with another result, which is a device fault."""
        recheck = self.trainer.recheck
        if recheck is None or recheck.same:
            return
        text = f"step {step}: {recheck.first}; {recheck}"
        if recheck.second is None:
            text += "; the step is taken with the second result. Have that device checked, or leave it out"
        self.log.tell("fault", step, text, recheck.suspects[0] if len(recheck.suspects) == 1 else None)

    def next(self, spike: Spike, taken: TakenStep) -> RunStart | None:
        """Apply `faults.spike` to a step that was not taken. Return the start of the run after a rollback, otherwise
        None. Raises SpikeError if the run stops."""
        step, samples = taken.step, taken.samples
        text, places = self._described(spike, step, samples)
        assert self.trainer.spikes is not None
        in_a_row = self.trainer.spikes.state.in_a_row
        back = None
        if self.policy == "rollback":
            self.samples.leave_out([samples])
            back = self._newest_checkpoint()
        if back is not None:
            self.samples.leave_out(back.left_out)
            in_a_row = self._went_back[back.step] = self._went_back.get(back.step, 0) + 1
        if self.policy == "stop" or in_a_row >= IN_A_ROW:
            if self.policy != "stop":
                text += f"; these are {in_a_row} spikes in a row, and {IN_A_ROW} stop a run"
            self.log.event("spike", step, text, samples=places)
            raise SpikeError(f"{text}\nthe step was not taken: weights and checkpoints are those from before it")
        if back is None:
            none = "; there is no checkpoint to go back to yet" if self.policy == "rollback" else ""
            text = f"{text}; skipped, weights and optimizer states stay{none}"
        else:
            text = (
                f"{text}; back to {back.checkpoint} (step {back.step}), from now on without samples {samples[0]} to "
                f"{samples[1] - 1}"
            )
        self.log.tell("skip" if back is None else "rollback", step, text, samples=places)
        return back

    def stop(self, spike: Spike, step: int, samples: tuple[int, int], done: int) -> NoReturn:
        """Raise SpikeError for step number `step`, whose loss or gradient norm is not finite, after `done` steps."""
        text, places = self._described(spike, step, samples)
        self.log.event("spike", step, text, samples=places)
        seen = "" if done == step else f" (found after step {done})"
        raise SpikeError(
            f"{text}\nthe run is stopped{seen}: checkpoints are those from before step {step}, none holds its numbers. "
            f"To leave such steps out, set faults.spike to 'skip' or 'rollback'; if it is the first of many, lower "
            f"optimizer.lr or optimizer.clip_norm"
        )

    def _described(self, spike: Spike, step: int, samples: tuple[int, int]) -> tuple[str, list[SamplePlace]]:
        """Return a description of an abnormal step, and the places of its samples in the data."""
        text = f"step {step}: {spike}"
        if self.trainer.recheck is not None:
            text += f"; {self.trainer.recheck}"
        places = self.samples.places(range(*samples))
        return f"{text}; {self._in_words(places, spike.losing)}", places

    def _in_words(self, places: Sequence[SamplePlace], losing: Sequence[int]) -> str:
        """Describe the first samples of a step, or of its ranks with non-finite loss. `events.jsonl` lists all."""
        layout = self.trainer.model.layout
        data_ranks = {layout.data_rank(rank) for rank in losing}
        per_rank = len(places) / layout.data_ranks  # a fraction if a sample is cut into sequences of several ranks
        suspected = [
            place
            for n, place in enumerate(places)
            if any(n < (data_rank + 1) * per_rank and data_rank * per_rank < n + 1 for data_rank in data_ranks)
        ]
        shown, of_ranks = (suspected, f" of {ranks_in_words(losing)}") if suspected else (places, "")
        text = "; ".join(f"{place.sample}: {place}" for place in shown[:PLACES_SHOWN])
        more = f" and {len(shown) - PLACES_SHOWN} more, in {EVENTS}" if len(shown) > PLACES_SHOWN else ""
        return f"its samples{of_ranks} are {text}{more}"


class ReportSkipped(Hook):
    """Reports steps that changed nothing: a gradient overflowed in fp16, or no token counts in the loss."""

    def __init__(self, schedule: BatchSchedule, trainer: Trainer, log: RunLog) -> None:
        self.schedule, self.trainer, self.log = schedule, trainer, log

    def after_step(self, taken: TakenStep) -> None:
        step, n = taken.step, self.schedule.stage_at(taken.step - 1).global_batch
        if taken.overflowed:
            self.log.tell("skip", step, skipped_in_words(step, self.trainer.loss_scale))
        if self.trainer.lacks_targets:
            self.log.tell("skip", step, f"step {step} skipped: none of its {n} sequences has a token that counts")
