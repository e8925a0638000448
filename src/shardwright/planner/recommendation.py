"""Which of the layouts that tie with the fastest one is recommended.

A layout is in the class if it ties with the fastest layout (`planner.tie`) and has no more axes. Every layout is
compared with the fastest one only, so membership does not depend on the other layouts. Within the class:

1. Layouts with headroom are kept: a peak that is higher than predicted by `MEMORY_ERROR` is still within the limit.
   Where no layout has headroom, those are kept that need at most `WORTH_A_KEY` more than the least.
2. Of these, the layouts with the fewest axes are kept.
3. Of these, the layouts are kept that take at most `WORTH_A_KEY` longer than the fastest of them. The one with the
   fewest settings is recommended, and of equals the fastest.

Each layout has a number for each criterion, and each step keeps the layouts near an extreme of all, so the order of the
candidates does not matter.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp, log

import numpy as np

from shardwright.planner.pool import LayoutPool
from shardwright.planner.priced import PricedLayout
from shardwright.planner.recomputation import fewest_layers
from shardwright.planner.simplicity import WORTH_A_KEY, axes, complexity, plainer, plainest, settings
from shardwright.planner.tie import difference_error, ties

MEMORY_ERROR = 0.027
"""Half of the published peaks are predicted within this share of the peak: the median error of peak memory that
`shardwright plan evaluate` prints."""
FEW = 4
"""Layouts of each number of axes, with and without headroom, that are candidates: the fastest ones."""


@dataclass(frozen=True)
class Rated:
    """The numbers by which layouts are compared. `error`: of the difference from the fastest layout's step, as a
    logarithm (`tie.difference_error`). `axes`: degrees above 1 that divide the model or a sequence. `settings`: other
    keys that are not at their default."""

    step_s: float
    error: float
    peak_bytes: float
    axes: int
    settings: int

    @staticmethod
    def of(priced: PricedLayout, fastest: PricedLayout) -> "Rated":
        """Compare a layout with the fastest one."""
        return Rated(
            priced.step_s, difference_error(fastest, priced), priced.peak_bytes, axes(priced), settings(priced.choice)
        )


def choose(rated: Sequence[Rated], limit_bytes: float) -> Rated:
    """Return the layout that the rule above recommends."""
    fastest = min(rated, key=lambda each: (each.step_s, each.axes))
    kept = [each for each in rated if each.axes <= fastest.axes and log(each.step_s / fastest.step_s) <= each.error]
    least, room = min(each.peak_bytes for each in kept), with_headroom(limit_bytes)
    room = room if least <= room else (1 + WORTH_A_KEY) * least
    kept = [each for each in kept if each.peak_bytes <= room]
    fewest = min(each.axes for each in kept)
    kept = [each for each in kept if each.axes == fewest]
    return kept[plainest([each.step_s for each in kept], [each.settings for each in kept])]


def recommend(candidates: Sequence[PricedLayout], limit_bytes: float) -> PricedLayout:
    """Return the layout of these that is recommended."""
    fastest = min(candidates, key=lambda each: (each.step_s, axes(each)))
    rated = [Rated.of(each, fastest) for each in candidates]
    return candidates[rated.index(choose(rated, limit_bytes))]


def with_headroom(limit_bytes: float) -> float:
    """The largest predicted peak that is within the limit though it be missed by `MEMORY_ERROR`."""
    return limit_bytes / (1 + MEMORY_ERROR)


def candidates(
    fastest: PricedLayout, pool: LayoutPool, limit_bytes: float, fewer_layers: bool
) -> Iterator[PricedLayout]:
    """Layouts of a pool from which the recommended one is chosen, beside the fastest one: of each number of axes up to
    that of the fastest, the `FEW` fastest that tie with it, and the fastest with each smaller number of settings.

    Layouts with headroom come first. Once one ties, layouts with more axes or without headroom are not recommended, and
    are left out. `fewer_layers`: also with recomputation in as few layers as leave headroom.
    """
    by, node_size = fastest.job.calibration.difference, fastest.job.cluster.node_size
    near = pool.bound_s <= exp(by["base"] + by["moved"]) * fastest.step_s
    n_axes = np.concatenate([complexity(group, node_size) // 2 for group in pool.groups])
    room = with_headroom(limit_bytes)
    for most_bytes, kept in ((room, near & (pool.peak_bytes <= room)), (limit_bytes, near & (pool.peak_bytes > room))):
        for count in range(axes(fastest) + 1):
            among = kept & (n_axes == count)
            level = [PricedLayout.from_choice(fastest.job, pool.choice(number)) for number in pool.fastest(FEW, among)]
            if fewer_layers:
                level = [with_fewest_layers(each, most_bytes) for each in level]
            tied = [each for each in level if each.step_s <= fastest.step_s or ties(fastest, each)]
            if tied:
                yield from tied
                best = min(tied, key=lambda each: each.step_s)
                yield from plainer(best, pool, among)
                if most_bytes == room:
                    return


def with_fewest_layers(priced: PricedLayout, most_bytes: float) -> PricedLayout:
    """Return the layout with recomputation in as few layers as need at most `most_bytes`, where that saves
    `WORTH_A_KEY` of the step; else the layout itself."""
    less = PricedLayout.from_choice(priced.job, fewest_layers(priced.job, priced.choice, most_bytes))
    return less if less.step_s < (1 - WORTH_A_KEY) * priced.step_s else priced
