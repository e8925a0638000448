"""Decides how a local run restarts after a fault of a rank: from which checkpoint and on which ranks.

A place is the device that a rank runs on: the GPU with that number, or only the number on a machine without GPUs. After
a fault, a spare place replaces the faulty one (`faults.spares`). Without a spare, a place with two consecutive faults
is no longer used if `faults.min_ranks` allows the run to continue with fewer ranks. It is tried again later
(`faults.grow_after`).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwright.config import RunConfig
from shardwright.config.settle import shrunk
from shardwright.runs.folder import step_of
from shardwright.runs.records import EventRecord
from shardwright.system.errors import CopiesError, FullError, WorkerError
from shardwright.system.units import counted

FAULTS_IN_A_ROW = 2
"""Number of consecutive faults at the same place after which the place is no longer used."""


@dataclass(frozen=True)
class Attempt:
    """The ranks to start: the run file of this start, and the place of each rank."""

    config: RunConfig
    places: tuple[int, ...]


class Restarts:
    """The starts of one run: the first start, and up to `allowed` restarts after faults."""

    def __init__(self, config: RunConfig, allowed: int) -> None:
        self.config, self.allowed, self.used, self.n_starts = config, allowed, 0, 0
        n_ranks = config.layout.layout().world_size
        self.attempt = Attempt(config, tuple(range(n_ranks)))
        self._usable = self.attempt.places
        self._spares = [*range(n_ranks, n_ranks + config.faults.spares)]
        self._grow_after_s = config.faults.grow_after
        self._shrunk_at_s: float | None = None
        """Monotonic time at which a place was removed; None while all places are used."""
        self._faulty: list[int] = []
        """The place of the last consecutive faults at the same place, once per fault."""

    def after(self, error: WorkerError | CopiesError, saved: Sequence[Path]) -> EventRecord:
        """Set `attempt` to the next one and return the event. `saved`: the existing checkpoints in ascending order of
        steps.

        Raises `error`, with the reason, if the run cannot restart.
        """
        if isinstance(error, FullError):
            raise error
        if self.used == self.allowed:
            if not self.allowed:
                raise error
            used = "the one restart of {} is" if self.allowed == 1 else f"all {self.allowed} restarts of {{}} are"
            subject = used.format(f"--max-restarts {self.allowed}")
            raise type(error)(f"{error}\n{subject} used up").with_rank(error.rank)
        self.used += 1
        remark = self._use_places(error)
        first_line = str(error).partition("\n")[0]
        return self._event(f"restart {self.used} of {self.allowed}", f"{remark}: {first_line}", saved, error.rank)

    def should_grow(self) -> bool:
        """Return whether it is time to use the removed places again."""
        since = self._shrunk_at_s
        return since is not None and 0 < self._grow_after_s <= time.monotonic() - since

    def grow(self, saved: Sequence[Path]) -> EventRecord:
        """Set `attempt` to all ranks, after a smaller layout's ranks have saved and ended. Return the event."""
        self._usable, self._shrunk_at_s = tuple(range(self.config.layout.layout().world_size)), None
        self._grow_after_s *= 2
        self.attempt = Attempt(self.config, self._usable)
        return self._event("start with all ranks again", "", saved, None)

    def _event(self, what: str, why: str, saved: Sequence[Path], rank: int | None) -> EventRecord:
        """Let `attempt` resume from the newest checkpoint and return the event."""
        self.n_starts += 1
        newest = saved[-1] if saved else None
        resume_at_first = self.config.checkpoint.resume
        resume = "auto" if newest is not None else resume_at_first
        config = self.attempt.config
        section = config.checkpoint.model_copy(update={"resume": resume})
        self.attempt = Attempt(config.model_copy(update={"checkpoint": section}), self.attempt.places)
        begin = newest.name if newest is not None else "the start, as nothing was saved yet"
        n = len(self.attempt.places)
        text = f"{what}, from {begin}, on {counted(n, 'rank')}{why}"
        return EventRecord("restart", 0 if newest is None else step_of(newest), text, rank)

    def _use_places(self, error: WorkerError | CopiesError) -> str:
        """Choose layout and places of the next attempt. Return a remark about a place that is no longer used, or ""."""
        place = None if error.rank is None else self.attempt.places[error.rank]
        if place is not None and self._spares:
            return self._use_spare(place)
        self._faulty = [*(faulty for faulty in self._faulty if faulty == place), place] if place is not None else []
        if len(self._faulty) < FAULTS_IN_A_ROW or self.config.faults.min_ranks is None:
            return ""
        left = tuple(usable for usable in self._usable if usable != place)
        config = shrunk(self.config, len(left), self.config.faults.min_ranks)
        if config is None:
            raise type(error)(
                f"{error}\nthese were {FAULTS_IN_A_ROW} faults in a row at place {place}, and without it no layout of "
                f"faults.min_ranks={self.config.faults.min_ranks} to {len(left)} ranks, with fewer along dp alone, "
                f"trains {self.config.batch.schedule.global_batches}"
            ).with_rank(error.rank)
        self._usable, self._faulty, self._shrunk_at_s = left, [], time.monotonic()
        self.attempt = Attempt(config, left[: config.layout.layout().world_size])
        return f" (without place {place}, where {FAULTS_IN_A_ROW} faults in a row happened)"

    def _use_spare(self, place: int) -> str:
        """Replace a place by the first spare and return a remark about it."""
        self._spares.append(place)
        spare = self._spares.pop(0)
        places = tuple(spare if used == place else used for used in self.attempt.places)
        self.attempt = Attempt(self.attempt.config, places)
        return f" (at place {spare} instead of {place})"
