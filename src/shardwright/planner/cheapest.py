"""The plan with the fewest accelerator-hours, on all accelerators of a cluster or on a part of them."""

import re
from collections.abc import Iterator
from dataclasses import replace

from shardwright.cost.hardware import Cluster
from shardwright.planner.search import MARGIN, TOP, Plan, search
from shardwright.system.errors import LayoutError
from shardwright.system.units import divisors


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
