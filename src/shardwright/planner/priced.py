"""One layout of the space with what it costs, and whether it fits."""

from dataclasses import dataclass
from functools import cached_property

from shardwright.cost.estimate import Estimate
from shardwright.cost.host import host_share, node_host_bytes
from shardwright.cost.job import Job
from shardwright.layout.layout import Layout
from shardwright.planner.choice import Choice
from shardwright.system.units import format_bytes, format_host_bytes


@dataclass(frozen=True)
class PricedLayout(Estimate):
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

    @cached_property
    def host_bytes_per_node(self) -> float:
        """Memory of a node's host that the layout needs."""
        return float(node_host_bytes(self.job, self.candidates)[0])

    def fits(self, limit_bytes: float) -> bool:
        """Whether a rank needs at most `limit_bytes` of its device, and a node at most the memory of its host."""
        return not shortage(self.job, self.choice, self.peak_bytes, limit_bytes)

    @staticmethod
    def from_choice(job: Job, choice: Choice) -> "PricedLayout":
        """Not checked: every layout of the space is valid."""
        return PricedLayout(job, choice.candidates, choice)


def shortage(job: Job, choice: Choice, peak_bytes: float, limit_bytes: float) -> str:
    """The memory that a layout lacks, in words: `142 GiB of 21.2 GiB`; empty where it fits."""
    parts = [f"{format_bytes(peak_bytes)} of {format_bytes(limit_bytes)}"] if peak_bytes > limit_bytes else []
    if host_share(job, choice.candidates)[0] > 1:
        needed, memory = float(node_host_bytes(job, choice.candidates)[0]), job.cluster.host_memory_bytes
        parts.append(f"{format_host_bytes(needed)} of {format_host_bytes(memory)} of host memory in each node")
    return " and ".join(parts)
