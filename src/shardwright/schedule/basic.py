"""Schedules whose backward pass is one op: all forward then all backward, one forward one backward, interleaved.

With p ranks, m microbatches, v virtual stages a rank, and F, B the times of a whole rank's share of a microbatch:

| schedule         | idle time of a rank | microbatches in flight on rank r  | source                          |
| ---------------- | ------------------- | --------------------------------- | ------------------------------- |
| afab             | (p-1)(F+B)          | m                                 | GPipe, arXiv 1811.06965         |
| 1f1b             | (p-1)(F+B)          | min(m, p-r)                       | Megatron, arXiv 2104.04473, 2.2 |
| interleaved-1f1b | (p-1)(F+B)/v        | p(1 + (p-1)/(pv)) on rank 0       | the same                        |

The table counts no time for messages, and for the interleaved schedule takes m as a multiple of p.
"""

from itertools import pairwise

from shardwright.schedule.actions import Action, Op, Schedule, make


def afab(n_ranks: int, n_microbatches: int) -> Schedule:
    """Every forward pass, then every backward pass, in the same order of microbatches."""
    ranks = (
        [Action(rank, "F", i) for i in range(n_microbatches)] + [Action(rank, "B", i) for i in range(n_microbatches)]
        for rank in range(n_ranks)
    )
    return make(n_ranks, n_microbatches, ranks)


def one_f_one_b(n_ranks: int, n_microbatches: int) -> Schedule:
    """As many forward passes as there are ranks after this one, then forward and backward in turn."""
    ranks = (
        _in_turn(
            [Action(rank, "F", i) for i in range(n_microbatches)],
            [Action(rank, "B", i) for i in range(n_microbatches)],
            warm_up=n_ranks - 1 - rank,
        )
        for rank in range(n_ranks)
    )
    return make(n_ranks, n_microbatches, ranks)


def interleaved(n_ranks: int, n_microbatches: int, virtual_stages: int) -> Schedule:
    """Stage s on rank s % n_ranks, `virtual_stages` on each; a round of microbatches passes through one virtual stage
    of a rank after another.

    Megatron wants rounds of n_ranks microbatches and n_microbatches a multiple of it. Here the microbatches are dealt
    into rounds of n_ranks or a little more, the longer ones first, so that any number runs: a round is long enough
    that its first microbatch is back when its last has left, and the head start that the first round gives to forward
    passes covers the rounds after it. One round, of all, if there are fewer than n_ranks.
    `virtual_stages` is 2 or more.
    """
    n_stages = n_ranks * virtual_stages
    rounds = _rounds(n_ranks, n_microbatches)

    def order(rank: int, op: Op) -> list[Action]:
        stages = range(rank, n_stages, n_ranks)
        return [Action(s, op, i) for each in rounds for s in (stages if op == "F" else stages[::-1]) for i in each]

    ranks = (
        _in_turn(
            order(rank, "F"),
            order(rank, "B"),
            warm_up=2 * (n_ranks - 1 - rank) + (virtual_stages - 1) * len(rounds[0]),
        )
        for rank in range(n_ranks)
    )
    return make(n_stages, n_microbatches, ranks)


def _in_turn(forward: list[Action], backward: list[Action], warm_up: int) -> list[Action]:
    """`warm_up` forward actions, then one forward and one backward in turn, then the backward actions left over."""
    warm_up = min(warm_up, len(forward))
    steady = len(forward) - warm_up
    pairs = zip(forward[warm_up:], backward[:steady], strict=True)
    return forward[:warm_up] + [action for pair in pairs for action in pair] + backward[steady:]


def _rounds(n_ranks: int, n_microbatches: int) -> list[range]:
    """The microbatches in consecutive rounds, at least n_ranks in each if there are as many, none longer than the
    one before."""
    count = max(1, n_microbatches // n_ranks)
    short, longer = divmod(n_microbatches, count)
    ends = [short * i + min(i, longer) for i in range(count + 1)]
    return [range(begin, end) for begin, end in pairwise(ends)]
