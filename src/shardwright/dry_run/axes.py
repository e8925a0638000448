"""The axes of a process group, along which its ranks differ. No torch."""

from shardwright.layout.box import DENSE_AXES
from shardwright.layout.layout import Layout


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
