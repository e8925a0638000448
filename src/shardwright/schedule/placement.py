"""Which rank of `pp` holds which stages: the ways that microbatches take through the ranks."""

Ways = tuple[tuple[int, ...], ...]
"""For each way that microbatches take, the rank of every stage in order. Of n ways the first takes the first n-th of
the microbatches, and so on."""


def round_and_round(n_ranks: int, virtual_stages: int) -> Ways:
    """Stage s is on rank s % n_ranks."""
    return (tuple(range(n_ranks)) * virtual_stages,)


def down_and_up(n_ranks: int, virtual_stages: int) -> Ways:
    """A V: the first half of the stages down the ranks, the second half up again."""
    down = tuple(range(n_ranks))
    return (down + down[::-1],)


def from_both_ends(n_ranks: int, virtual_stages: int) -> Ways:
    """The first half of the microbatches goes down the ranks, the second half up them."""
    down = tuple(range(n_ranks))
    return down, down[::-1]


def held_by(ways: Ways, rank: int) -> list[int]:
    """The stages that a rank holds, those of one way after another, each way's in order."""
    return [stage for path in ways for stage, there in enumerate(path) if there == rank]
