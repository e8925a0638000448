"""When a run saves, what it tells of it, and what it does about checkpoints that cannot be written."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from shardwright.config import RunConfig
from shardwright.errors import CheckpointError, CopiesError, SpikeError
from shardwright.run_folder import EventKind, as_record
from shardwright.training.checkpoint.manifest import DataRecord, Progress
from shardwright.training.checkpoint.saver import Saver
from shardwright.training.checkpoint.store import CheckpointStore
from shardwright.training.header import kept_run_file
from shardwright.training.metrics import Writer
from shardwright.training.screen import Screen
from shardwright.training.step import Trainer
from shardwright.units import format_bytes, format_seconds

Happened = Callable[[EventKind, int, str], None]


class Saving:
    """The checkpoints of a run as it goes on; every rank calls each method at the same step. `happened` notes an event
    of (kind, step, text)."""

    def __init__(self, config: RunConfig, store: CheckpointStore, trainer: Trainer, happened: Happened) -> None:
        self.config, self.store, self._happened = config, store, happened
        section = config.checkpoint
        self._saver = Saver(store, trainer, section.async_mode == "async", section.retries)
        self._writers: Sequence[Writer] = ()
        self._screen: Screen | None = None

    @contextmanager
    def told_to(self, screen: Screen, writers: Sequence[Writer]) -> Iterator[None]:
        """While inside, checkpoints are told to these. At the end none is under way any more, whatever the error."""
        self._screen, self._writers = screen, writers
        self._saver.prepare()
        try:
            yield
        except (SpikeError, CopiesError):  # raised by every rank, so that all are there
            self.settle()
            raise
        finally:
            self._saver.abandon()
        self.tell()

    def due(self, step: int) -> bool:
        """Whether the run saves after so many steps."""
        every = self.config.checkpoint.every
        return every > 0 and step % every == 0

    def save(self, progress: Progress, data: DataRecord, last: bool) -> None:
        """Save; `last`: at the end of the run, which this has to be published for."""
        self.settle(required=False)
        with self._failing(progress.step, required=last):
            self._saver.save(progress, data, kept_run_file(self.config))
        if last:
            self.settle(required=True)
        self.tell()

    def settle(self, required: bool = False) -> None:
        """Wait for the checkpoint that is under way. Raises CheckpointError if it cannot be written, unless the run
        goes on without it; if it is `required`, always."""
        with self._failing(self._saver.step, required):
            self._saver.settle()

    def tell(self) -> None:
        """Tell of what has been published since the last time; rank 0 does."""
        for saved in self._saver.news():
            path = self.store.path_of(saved.step)
            told = f"saved {path}: steps waited {format_seconds(saved.blocked_s)} for {format_bytes(saved.n_bytes)}"
            if self._saver.asynchronous:
                told += f", written beside them in {format_seconds(saved.took_s)}"
                self._say(told)
            for writer in self._writers:
                writer.write(as_record(saved))
            self._happened("save", saved.step, told)

    @contextmanager
    def _failing(self, step: int, required: bool) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            if required or self.config.checkpoint.on_error == "stop":
                raise
            last = self.store.published()
            rest = f"the last good one is {last[-1]}" if last else "none has been written yet"
            told = f"the checkpoint after step {step} is not written: {error}; the run goes on, {rest}"
            self._say(told)
            self._happened("fault", step, told)

    def _say(self, text: str) -> None:
        if self._screen is not None:
            self._screen.say(text)
