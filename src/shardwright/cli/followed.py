"""A run folder that is read repeatedly while the run continues or while it is copied from another machine."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from shardwright.config import RunConfig, load_kept
from shardwright.report.run_record import check_folder
from shardwright.runs.folder import CHECKPOINTS, EVENTS, METRICS, RUN_FILE, published
from shardwright.runs.records import (
    AnyRecord,
    CheckpointRecord,
    EvaluationRecord,
    EventRecord,
    GrowingFile,
    StartRecord,
    TrainRecord,
    events_of,
    metrics_of,
)
from shardwright.system.files import inside
from shardwright.system.owner import owner_runs
from shardwright.system.ranks_at import RankIdentity, RanksFolder, RankState

QUIET_S = 30.0
"""Seconds without a write after which a run whose process is gone has ended; before that it may be restarted."""
TRAIN_RECORDS = 4096
"""Most train records that are kept in memory."""
SHOWN_LINES = 10
"""Most earlier lines of a run that are shown."""
MOST_RANKS = 16
"""Most ranks whose state is read."""


@dataclass(frozen=True)
class RankStatus:
    """The state of one rank of a running run."""

    identity: RankIdentity
    state: RankState


@dataclass
class NewRecords:
    """Records written since the last look: the number of loss records in metrics.jsonl, the last few of these records,
    and the events."""

    n_losses: int = 0
    losses: deque[TrainRecord | EvaluationRecord] = field(default_factory=lambda: deque(maxlen=SHOWN_LINES))
    events: list[EventRecord] = field(default_factory=list)


@dataclass
class FollowedRun:
    """A run folder as it was at the last `look`. Raises InputError for a folder that is not one of a run.

    `train`: in a long run not every train record, but evenly spaced ones (at least `TRAIN_RECORDS` / 2) and the last.
    """

    folder: Path
    config: RunConfig = field(init=False)
    train: list[TrainRecord] = field(default_factory=list)
    others: list[StartRecord | EvaluationRecord | CheckpointRecord] = field(default_factory=list)
    events: list[EventRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_folder(self.folder)
        self._metrics, self._events = (GrowingFile(inside(self.folder, name)) for name in (METRICS, EVENTS))
        self._run_file_ns = 0
        self._begin()

    def _begin(self) -> None:
        """Forget the records."""
        self.train, self.others = [], []
        self._n_train, self._stride = 0, 1

    def look(self) -> NewRecords:
        """Read and return the new records. An incomplete line is read once it is complete. Raises InputError for a
        damaged line or run file."""
        news = NewRecords()
        if (changed_ns := inside(self.folder, RUN_FILE).stat().st_mtime_ns) != self._run_file_ns:
            self.config, self._run_file_ns = load_kept(self.folder), changed_ns
        for first, lines in _added(self._metrics, self._begin):
            for record in metrics_of(lines, self._metrics.path, first):
                self._add(record, news)
        for first, lines in _added(self._events, self.events.clear):
            news.events += events_of(lines, self._events.path, first)
        self.events += news.events
        return news

    def _add(self, record: AnyRecord, news: NewRecords) -> None:
        if isinstance(record, TrainRecord | EvaluationRecord):
            news.n_losses += 1
            news.losses.append(record)
        if not isinstance(record, TrainRecord):
            self.others.append(record)
            return
        if self.train and (self._n_train - 1) % self._stride:
            self.train.pop()  # the last one so far, which is not among the evenly spaced ones
        self.train.append(record)
        self._n_train += 1
        if len(self.train) > TRAIN_RECORDS:
            self.train = self.train[::2]
            self._stride *= 2

    @property
    def step(self) -> int:
        """Return the number of steps that are known to be done."""
        return max((record.step for record in [*self.others, *self.train[-1:]]), default=0)

    @property
    def runs(self) -> bool | None:
        """Return whether the process of rank 0 exists; None if it belongs to another machine."""
        return owner_runs(self.folder)

    @property
    def quiet_s(self) -> float:
        """Return the seconds since the last write to the folder's records or run file."""
        files = [path for name in (METRICS, EVENTS, RUN_FILE) if (path := self.folder / name).exists()]
        return time.time() - max((path.stat().st_mtime for path in files), default=0.0)

    @property
    def has_ended(self) -> bool:
        """Return whether the run writes nothing more: all steps are done, or the process is gone. A run of another
        machine whose steps are not done may continue at any time."""
        return self.is_done or (self.step < self.config.steps and self.runs is False and self.quiet_s > QUIET_S)

    @property
    def is_done(self) -> bool:
        """Return whether all steps are done and the process is gone."""
        return self.step >= self.config.steps and not self.runs

    @property
    def checkpoints(self) -> list[Path]:
        """Return the complete checkpoints, the oldest first."""
        return published(self.folder / CHECKPOINTS)

    def places(self, ranks: list[int]) -> dict[int, RankStatus]:
        """Return the state of each rank in `ranks` that has written it; only the first `MOST_RANKS` are read."""
        if not self.runs:
            return {}
        folder, result = RanksFolder(self.folder), {}
        for rank in ranks[:MOST_RANKS]:
            identity, state = folder.identity(rank), folder.state(rank)
            if identity is not None and state is not None:
                result[rank] = RankStatus(identity, state)
        return result


def _added(file: GrowingFile, forget: Callable[[], None]) -> Iterator[tuple[int, list[str]]]:
    """Yield new lines of a file with the number of the first of them. Calls `forget` if they replace the lines that
    were read before."""
    while True:
        before = file.n_lines
        anew, lines = file.new_lines()
        if anew:
            forget()
        if not lines:
            return
        yield (1 if anew else before + 1), lines
