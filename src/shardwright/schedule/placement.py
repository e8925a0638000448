"""Which rank of `pp` holds which stages, for each named schedule."""

from shardwright.schedule.actions import Schedule

V_SHAPED = ("zb-v", "dualpipe-v")
SPLIT_BACKWARD = ("zb-h1", "zb-h2", "zb-v", "dualpipe", "dualpipe-v", "auto")
"""Those with I and W."""


def paths(name: str, n_ranks: int, virtual_stages: int) -> tuple[tuple[int, ...], ...]:
    """The ways that microbatches go: for each, the rank of every stage in order.

    One way for all microbatches, round and round or down the ranks and up again; two for "dualpipe", of which the
    first half of the microbatches goes the one and the second half the other.
    """
    down = tuple(range(n_ranks))
    if name == "dualpipe":
        return down, down[::-1]
    if name in V_SHAPED:
        return (down + down[::-1],)
    return (down * virtual_stages,)


def held_by(name: str, n_ranks: int, virtual_stages: int, rank: int) -> list[tuple[int, int]]:
    """What a rank holds, as (way, stage), in the order of ways and stages."""
    ways = enumerate(paths(name, n_ranks, virtual_stages))
    return [(way, stage) for way, path in ways for stage, there in enumerate(path) if there == rank]


def way_of(schedule: Schedule, ways: tuple[tuple[int, ...], ...], microbatch: int) -> int:
    """Which of the ways a microbatch goes in a schedule."""
    return ways.index(tuple(schedule.place[stage, microbatch] for stage in range(schedule.n_stages)))
