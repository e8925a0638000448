"""The built-in schedules, one row each (`schedule.registry.Kind`)."""

from collections.abc import Iterator
from typing import Any

from shardwright.schedule.actions import Schedule, down_and_up, from_both_ends
from shardwright.schedule.basic import afab, interleaved, one_f_one_b, zb_h1, zb_h2
from shardwright.schedule.dualpipe import dualpipe, dualpipe_v, zb_v
from shardwright.schedule.registry import Kind, register


def _few(n_ranks: int, n_microbatches: int) -> int:
    """Return 4 x n_ranks micro-batches, plus one for an odd number: a schedule is steady after 2 x n_ranks."""
    few = 4 * n_ranks
    return n_microbatches if n_microbatches <= few else few + (n_microbatches - few) % 2


def _few_rounds(n_ranks: int, n_microbatches: int) -> int:
    """Return a number with rounds of the same lengths, up to three of each: interleaved-1f1b runs micro-batches in
    rounds, and the first rounds may be longer by one."""
    if n_microbatches <= 4 * n_ranks:
        return n_microbatches
    rounds = n_microbatches // n_ranks
    length, longer = divmod(n_microbatches, rounds)
    kept = min(longer, 3)
    return length * (kept + min(rounds - longer, 3)) + kept


def _two_stages(n_ranks: int, n_microbatches: int, virtual_stages: int) -> Iterator[str]:
    if virtual_stages < 2:
        yield f"virtual_stages={virtual_stages} would be plain 1f1b; valid: 2 or more"


def _pairs(n_ranks: int, n_microbatches: int, virtual_stages: int) -> Iterator[str]:
    if n_ranks % 2:
        yield (
            f"pp={n_ranks} is odd, and its ranks are paired from both ends; nearest: {_even(n_ranks)}; dualpipe-v runs "
            f"on any number"
        )
    if n_microbatches % 2:
        yield (
            f"microbatches={n_microbatches} is odd, and half of them enter at each end; nearest: "
            f"{_even(n_microbatches)}"
        )


def _even(odd: int) -> str:
    return " or ".join(str(n) for n in (odd - 1, odd + 1) if n)


def _searched(n_ranks: int, n_microbatches: int, **chosen: Any) -> Schedule:
    from shardwright.schedule.search import search

    return search(n_ranks, n_microbatches, **chosen)


ONE_F_ONE_B = Kind(
    name="1f1b",
    builder=one_f_one_b,
    help="one forward and one backward pass in turn, as soon as a gradient can come back",
    representative=_few,
)
INTERLEAVED = Kind(
    name="interleaved-1f1b",
    builder=interleaved,
    help="1f1b with several stages of fewer layers on each rank: shorter waits, more messages",
    virtual_stages=2,
    virtual_stages_tried=(2, 3, 4, 6, 8),
    rules=_two_stages,
    representative=_few_rounds,
)
for _kind in (
    Kind(
        name="afab",
        builder=afab,
        help="all forward passes, then all backward passes",
        microbatches_stay=True,
    ),
    ONE_F_ONE_B,
    INTERLEAVED,
    Kind(
        name="zb-h1",
        builder=zb_h1,
        help="1f1b with the backward pass in two; gradients of weights fill waits, with the memory of 1f1b",
        splits_backward=True,
        representative=_few,
    ),
    Kind(
        name="zb-h2",
        builder=zb_h2,
        help="zb-h1 with twice as many forward passes ahead: no waits within a step, nearly twice the memory",
        splits_backward=True,
        representative=_few,
    ),
    Kind(
        name="zb-v",
        builder=zb_v,
        help="two stages a rank along a V, and the backward pass in two: little waiting with the memory of 1f1b",
        ways=down_and_up,
        virtual_stages=2,
        splits_backward=True,
        representative=_few,
    ),
    Kind(
        name="dualpipe",
        builder=dualpipe,
        help="half of the micro-batches enters at each end of the ranks; every stage is held by two ranks",
        ways=from_both_ends,
        splits_backward=True,
        rules=_pairs,
        representative=_few,
    ),
    Kind(
        name="dualpipe-v",
        builder=dualpipe_v,
        help="dualpipe with one copy of the model: two stages a rank along a V",
        ways=down_and_up,
        virtual_stages=2,
        splits_backward=True,
        representative=_few,
    ),
    Kind(
        name="auto",
        builder=_searched,
        help="searched for the times of the stages at hand, and for a limit of memory",
        splits_backward=True,
        searched=True,
    ),
):
    register(_kind)
