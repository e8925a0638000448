"""When a run saves, what it tells of it, and what it does about checkpoints that cannot be written."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist

from shardwright.config import RunConfig
from shardwright.errors import CheckpointError, CopiesError, SaveError, SpikeError, cleaning_up
from shardwright.run_folder import EventKind, as_record, step_of
from shardwright.training.checkpoint.copier import Copier
from shardwright.training.checkpoint.durable import durable_folder
from shardwright.training.checkpoint.local import local_level
from shardwright.training.checkpoint.manifest import DataRecord, Progress
from shardwright.training.checkpoint.saver import Saver
from shardwright.training.checkpoint.store import CheckpointStore
from shardwright.training.header import kept_run_file
from shardwright.training.metrics import Writer
from shardwright.training.resuming import from_first
from shardwright.training.screen import Screen
from shardwright.training.step import Trainer
from shardwright.units import format_bytes, format_seconds


def due(step: int, every: int) -> bool:
    """Whether something that is done every so many steps, 0 for never, is done after this one."""
    return every > 0 and step % every == 0


Happened = Callable[[EventKind, int, str], None]


class Saving:
    """The checkpoints of a run as it goes on; every rank calls each method at the same step. `happened` notes an event
    of (kind, step, text)."""

    def __init__(self, config: RunConfig, store: CheckpointStore, trainer: Trainer, happened: Happened) -> None:
        self.config, self.store, self._happened = config, store, happened
        section = config.checkpoint
        self.local = local_level(config, trainer)
        self._saver = Saver(store, trainer, section.async_mode == "async", section.retries, self.local)
        self.durable = durable_folder(config)
        self._copier = None if self.durable is None else Copier(self.durable, store, section.retries)
        self._writers: Sequence[Writer] = ()
        self._screen: Screen | None = None

    @contextmanager
    def told_to(self, screen: Screen, writers: Sequence[Writer]) -> Iterator[None]:
        """While inside, checkpoints are told to these. At the end none is under way any more, whatever the error."""
        self._screen, self._writers = screen, writers
        self._saver.prepare()
        with cleaning_up(self._saver.abandon, *([] if self._copier is None else [self._copier.abandon])):
            try:
                yield
            except (SpikeError, CopiesError):  # raised by every rank, so that all are there
                with cleaning_up(self.settle, self._settle_copy):
                    raise
        self.tell()
        if self.local is not None and (saved := self.store.published()):
            self.local.clear(step_of(saved[-1]))

    def catch_up(self, step: int) -> None:
        """Begin to copy the checkpoint that the run goes on from, if that is due and no copy of it is complete."""
        durable, checkpoint = self.durable, self.store.path_of(step)
        if self._copier is None or durable is None or not due(step, self.config.checkpoint.durable_every):
            return
        with self._failing(step, required=False, done="copied"):
            if from_first(lambda: checkpoint.is_dir() and not durable.is_complete(step), bool):
                self._copier.begin(step)

    def due(self, step: int) -> bool:
        """Whether the run saves to OUT after so many steps."""
        return due(step, self.config.checkpoint.every)

    def due_locally(self, step: int) -> bool:
        """Whether the run saves on its hosts after so many steps."""
        return self.local is not None and due(step, self.config.checkpoint.local_every)

    def save(self, progress: Progress, data: DataRecord, last: bool) -> None:
        """Save to OUT, or on the hosts where only that is due; `last`: at the end of the run, which this has to be
        published for."""
        self.settle(required=False)
        if not last and not self.due(progress.step):
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
        """Wait for the checkpoint that is under way. Raises CheckpointError if it cannot be written, unless the run
        goes on without it; if it is `required`, always."""
        step, settled = self._saver.step, False
        with self._failing(step, required):
            self._saver.settle()
            settled = True
        if not settled and self._copier is not None and self._copier.step == step:
            self._copier.abandon()  # there is no such checkpoint

    def _copy(self, copier: Copier, step: int, last: bool) -> None:
        """Begin to copy a checkpoint to the durable folder; the last one of a run is complete when this returns."""
        if not last and copier.busy():
            self._tell(
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
        """Wait for the copy that is under way; as `settle`."""
        if self._copier is not None:
            with self._failing(self._copier.step, required, "copied"):
                self._copier.settle()

    def tell(self) -> None:
        """Tell of what has been published and copied since the last time; rank 0 does."""
        for saved in self._saver.news():
            path = self.store.path_of(saved.step)
            for writer in self._writers:
                writer.write(as_record(saved))
            if saved.local:  # too many to tell of each
                continue
            told = f"saved {path}: steps waited {format_seconds(saved.blocked_s)} for {format_bytes(saved.n_bytes)}"
            if self._saver.asynchronous:
                told += f", written beside them in {format_seconds(saved.took_s)}"
                self._say(told)
            self._happened("save", saved.step, told)
        for copied in [] if self._copier is None else self._copier.news():
            self._tell("save", copied.step, f"copied to {copied.url} in {format_seconds(copied.took_s)}")

    @contextmanager
    def _failing(self, step: int, required: bool, done: str = "written") -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            if required or self.config.checkpoint.on_error == "stop":
                raise SaveError(*error.problems) from None
            last = self.store.published()
            rest = f"the last good one is {last[-1]}" if last else "none has been written yet"
            told = f"the checkpoint after step {step} is not {done}: {error}; the run goes on, {rest}"
            self._tell("fault", step, told)

    def _tell(self, kind: EventKind, step: int, text: str) -> None:
        self._say(text)
        self._happened(kind, step, text)

    def _say(self, text: str) -> None:
        if self._screen is not None:
            self._screen.say(text)
