"""One layout of the space with its cost, and whether it fits."""

from dataclasses import dataclass
from functools import cached_property

from shardwright.cost.host import host_share, node_host_bytes
from shardwright.cost.job import Job
from shardwright.cost.step import Estimate
from shardwright.layout.layout import Layout
from shardwright.planner.choice import Choice
from shardwright.system.units import format_bytes, format_host_bytes


@dataclass(frozen=True)
class PricedLayout(Estimate):
    """One layout of the space with its cost."""

    choice: Choice

    @property
    def layout(self) -> Layout:
        """Return the layout: degrees of the axes and the choices that go with them."""
        return self.choice.layout

    @property
    def micro_batch(self) -> int:
        """Return the number of sequences that a rank runs at a time."""
        return self.choice.micro_batch

    @cached_property
    def host_bytes_per_node(self) -> float:
        """Return the bytes of memory that the layout needs on the host of a node."""
        return float(node_host_bytes(self.job, self.candidates)[0])

    def fits(self, limit_bytes: float) -> bool:
        """Return whether a rank needs at most `limit_bytes` of its device, and a node at most its host's memory."""
        return not shortage(self.job, self.choice, self.peak_bytes, limit_bytes)

    @staticmethod
    def from_choice(job: Job, choice: Choice) -> "PricedLayout":
        """Price a choice without checking it: every layout of the space is valid."""
        return PricedLayout(job, choice.candidates, choice)


def shortage(job: Job, choice: Choice, peak_bytes: float, limit_bytes: float) -> str:
    """Return the memory that a layout lacks as text, `142 GiB of 21.2 GiB`; empty if it fits."""
    parts = [f"{format_bytes(peak_bytes)} of {format_bytes(limit_bytes)}"] if peak_bytes > limit_bytes else []
    if host_share(job, choice.candidates)[0] > 1:
        needed, memory = float(node_host_bytes(job, choice.candidates)[0]), job.cluster.host_memory_bytes
        parts.append(f"{format_host_bytes(needed)} of {format_host_bytes(memory)} of host memory in each node")
    return " and ".join(parts)
