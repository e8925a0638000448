"""Selection of the recommended layout among the layouts that tie with the fastest.

A layout is in the class if it ties with the fastest layout and has no more axes. Every layout is
compared with the fastest one only, so membership does not depend on the other layouts. Within the class:

1. Layouts with headroom are kept: a peak that is higher than predicted by `MEMORY_ERROR` is still within the limit.
   If no layout has headroom, the layouts are kept that need at most `WORTH_A_KEY` more memory than the least.
2. Of these, the layouts with the fewest axes are kept.
3. Of these, the layouts are kept that take at most `WORTH_A_KEY` longer than the fastest of them. The layout with the
   fewest settings is recommended, of equals the fastest, and of equally fast layouts the layout with least memory.

Each layout has a number for each criterion, and each step keeps the layouts near an extreme of all, so the order of the
candidates does not matter.

Layouts whose order the prediction cannot determine.

The predictions of two layouts for one model on one cluster have a common error: in the rates of matmuls, and in the
overhead of software. Their difference is known better than either. The error of the difference, as a logarithm, grows
with the share of the step that the two layouts spend on different work:

    d = base + moved x,    x = sum over kinds of work k of |a_k - b_k| / (t_a + t_b)

a_k, b_k are the seconds of kind k in a step of layout a and of layout b, and t_a, t_b their steps. The coefficients are
a median regression over pairs of published runs of one source, model, software and cluster whose layouts differ, in
which each family of runs counts the same (`benchmarks/calibrate.py`): half of the differences are predicted within d.
Two layouts that differ by less than d are a tie. Published pairs were measured in the other order in 52 % of the ties,
in 27 % of the pairs that differ by 1 to 2 d, and in 8 % of the pairs that differ by more.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log

from shardwright.planner.choice import PricedLayout
from shardwright.planner.pool import LayoutPool
from shardwright.planner.recomputation import fewest_layers
from shardwright.planner.simplicity import WORTH_A_KEY, axes, complexity, plainer, plainest, settings

MEMORY_ERROR = 0.023
"""Median relative error of predicted peak memory, as `shardwright plan evaluate` prints it: half of the published peaks
are predicted within it."""
FEW = 4
"""Candidates for each number of axes, with and without headroom: the fastest layouts."""


@dataclass(frozen=True)
class Rated:
    """The numbers by which layouts are compared. `error`: error of the difference between this step and the fastest
    layout's, as a logarithm (`tie.difference_error`). `axes`: degrees above 1 that divide the model or a sequence.
    `settings`: number of other keys that are not at their default."""

    step_s: float
    error: float
    peak_bytes: float
    axes: int
    settings: int

    @staticmethod
    def compare(priced: PricedLayout, fastest: PricedLayout) -> "Rated":
        """Compare a layout with the fastest one."""
        return Rated(
            priced.step_s, difference_error(fastest, priced), priced.peak_bytes, axes(priced), settings(priced.choice)
        )


def choose(rated: Sequence[Rated], limit_bytes: float) -> Rated:
    """Return the layout that the rule above recommends."""
    fastest = min(rated, key=lambda layout: (layout.step_s, layout.axes))
    kept = [
        layout
        for layout in rated
        if layout.axes <= fastest.axes and log(layout.step_s / fastest.step_s) <= layout.error
    ]
    least, room = min(layout.peak_bytes for layout in kept), with_headroom(limit_bytes)
    room = room if least <= room else (1 + WORTH_A_KEY) * least
    kept = [layout for layout in kept if layout.peak_bytes <= room]
    fewest = min(layout.axes for layout in kept)
    kept = sorted((layout for layout in kept if layout.axes == fewest), key=lambda layout: layout.peak_bytes)
    return kept[plainest([layout.step_s for layout in kept], [layout.settings for layout in kept])]


def recommend(candidates: Sequence[PricedLayout], limit_bytes: float) -> PricedLayout:
    """Return the recommended layout among the candidates."""
    fastest = min(candidates, key=lambda priced: (priced.step_s, axes(priced)))
    rated = [Rated.compare(priced, fastest) for priced in candidates]
    return candidates[rated.index(choose(rated, limit_bytes))]


def with_headroom(limit_bytes: float) -> float:
    """Return the largest predicted peak that stays within the limit if the real peak is `MEMORY_ERROR` higher."""
    return limit_bytes / (1 + MEMORY_ERROR)


def candidates(
    fastest: PricedLayout, pool: LayoutPool, limit_bytes: float, fewer_layers: bool
) -> Iterator[PricedLayout]:
    """Yield the layouts of a pool, besides the fastest, from which the recommended layout is chosen: for each number of
    axes up to the fastest layout's, the `FEW` fastest that tie with it, and the fastest with each smaller number of
    settings.

    Layouts with headroom come first. Once one ties, layouts with more axes or without headroom are not recommended, and
    are left out. `fewer_layers`: also with recomputation in as few layers as leave headroom.
    """
    by, node_size = fastest.job.calibration.difference, fastest.job.cluster.node_size
    most_s = exp(by["base"] + by["moved"]) * fastest.step_s
    near = pool.low_s <= most_s
    n_axes = pool.numbers(lambda group: complexity(group, node_size) // 2)
    room = with_headroom(limit_bytes)
    for most_bytes, kept in ((room, near & (pool.peak_bytes <= room)), (limit_bytes, near & (pool.peak_bytes > room))):
        for count in range(axes(fastest) + 1):
            among = kept & (n_axes == count)
            numbers = pool.fastest(FEW, among, most_s)
            level = [PricedLayout.from_choice(fastest.job, pool.choice(number)) for number in numbers]
            if fewer_layers:
                level = [with_fewest_layers(priced, most_bytes) for priced in level]
            tied = [priced for priced in level if priced.step_s <= fastest.step_s or ties(fastest, priced)]
            if tied:
                yield from tied
                best = min(tied, key=lambda priced: priced.step_s)
                yield from plainer(best, pool, among, most_s)
                if most_bytes == room:
                    return


def with_fewest_layers(priced: PricedLayout, most_bytes: float) -> PricedLayout:
    """Return the layout with recomputation in as few layers as need at most `most_bytes`, if that saves `WORTH_A_KEY`
    of the step; else the layout itself."""
    less = PricedLayout.from_choice(priced.job, fewest_layers(priced.job, priced.choice, most_bytes))
    return less if less.step_s < (1 - WORTH_A_KEY) * priced.step_s else priced


def moved_share(parts_s: Mapping[str, float], other_s: Mapping[str, float]) -> float:
    """Return x, the share of two steps spent on different work, 0 to 1; `parts_s`, `other_s`: seconds by kind."""
    kinds = {**parts_s, **other_s}
    changed = sum(abs(parts_s.get(kind, 0.0) - other_s.get(kind, 0.0)) for kind in kinds)
    return changed / (sum(parts_s.values()) + sum(other_s.values()))


def difference_error(one: PricedLayout, other: PricedLayout) -> float:
    """Return d, the median error of the logarithm of the ratio of the two step times."""
    by = one.job.calibration.difference
    return by["base"] + by["moved"] * moved_share(one.parts_s, other.parts_s)


def ties(one: PricedLayout, other: PricedLayout) -> bool:
    """Return whether the two layouts differ by no more than the error of the difference."""
    return abs(log(one.step_s / other.step_s)) <= difference_error(one, other)
