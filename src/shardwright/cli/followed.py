"""A run folder that is read again and again while the run goes on, or while it is copied from another machine."""

import time
from dataclasses import dataclass, field
from pathlib import Path

from shardwright.config import RunConfig, load
from shardwright.files import owner_runs
from shardwright.ranks_at import Folder, Identity, State
from shardwright.report.run_record import check_folder
from shardwright.run_folder import (
    CHECKPOINTS,
    EVENTS,
    METRICS,
    RUN_FILE,
    AnyRecord,
    Event,
    GrowingFile,
    Logged,
    events_of,
    metrics_of,
    published,
)

QUIET_S = 30.0
"""A run whose process is gone has ended when nothing has been written for so long: until then it may be restarted."""
MOST_RANKS = 16
"""Ranks whose place is read."""


@dataclass(frozen=True)
class Place:
    """Where a rank of a run that goes on is."""

    identity: Identity
    state: State


@dataclass
class News:
    """What has been written since the last look; `anew`: in the place of all records before."""

    anew: bool
    records: list[AnyRecord]
    events: list[Event]


@dataclass
class Followed:
    """A run folder as it was at the last `look`. Raises InputError for a folder that is not one of a run."""

    folder: Path
    config: RunConfig = field(init=False)
    records: list[AnyRecord] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_folder(self.folder)
        self._metrics, self._events = GrowingFile(self.folder / METRICS), GrowingFile(self.folder / EVENTS)
        self._run_file_ns = 0

    def look(self) -> News:
        """Read what has been added. Raises InputError for a damaged line or run file; one that is half written is read
        when it is whole."""
        path = self.folder / RUN_FILE
        if (changed_ns := path.stat().st_mtime_ns) != self._run_file_ns:
            self.config, self._run_file_ns = load(path), changed_ns
        before = self._metrics.n_lines
        anew, lines = self._metrics.new_lines()
        records = list(metrics_of(lines, self._metrics.path, 1 if anew else before + 1))
        before = self._events.n_lines
        events_anew, lines = self._events.new_lines()
        events = list(events_of(lines, self._events.path, 1 if events_anew else before + 1))
        if anew:
            self.records.clear()
        if events_anew:
            self.events.clear()
        self.records += records
        self.events += events
        return News(anew, records, events)

    @property
    def train(self) -> list[Logged]:
        """The logged steps so far."""
        return [record for record in self.records if isinstance(record, Logged)]

    @property
    def step(self) -> int:
        """Steps that are known to be done."""
        return max((record.step for record in self.records), default=0)

    @property
    def runs(self) -> bool | None:
        """Whether the process of rank 0 is there; None where it is not one of this machine."""
        return owner_runs(self.folder)

    @property
    def quiet_s(self) -> float:
        """Seconds since something was written."""
        files = [path for name in (METRICS, EVENTS, RUN_FILE) if (path := self.folder / name).exists()]
        return time.time() - max((path.stat().st_mtime for path in files), default=0.0)

    @property
    def has_ended(self) -> bool:
        """Whether nothing more is to come: all steps are done, or the process is gone. A run of another machine whose
        steps are not done may go on at any time."""
        return self.is_done or (self.step < self.config.steps and self.runs is False and self.quiet_s > QUIET_S)

    @property
    def is_done(self) -> bool:
        """Whether all steps are done, and the process is gone."""
        return self.step >= self.config.steps and not self.runs

    @property
    def checkpoints(self) -> list[Path]:
        """Those that are complete, the oldest first."""
        return published(self.folder / CHECKPOINTS)

    def places(self, ranks: list[int]) -> dict[int, Place]:
        """Where some ranks are, of those that say so; at most 16 are asked."""
        if not self.runs:
            return {}
        there, found = Folder(self.folder), {}
        for rank in ranks[:MOST_RANKS]:
            identity, state = there.identity(rank), there.state(rank)
            if identity is not None and state is not None:
                found[rank] = Place(identity, state)
        return found
