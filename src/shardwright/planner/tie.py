"""Layouts that the prediction cannot tell from the fastest one, and the simplest of them."""

from collections.abc import Iterable

from shardwright.layout import Layout
from shardwright.layout_keys import KEYS
from shardwright.planner.headline import headline
from shardwright.planner.search import Priced

MODEL_AXES = ("tp", "pp", "cp", "ep")
"""Degrees that divide the work on one sequence; data ranks divide only the batch."""


def complexity(layout: Layout) -> tuple[int, int]:
    """How many axes divide a model or a sequence; then how many other keys that are used are not at their default."""
    axes = sum(layout.degree(axis) > 1 for axis in MODEL_AXES)
    other = [
        name
        for name, key in KEYS.items()
        if name not in (*MODEL_AXES, "dp_shard", "dp_replicate", "zero")
        and key.used(layout)
        and getattr(layout, name) != key.default_in(layout)
    ]
    return axes, len(other)


def simplest(best: Priced, others: Iterable[Priced]) -> Priced | None:
    """The simplest of `others` whose step is not longer than the interval of the best one reaches, of equally simple
    ones the fastest; None where none is simpler than the best."""
    longest = headline(best).interval_s[1]
    tied = [other for other in others if other.step_s <= longest and complexity(other.layout) < complexity(best.layout)]
    return min(tied, key=lambda other: (complexity(other.layout), other.step_s), default=None)
