"""One layout of the space with what it costs."""

from dataclasses import dataclass

from shardwright.cost.estimate import Estimate
from shardwright.cost.job import Job
from shardwright.layout import Layout
from shardwright.planner.choice import Choice


@dataclass(frozen=True)
class Priced(Estimate):
    """One layout of the space with what it costs."""

    choice: Choice

    @property
    def layout(self) -> Layout:
        """Degrees and what goes with them."""
        return self.choice.layout

    @property
    def micro_batch(self) -> int:
        """Sequences a rank runs at a time."""
        return self.choice.micro_batch

    @staticmethod
    def of(job: Job, choice: Choice) -> "Priced":
        """Not checked: every layout of the space is valid."""
        return Priced(job, choice.candidates, choice)
