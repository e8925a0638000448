"""The cost of one layout in one call."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shardwright.cost import compression, memory
from shardwright.cost.job import Candidates, Job
from shardwright.cost.step import StepTime, step_time
from shardwright.layout.box import DENSE_AXES
from shardwright.layout.keys import KEYS
from shardwright.layout.layout import Layout, accumulation
from shardwright.split.rules import problems
from shardwright.split.stages import schedule_problems
from shardwright.system.errors import LayoutError


@dataclass(frozen=True)
class Estimate:
    """Memory and step time of one layout for a job, computed on first access; the schedule is simulated."""

    job: Job
    candidates: Candidates

    @cached_property
    def time(self) -> StepTime:
        """Return the step time, as arrays of length 1."""
        return step_time(self.job, self.candidates, simulated=True)

    @cached_property
    def memory(self) -> memory.MemoryEstimate:
        """Return the memory by rank of `pp`, as arrays with one candidate."""
        return memory.estimate_memory(self.job, self.candidates)

    @property
    def step_s(self) -> float:
        """Return the step time in seconds."""
        return float(self.time.total_s[0])

    @property
    def parts_s(self) -> dict[str, float]:
        """Return the parts of the step time, in seconds; they add up to `step_s`."""
        return {kind: float(np.asarray(seconds).reshape(-1)[0]) for kind, seconds in self.time.parts.items()}

    @property
    def peak_bytes(self) -> float:
        """Return the reserved bytes of the rank with the most memory, with the allocator's fragmentation."""
        return float(self.memory.reserved_bytes[0])


def estimate(job: Job, layout: Layout, micro_batch: int = 1, recompute: str | None = None) -> Estimate:
    """Return the cost of a layout. `recompute`, if given, replaces the layout's.

    Raises LayoutError for values that the cost model does not cover, and for every reason why the layout cannot run
    this job: rules of the model, the size of the cluster, the batch, the schedule.
    """
    values = {name: getattr(layout, name) for name in KEYS}
    wrong = [
        f"layout.{name}={value}: there is no price for it, the cost model has no formulas"
        for name, value in values.items()
        if value in KEYS[name].not_priced()
    ]
    if wrong:
        raise LayoutError(*wrong)
    wrong = [
        *problems(job.model, layout, job.seq_len),
        *job.offload_problems(layout.offload_optimizer, layout.offload_parameters, layout.offload_activations),
    ]
    wrong += compression.problems(job, layout)
    if layout.world_size != job.cluster.size:
        degrees = " x ".join(str(layout.degree(axis)) for axis in DENSE_AXES)
        wrong.append(
            f"{' x '.join(DENSE_AXES)} = {degrees} = {layout.world_size} ranks, and {job.cluster.name} has "
            f"{job.cluster.size} accelerators; change the degrees so that they multiply to that"
        )
    try:
        wrong += schedule_problems(layout, accumulation(job.global_batch, micro_batch, layout.data_ranks))
    except LayoutError as error:
        wrong += error.problems
    if wrong:
        raise LayoutError(*wrong)
    return Estimate(job, Candidates.from_layout(layout, micro_batch, recompute))
