"""Equivalence classes of ranks with equal memory and messages, and one rank of each class. No torch.

The axes of a process group, along which its ranks differ. No torch.
"""

from shardwright.layout.box import DENSE_AXES
from shardwright.layout.layout import Layout

ALL_RANKS = 8
"""Maximum world size for which every rank is run."""


def one_of_each_class(layout: Layout, imbalance: float = 1.0) -> list[int]:
    """Return ranks in ascending order that cover every class: all ranks of a small world; otherwise every rank of `pp`
    at index 0 of the other axes, and at the first and last rank of `pp` also the last index along each other axis.

    The first shard is the largest, so index 0 needs the most memory. A rank of ep with another number of rows has one
    of these coordinates.
    """
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


def axes_of(layout: Layout, ranks: tuple[int, ...], rank: int) -> str:
    """Return the axes along which the ranks of a process group differ: `tp`, `dp_shard x cp`, or `ep` if only that axis
    has this group; `one rank` for a single rank."""
    if len(ranks) == 1:
        return "one rank"
    first, last = layout.coordinates(ranks[0]), layout.coordinates(ranks[-1])
    # Groups are boxes, so their first and last rank differ along all of their axes.
    differ = [axis for axis in DENSE_AXES if first[axis] != last[axis]]
    if layout.ep > 1 and len(differ) > 1:
        for axes in (("ep",), ("expert_dp_shard",), ("dp_replicate", "expert_dp_shard")):
            if tuple(layout.group_of(rank, *axes)) == ranks:
                return " x ".join(axes)
    if layout.ep > 1 and tuple(layout.group_of(rank, "ep")) == ranks:
        whole = tuple(layout.group_of(rank, *differ))
        return f"{differ[0]} = ep" if whole == ranks else "ep"
    return " x ".join(differ)
