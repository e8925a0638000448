"""The assignment of stages to ranks of `pp`, written as the routes of micro-batches through the ranks."""

Ways = tuple[tuple[int, ...], ...]
"""The routes of micro-batches: each is the rank of every stage, in order. With n routes, the first n-th of the
micro-batches takes the first route, and so on."""


def round_and_round(n_ranks: int, virtual_stages: int) -> Ways:
    """Return one route: stage s is on rank s % n_ranks."""
    return (tuple(range(n_ranks)) * virtual_stages,)


def down_and_up(n_ranks: int, virtual_stages: int) -> Ways:
    """Return one route along a V: the first half of the stages in the order of the ranks, the second in reverse."""
    down = tuple(range(n_ranks))
    return (down + down[::-1],)


def from_both_ends(n_ranks: int, virtual_stages: int) -> Ways:
    """Return two routes: the first half of the micro-batches in the order of the ranks, the second in reverse order."""
    down = tuple(range(n_ranks))
    return down, down[::-1]


def stages_of_rank(routes: Ways, rank: int) -> list[int]:
    """Return the stages of a rank: first the stages of the first route in order, then of the second."""
    return [stage for route in routes for stage, there in enumerate(route) if there == rank]
