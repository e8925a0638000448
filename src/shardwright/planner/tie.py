"""Layouts that the prediction cannot tell from the fastest one, and the simplest of them, which is recommended."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from shardwright.cost.job import Candidates, Ints
from shardwright.layout import Layout
from shardwright.layout_keys import KEYS
from shardwright.planner.headline import headline
from shardwright.planner.pool import Pool
from shardwright.planner.priced import Priced

MODEL_AXES = ("tp", "pp", "cp", "ep")
"""Degrees that divide the work on one sequence; data ranks divide only the batch."""


def complexity(layout: Layout, node_size: int) -> tuple[int, int]:
    """How many axes divide a model or a sequence; then how many other keys that are used are not at their default.

    tp counts twice where its groups do not stay within nodes: each layer then has four collectives over the network,
    whose price is less certain than any other.
    """
    axes = sum(layout.degree(axis) > 1 for axis in MODEL_AXES) + leaves_nodes(layout.tp, node_size)
    other = [
        name
        for name, key in KEYS.items()
        if name not in (*MODEL_AXES, "dp_shard", "dp_replicate", "zero")
        and key.used(layout)
        and getattr(layout, name) != key.default_in(layout)
    ]
    return axes, len(other)


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
    longest = headline(best).interval_s[1]
    near = np.nonzero(pool.bound_s <= longest)[0]
    for numbers in _by_complexity(pool, near, complexity(best.layout, best.job.cluster.node_size)):
        among = np.zeros(len(pool), dtype=bool)
        among[numbers] = True
        found = Priced.of(best.job, pool.choice(pool.fastest(1, among)[0]))
        if ties(best, found):
            return found
    return best


def _by_complexity(pool: Pool, near: Ints, most: tuple[int, int]) -> Iterator[list[int]]:
    """Those of the numbered layouts that are less complex than `most`, the simplest first, with their equals."""
    node_size = pool.job.cluster.node_size
    axes = np.concatenate([_axes(group, node_size) for group in pool.groups])[near]
    for n_axes in range(most[0] + 1):
        alike: dict[tuple[int, int], list[int]] = {}
        for number in near[axes == n_axes].tolist():
            alike.setdefault(complexity(pool.choice(number).layout, node_size), []).append(number)
        yield from (alike[key] for key in sorted(alike) if key < most)


def _axes(group: Candidates, node_size: int) -> Ints:
    """The first number of `complexity` of each candidate, (n,)."""
    shape = len(group)
    used = [getattr(group, axis) > 1 for axis in MODEL_AXES]
    counted = [np.broadcast_to(each, shape) for each in (*used, leaves_nodes(group.tp, node_size))]
    return np.sum(counted, axis=0, dtype=np.int64)
