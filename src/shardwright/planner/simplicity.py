"""Simplicity of a layout: its axes, its schedule, and its settings."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from shardwright.cost.job import COLUMNS, Candidates, Ints
from shardwright.layout.keys import KEYS
from shardwright.layout.layout import Layout
from shardwright.planner.choice import Choice, PricedLayout
from shardwright.planner.pool import LayoutPool
from shardwright.planner.space import Mask

MODEL_AXES = ("tp", "pp", "cp", "ep")
"""Degrees that divide the work on one sequence; data ranks divide only the batch."""
WORTH_A_KEY = 0.01
"""Share of the step time that a setting has to save."""
NEAR = 1.25
"""Step time relative to the fastest layout's, up to which a simpler layout is shown."""
_SHARED = tuple(name for name, key in KEYS.items() if name not in (*COLUMNS, *MODEL_AXES) and not key.derived)
SETTINGS = ("dp_replicate", "recompute", *_SHARED)
"""Keys that count as settings if they are not at their default; replicas count if each of them is sharded."""
PREFERENCES = {
    "fastest": "the fastest layout, though a simpler one may be a tie",
    "simplest": f"the layout with fewest axes of those that take at most {NEAR:g} times as long",
    "cheapest": "the fewest accelerator-hours, on all accelerators or on a part of them",
}


def complexity(candidates: Candidates, node_size: int) -> Ints:
    """Return a complexity for each of n layouts, (n,): larger for more axes that divide a model or a sequence; with
    equally many axes, larger for a schedule other than plain 1f1b.

    tp counts as two axes if its groups do not stay within nodes: each layer then has four collectives over the network,
    whose cost is less certain than any other.
    """
    used = [getattr(candidates, axis) > 1 for axis in MODEL_AXES]
    counted = [np.broadcast_to(count, len(candidates)) for count in (*used, leaves_nodes(candidates.tp, node_size))]
    scheduled = candidates.pp > 1 and candidates.shared.pp_schedule != Layout.pp_schedule
    return np.asarray(2 * np.sum(counted, axis=0) + scheduled)


def leaves_nodes(tp: Any, node_size: int) -> Any:
    """Return whether the ranks of a tp group are in several nodes; for each candidate if `tp` is an array."""
    return node_size % tp != 0


def axes(priced: PricedLayout) -> int:
    """Return the number of degrees above 1 that divide the model or a sequence; tp over nodes counts as two."""
    return int(complexity(priced.choice.candidates, priced.job.cluster.node_size)[0]) // 2


def settings(choice: Choice) -> int:
    """Return the number of settings of one layout."""
    return int(settings_of(choice.candidates)[0])


def settings_of(candidates: Candidates) -> Ints:
    """Return the number of `SETTINGS` of each of n layouts, (n,)."""
    shared = candidates.shared
    changed = sum(
        getattr(shared, name) != KEYS[name].default_in(shared) and np.any(KEYS[name].used(shared)) for name in _SHARED
    )
    hybrid = (candidates.dp_replicate > 1) & (candidates.dp_shard > 1)
    return np.asarray(changed + candidates.recomputes + hybrid, dtype=np.int64)


def simplest_near(best: PricedLayout, pool: LayoutPool) -> list[PricedLayout]:
    """Return the layouts of a pool among which `simplest` selects the simplest layout that takes at most `NEAR` times
    as long as the fastest, `best`; empty if `best` is the simplest."""
    node_size = best.job.cluster.node_size
    most_s = NEAR * best.step_s
    near = pool.low_s <= most_s
    of_each = pool.numbers(lambda group: complexity(group, node_size))
    for least in np.unique(of_each[near]):
        if least >= complexity(best.choice.candidates, node_size)[0]:
            break
        among = near & (of_each == least)
        for number in pool.fastest(1, among, most_s):
            result = PricedLayout.from_choice(best.job, pool.choice(number))
            if result.step_s <= most_s:
                return [result, *plainer(result, pool, among, most_s)]
    return []


def plainer(best: PricedLayout, pool: LayoutPool, among: Mask, most_s: float) -> Iterator[PricedLayout]:
    """Yield, for each number of settings smaller than the settings of `best`, the fastest layout of a subset of a pool,
    if it takes at most `WORTH_A_KEY` longer than `best`, and at most `most_s`."""
    most_s = min(most_s, (1 + WORTH_A_KEY) * best.step_s)
    n_settings = pool.numbers(settings_of)
    for count in range(settings(best.choice)):
        for number in pool.fastest(1, among & (n_settings == count), most_s):
            yield PricedLayout.from_choice(best.job, pool.choice(number))


def simplest(layouts: Sequence[PricedLayout]) -> PricedLayout:
    """Return the simplest layout; of equally simple ones the plainest (`plainest`)."""
    node_size = layouts[0].job.cluster.node_size
    of_each = [int(complexity(priced.choice.candidates, node_size)[0]) for priced in layouts]
    kept = [priced for priced, its_complexity in zip(layouts, of_each, strict=True) if its_complexity == min(of_each)]
    return kept[plainest([priced.step_s for priced in kept], [settings(priced.choice) for priced in kept])]


def plainest(steps_s: Sequence[float], n_settings: Sequence[int]) -> int:
    """Return the index of the layout with the fewest settings among the layouts that take at most `WORTH_A_KEY` longer
    than the fastest; of equals the fastest, and of equally fast ones the first."""
    longest = (1 + WORTH_A_KEY) * min(steps_s)
    kept = [index for index, step_s in enumerate(steps_s) if step_s <= longest]
    return min(kept, key=lambda index: (n_settings[index], steps_s[index]))
