"""Global batches near the requested one that all accelerators of a cluster can share equally.

The plan with the fewest accelerator-hours, on all accelerators of a cluster or on a part of them.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardwright.cost.hardware import Cluster
from shardwright.cost.job import Job
from shardwright.planner.search import MARGIN, TOP, Plan, search
from shardwright.system.errors import LayoutError
from shardwright.system.units import divisors

WITHIN = 0.3
"""Largest relative difference between a near batch and the requested one."""
MOST = 2
"""Largest number of batches that are tried; each takes a search."""
WORTH = 0.01
"""Smallest share of the time per token that another batch has to save."""


@dataclass(frozen=True)
class NearBatch:
    """Another batch, its plan, and the share of the time per token that it saves."""

    global_batch: int
    plan: Plan
    saved: float


def near_batches(plan: Plan, memory_margin: float, processes: int = 1) -> list[NearBatch]:
    """Return the near batches that take less time per token, the best first; empty if the batch divides well."""
    taken = plan.recommended
    if taken is None:
        return []
    batches = []
    for global_batch in tried(plan.job):
        job = replace(plan.job, global_batch=global_batch)
        most_s = (1 - WORTH) * plan.best[0].step_s / plan.job.tokens * job.tokens
        try:
            other = search(
                job, memory_margin=memory_margin, top=1, fixed=plan.fixed, processes=processes, prefer="fastest",
                most_s=most_s,
            )  # fmt: skip
        except LayoutError:
            continue
        if other.recommended is not None:
            saved = 1 - other.recommended.step_s / job.tokens * plan.job.tokens / plan.best[0].step_s
            batches.append(NearBatch(global_batch, other, saved))
    return sorted((batch for batch in batches if batch.saved > WORTH), key=lambda batch: -batch.saved)


def tried(job: Job) -> list[int]:
    """Return the nearest batches that more accelerators could share equally, most accelerators first; empty if
    the batch is a multiple of the accelerators, or the accelerators are a multiple of the batch."""
    size, batch = job.cluster.size, job.global_batch
    if batch % size == 0 or size % batch == 0:
        return []
    sizes = dict.fromkeys(near for near in _multiples(size, batch) if abs(near - batch) <= WITHIN * batch)
    return list(sizes)[:MOST]


def _multiples(size: int, batch: int) -> Iterator[int]:
    for part in reversed(divisors(size)):
        if batch % part == 0:
            return
        below = batch // part * part
        yield from sorted((near for near in (below, below + part) if near), key=lambda near: abs(near - batch))


def cheapest(whole: Plan, *, memory_margin: float = MARGIN, top: int = TOP, processes: int = 1) -> Plan:
    """Return the plan of the part of the cluster whose fastest layout takes the fewest accelerator-seconds a step, or
    `whole`, the plan of all accelerators.

    Larger parts are tried first, until nothing fits. A number of accelerators that cannot share the batch is skipped.
    """
    best = whole
    for cluster in parts(whole.job.cluster):
        job = replace(whole.job, cluster=cluster)
        try:
            result = search(
                job, memory_margin=memory_margin, top=top, fixed=whole.fixed, processes=processes, prefer="fastest"
            )
        except LayoutError:
            continue
        if result.recommended is None:
            break
        if accelerator_seconds(result) < accelerator_seconds(best):
            best = result
    return best


def accelerator_seconds(plan: Plan) -> float:
    """Return accelerators x seconds of the recommended step; infinite if no layout fits."""
    taken = plan.recommended
    return float("inf") if taken is None else taken.step_s * plan.job.cluster.size


def parts(cluster: Cluster) -> Iterator[Cluster]:
    """Yield parts of a cluster, larger ones first: whole nodes whose number divides its nodes, then a part of one node.
    A measured machine is not divided within a node, because its rates are those measured on a node. Each part has at
    most half the accelerators of the previous one, because each takes a search."""
    sizes = {n * cluster.node_size for n in divisors(cluster.nodes)}
    if cluster.accelerator.rates is None:
        sizes |= {*divisors(cluster.node_size)}
    before = cluster.size
    for size in sorted(sizes, reverse=True):
        if 2 * size > before:
            continue
        before = size
        count = rf":{size}/{size}" if size < cluster.node_size else rf":{size}\1"
        name = re.sub(r":\d+(/\d+)?", count, cluster.name, count=1)
        yield replace(cluster, name=name, size=size, node_size=min(size, cluster.node_size))
