"""The hook that saves checkpoints: when a run saves, the log lines about it, and the handling of write errors."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from shardwright.config import RunConfig
from shardwright.parallel.observer import StepPhase
from shardwright.runs.folder import step_of
from shardwright.system.errors import CheckpointError, CopiesError, SaveError, SpikeError, cleaning_up
from shardwright.system.units import format_bytes, format_seconds
from shardwright.training.checkpoint.durable import Copier
from shardwright.training.checkpoint.manifest import DataRecord, TrainingProgress
from shardwright.training.checkpoint.saver import Saver
from shardwright.training.hooks import Due, Hook, RunStart, TakenStep, due
from shardwright.training.kept import kept_run_file
from shardwright.training.resuming import RunCheckpoints, from_first
from shardwright.training.run_log import RunLog
from shardwright.training.sources import RunSamples
from shardwright.training.step import Trainer


class SaveCheckpoints(Hook):
    """Saves and copies the checkpoints of a run. Every rank calls each method at the same step."""

    def __init__(
        self,
        config: RunConfig,
        checkpoints: RunCheckpoints,
        trainer: Trainer,
        samples: RunSamples,
        log: RunLog,
    ) -> None:
        self.config, self.samples, self.log, self.observers = config, samples, log, trainer.model.observers
        self.checkpoints, self.store = checkpoints, checkpoints.store
        section = config.checkpoint
        self.local, self.durable = checkpoints.local, checkpoints.durable
        self._saver = Saver(self.store, trainer, section.async_mode == "async", section.retries, self.local)
        self._copier = None if self.durable is None else Copier(self.durable, self.store, section.retries)

    @contextmanager
    def during_steps(self, step: int) -> Iterator[None]:
        """Run the steps after `step` in the `with` block. On exit, even by an error, no checkpoint is in progress."""
        self._saver.prepare()
        with cleaning_up(self._saver.abandon, *([] if self._copier is None else [self._copier.abandon])):
            try:
                self._catch_up(step)
                yield
            except (SpikeError, CopiesError):  # raised by every rank, so all ranks are present
                with cleaning_up(self.settle, self._settle_copy):
                    raise
        self.tell()
        if self.local is not None and (saved := self.store.published()):
            self.local.clear(step_of(saved[-1]))

    def _catch_up(self, step: int) -> None:
        """Start to copy the checkpoint that the run resumes from, if a copy is due and none is complete."""
        durable, checkpoint = self.durable, self.store.path_of(step)
        if self._copier is None or durable is None or not due(step, self.config.checkpoint.durable_every):
            return
        with self._failing(step, required=False, done="copied"):
            if from_first(lambda: checkpoint.is_dir() and not durable.is_complete(step), bool):
                self._copier.begin(step)

    def newest_checkpoint(self) -> RunStart | None:
        """Wait for the checkpoint in progress, then load the newest complete checkpoint, if there is one."""
        self.settle()
        start = self.checkpoints.newest()
        for remark in self.checkpoints.take_remarks():
            self.log.say(remark)
        return start

    def on_save(self, taken: TakenStep) -> None:
        self.tell()
        with self.observers.during(StepPhase("checkpoint", taken.step)):
            progress = TrainingProgress(taken.step, taken.samples[1], self.config.seed, tuple(self.samples.left_out))
            self.save(progress, self.samples.described(taken.step), taken.due)

    def end_step(self, taken: TakenStep) -> None:
        if not (taken.due.save or taken.due.save_locally):
            self.tell()

    def on_stop(self, taken: TakenStep) -> None:
        self.settle(required=True)

    def save(self, progress: TrainingProgress, data: DataRecord, follows: Due) -> None:
        """Save to OUT, or on the hosts if only a local checkpoint is due. The last checkpoint of a run is published
        when this returns."""
        last = follows.last
        self.settle(required=False)
        if not follows.save:
            with self._failing(progress.step, required=False):
                self._saver.save_locally(progress, data, kept_run_file(self.config))
            return
        saved = False
        with self._failing(progress.step, required=last):
            self._saver.save(progress, data, kept_run_file(self.config))
            saved = True
        if last:
            self.settle(required=True)
        if self._copier is not None and saved and (last or due(progress.step, self.config.checkpoint.durable_every)):
            self._copy(self._copier, progress.step, last)
        self.tell()

    def settle(self, required: bool = False) -> None:
        """Wait for the checkpoint in progress. Raises CheckpointError if it cannot be written and either `required`
        is set or the run does not continue after write errors (`checkpoint.on_error`)."""
        step, settled = self._saver.step, False
        with self._failing(step, required):
            self._saver.settle()
            settled = True
        if not settled and self._copier is not None and self._copier.step == step:
            self._copier.abandon()  # the checkpoint to copy does not exist

    def _copy(self, copier: Copier, step: int, last: bool) -> None:
        """Start to copy a checkpoint to the durable folder. The copy of a run's last checkpoint is complete when
        this returns."""
        if not last and copier.busy():
            self.log.tell(
                "fault", step, f"the checkpoint after step {step} is not copied: {copier.what} is under way still"
            )
            return
        self._settle_copy()
        copier.begin(step)
        if last:
            self._settle_copy(required=True)
            if dist.get_rank() == 0:
                self.store.delete_others(step)

    def _settle_copy(self, required: bool = False) -> None:
        """Wait for the copy in progress. Raises as `settle`."""
        if self._copier is not None:
            with self._failing(self._copier.step, required, "copied"):
                self._copier.settle()

    def tell(self) -> None:
        """Log the checkpoints published and copied since the last call, on rank 0."""
        for saved in self._saver.news():
            path = self.store.path_of(saved.step)
            self.log.write(saved)
            if saved.local:  # too frequent to log each
                continue
            text = f"saved {path}: steps waited {format_seconds(saved.blocked_s)} for {format_bytes(saved.n_bytes)}"
            if self._saver.asynchronous:
                text += f", written during the next steps in {format_seconds(saved.took_s)}"
                self.log.say(text)
            self.log.event("save", saved.step, text)
        for copied in [] if self._copier is None else self._copier.news():
            self.log.tell("save", copied.step, f"copied to {copied.url} in {format_seconds(copied.took_s)}")

    @contextmanager
    def _failing(self, step: int, required: bool, done: str = "written") -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            if required or self.config.checkpoint.on_error == "stop":
                raise SaveError(*error.problems) from None
            last = self.store.published()
            rest = f"the last good one is {last[-1]}" if last else "none has been written yet"
            text = f"the checkpoint after step {step} is not {done}: {error}; the run continues, {rest}"
            self.log.tell("fault", step, text)
