"""Which ranks of a layout can differ in what they hold and send, and one of each class. No torch."""

from shardwright.layout.box import DENSE_AXES
from shardwright.layout.layout import Layout

ALL_RANKS = 8
"""Worlds of up to so many ranks are run whole."""


def one_of_each_class(layout: Layout, imbalance: float = 1.0) -> list[int]:
    """Ranks, ascending: all of a small world; else every rank of `pp` at the first place of the other axes, and at the
    first and the last rank of `pp` the last place along each other axis. Shards are as large as the first or smaller,
    so the first place is the fullest; a rank of ep that gets other numbers of rows is at one of these places."""
    if layout.world_size <= ALL_RANKS:
        return list(range(layout.world_size))
    found = {layout.rank_at({"pp": pp}) for pp in range(layout.pp)}
    for axis in DENSE_AXES:
        degree = layout.degree(axis)
        if axis != "pp" and degree > 1:
            for pp in {0, layout.pp - 1}:
                found.add(layout.rank_at({"pp": pp, axis: degree - 1}))
    if layout.ep > 1 and imbalance != 1:
        found.add(layout.group_of(0, "ep")[-1])
    return sorted(found)
