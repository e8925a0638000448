"""Layouts that the prediction cannot tell from the fastest one, and the simplest of them, which is recommended."""

from typing import Any

import numpy as np

from shardwright.cost.job import Candidates, Ints
from shardwright.layout import Layout
from shardwright.planner.headline import headline
from shardwright.planner.pool import Pool
from shardwright.planner.priced import Priced

MODEL_AXES = ("tp", "pp", "cp", "ep")
"""Degrees that divide the work on one sequence; data ranks divide only the batch."""


def complexity(candidates: Candidates, node_size: int) -> Ints:
    """A number for each of n layouts, (n,): larger for more axes that divide a model or a sequence; of as many axes,
    larger for a schedule other than plain 1f1b.

    tp counts as two axes where its groups do not stay within nodes: each layer then has four collectives over the
    network, whose price is less certain than any other.
    """
    used = [getattr(candidates, axis) > 1 for axis in MODEL_AXES]
    counted = [np.broadcast_to(each, len(candidates)) for each in (*used, leaves_nodes(candidates.tp, node_size))]
    scheduled = candidates.pp > 1 and candidates.shared.pp_schedule != Layout.pp_schedule
    return np.asarray(2 * np.sum(counted, axis=0) + scheduled)


def leaves_nodes(tp: Any, node_size: int) -> Any:
    """Whether the ranks of a tp group are in several nodes; for each candidate where `tp` is an array."""
    return node_size % tp != 0


def ties(one: Priced, other: Priced) -> bool:
    """Whether the step of each is inside the interval of the other."""
    (low, high), (other_low, other_high) = headline(one).interval_s, headline(other).interval_s
    return low <= other.step_s <= high and other_low <= one.step_s <= other_high


def simplest(best: Priced, pool: Pool) -> Priced:
    """The simplest layout of a pool that ties with its fastest one, `best`; of equally simple ones the fastest. It is
    `best` itself where no simpler one does."""
    node_size = best.job.cluster.node_size
    near = pool.bound_s <= headline(best).interval_s[1]
    of_each = np.concatenate([complexity(group, node_size) for group in pool.groups])
    for least in np.unique(of_each[near]):
        if least < complexity(best.choice.candidates, node_size)[0]:
            found = Priced.of(best.job, pool.choice(pool.fastest(1, near & (of_each == least))[0]))
            if ties(best, found):
                return found
    return best


def simplest_of(found: list[Priced]) -> Priced:
    """The simplest of layouts that tie with the fastest, which is the first; of equally simple ones the fastest."""
    node_size = found[0].job.cluster.node_size
    near = [each for each in found if ties(found[0], each)]
    return min(near, key=lambda each: (int(complexity(each.choice.candidates, node_size)[0]), each.step_s))
