"""Where a run reports: the screen, the metric writers and events.jsonl, all written by rank 0."""

from collections.abc import Sequence
from pathlib import Path

from shardwright.config import RunConfig
from shardwright.errors import cleaning_up
from shardwright.run_folder import AnyRecord, Event, EventKind, Record, SamplePlace, append_event, as_record
from shardwright.training.metrics import Writer, open_writers
from shardwright.training.screen import Screen


class RunLog:
    """The screen and the files of one run. On ranks other than 0 each method does nothing."""

    def __init__(self, config: RunConfig, rank: int, quiet: bool, first_step: int) -> None:
        self._out, self._rank = Path(config.out), rank
        self.screen = Screen(config.steps, first_step, rank, quiet)
        self._writers: list[Writer] = [self.screen, *open_writers(config, first_step)] if rank == 0 else []

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
            append_event(self._out, Event(kind, step, text, rank, samples=tuple(samples)))

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
