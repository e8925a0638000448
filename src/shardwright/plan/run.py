"""A published run: what was trained, how it was laid out, and what was measured."""

from dataclasses import dataclass
from typing import Literal

from shardwright.cost import memory
from shardwright.cost.job import Candidates, Job
from shardwright.units import GiB


@dataclass(frozen=True, kw_only=True)
class Run:
    """A row of a table that can be predicted. `row`: its line. `measured_*`: None where the row does not say.
    `assumed`: in words. `peak_rank`, `peak_of`: whose peak was reported, that of the rank with the "most" or of the
    "last", and of what: memory that tensors took ("allocated"), or that the allocator had from the device."""

    row: int
    source: str
    name: str
    job: Job
    candidates: Candidates
    measured_step_s: float | None
    measured_peak_gib: float | None
    assumed: tuple[str, ...] = ()
    peak_rank: Literal["most", "last"] = "most"
    peak_of: Literal["allocated", "reserved"] = "allocated"

    def predicted_peak_gib(self) -> float:
        """The same quantity by the memory model."""
        found = memory.of(self.job, self.candidates)
        ranks = found.rank_bytes[0]
        held = ranks[-1] if self.peak_rank == "last" else ranks.max()
        share = 1 + found.fragmentation if self.peak_of == "reserved" else 1.0
        return float(held * share) / GiB


@dataclass(frozen=True)
class Skipped:
    """A row that cannot be predicted, and why."""

    row: int
    source: str
    name: str
    reason: str
