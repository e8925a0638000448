"""Dependence of a plan on the number of accelerators and on the sequence length."""

from dataclasses import dataclass, replace

import numpy as np

from shardwright.cost.job import Candidates
from shardwright.planner.choice import PricedLayout
from shardwright.planner.search import Plan, survey
from shardwright.planner.space import Mask
from shardwright.split.rules import problems
from shardwright.system.errors import LayoutError

NEAR = 2
"""Largest factor between tp, cp and pp and the plan's degrees, on a cluster of another size."""
SIZES = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8)
LENGTHS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4)


@dataclass(frozen=True)
class SweepPoint:
    """The best layout on a cluster of another size with the same batch; None if none fits."""

    size: int
    priced: PricedLayout | None


def by_size(plan: Plan) -> list[SweepPoint]:
    """Return the best layouts on smaller and larger clusters of whole nodes whose size can share the batch.

    Degrees of tp, cp and pp are searched within a factor of two of the plan's, everything else in full.
    """
    best = plan.best[0]
    points = []
    for factor in SIZES:
        size, whole = _scaled(plan.job.cluster.size, factor)
        node = plan.job.cluster.node_size
        if not whole or size % node:
            continue
        if factor == 1:
            points.append(SweepPoint(size, best))
            continue
        job = replace(plan.job, cluster=replace(plan.job.cluster, size=size))
        try:
            near = survey(job, plan.limit_bytes, lambda candidates: _near(candidates, best.choice.candidates))
        except LayoutError:
            continue
        if near.n_layouts:
            fastest = near.pool.fastest(1)
            points.append(
                SweepPoint(size, PricedLayout.from_choice(job, near.pool.choice(fastest[0])) if fastest else None)
            )
    return points


def _near(candidates: Candidates, best: Candidates) -> Mask:
    mask = np.full(len(candidates), best.pp <= NEAR * candidates.pp and candidates.pp <= NEAR * best.pp)
    for degree, its in ((candidates.tp, best.tp), (candidates.cp, best.cp)):
        mask &= (its <= NEAR * degree) & (degree <= NEAR * its)
    return mask


def by_length(best: PricedLayout) -> list[PricedLayout]:
    """Return the same layout with shorter and longer sequences and as many sequences a step; lengths that it cannot
    partition are left out."""
    job, layout = best.job, best.choice.layout
    lengths = [seq_len for seq_len, whole in (_scaled(job.seq_len, factor) for factor in LENGTHS) if whole]
    possible = [seq_len for seq_len in lengths if not problems(job.model, layout, seq_len)]
    return [PricedLayout.from_choice(replace(job, seq_len=seq_len), best.choice) for seq_len in possible]


def _scaled(n: int, factor: float) -> tuple[int, bool]:
    """Return n x factor, and whether it is an integer."""
    return int(n * factor), float(n * factor).is_integer() and n * factor >= 1
