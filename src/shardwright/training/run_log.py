"""Where a run reports, all written by rank 0: the screen, with a live progress bar on a terminal and else plain lines,
the metric writers, and events.jsonl."""

import errno
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar, cast

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shardwright.config import RunConfig
from shardwright.run_folder import AnyRecord, EventKind, EventRecord, Record, SamplePlace, append_event, as_record
from shardwright.system.console import PlainConsole
from shardwright.system.errors import NO_ROOM, cleaning_up
from shardwright.system.processes import leave_dead_terminal
from shardwright.system.units import format_seconds
from shardwright.training.metrics import MetricsWriter, line, open_writers

T = TypeVar("T")


class _Stdout:
    """stdout; a run goes on when the terminal goes away while it prints, before SIGHUP is heard, and when stdout is a
    file on a full disk."""

    def write(self, text: str) -> int:
        """Write, or drop the text that a terminal that is gone or a full disk does not take."""
        return self._or_leave(lambda: sys.stdout.write(text), len(text))

    def flush(self) -> None:
        """As `write`."""
        self._or_leave(sys.stdout.flush, None)

    def _or_leave(self, act: Callable[[], T], otherwise: T) -> T:
        try:
            return act()
        except OSError as error:
            if error.errno == errno.EIO:
                leave_dead_terminal()
            elif error.errno not in NO_ROOM:
                raise
            return otherwise

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)


class Screen(Progress):
    """Records and remarks of a run, printed by rank 0 alone; `quiet` prints nothing. A `metrics.MetricsWriter`."""

    def __init__(self, steps: int, first_step: int, rank: int, quiet: bool = False) -> None:
        silent = rank != 0 or quiet
        super().__init__(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=PlainConsole(
                file=cast(IO[str], _Stdout()), highlight=False, soft_wrap=True, emoji=False, quiet=silent
            ),
            disable=silent or not sys.stdout.isatty(),
        )
        self.steps = steps
        self._first_step, self._began_s = first_step, time.monotonic()
        self._bar = self.add_task("training", total=steps, completed=first_step, note="")

    def write(self, record: Record) -> None:
        """One record as a line, above the bar where there is one."""
        if record["kind"] not in ("train", "evaluation"):
            return
        told = line(record, self.steps)
        if record["kind"] == "train" and record["step"] < self.steps:
            told += f" | ETA {format_seconds(self._left_s(record['step']))}"
        self.say(told)
        if record["kind"] == "train":
            self.update(self._bar, note=f"loss {record['loss']:.3f}")

    def _left_s(self, step: int) -> float:
        """Seconds until the last step, if steps go on as they did since the start, evaluations and saving included."""
        return (time.monotonic() - self._began_s) / (step - self._first_step) * (self.steps - step)

    def rewind(self, step: int) -> None:
        """The bar goes back to `step` steps."""
        self.at(step)

    def close(self) -> None:
        """Nothing to do: the `with` block ends the bar."""

    def at(self, step: int) -> None:
        """`step` steps are done."""
        self.update(self._bar, completed=step)

    def say(self, text: str) -> None:
        """A remark."""
        self.console.print(text, markup=False)


class RunLog:
    """The screen and the files of one run. On ranks other than 0 each method does nothing."""

    def __init__(self, config: RunConfig, rank: int, quiet: bool, first_step: int) -> None:
        self._out, self._rank = Path(config.out), rank
        self.screen = Screen(config.steps, first_step, rank, quiet)
        self._writers: list[MetricsWriter] = [self.screen, *open_writers(config, first_step)] if rank == 0 else []

    @property
    def writes(self) -> bool:
        """Whether this rank writes."""
        return self._rank == 0

    def say(self, text: str) -> None:
        """Print a remark."""
        self.screen.say(text)

    def event(
        self, kind: EventKind, step: int, text: str, rank: int | None = None, samples: Sequence[SamplePlace] = ()
    ) -> None:
        """Append an event that every rank knows of to events.jsonl."""
        if self.writes:
            append_event(self._out, EventRecord(kind, step, text, rank, samples=tuple(samples)))

    def tell(
        self, kind: EventKind, step: int, text: str, rank: int | None = None, samples: Sequence[SamplePlace] = ()
    ) -> None:
        """Print an event and append it to events.jsonl."""
        self.say(text)
        self.event(kind, step, text, rank, samples)

    def write(self, record: AnyRecord, more: Record | None = None) -> None:
        """Give a record to every writer; `more`: numbers of a user's own."""
        line = as_record(record) | (more or {})
        for writer in self._writers:
            writer.write(line)

    def rewind(self, step: int) -> None:
        """Drop the records of steps after `step`, where a writer can: the run takes them again."""
        for writer in self._writers:
            writer.rewind(step)

    def close(self) -> None:
        """Close every writer."""
        with cleaning_up(*(writer.close for writer in self._writers)):
            pass
