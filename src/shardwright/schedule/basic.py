"""The published schedules of stages in order: all forward then all backward, 1F1B, interleaved, ZB-H1 and ZB-H2.

A backward pass in one op, with p ranks, m micro-batches, v virtual stages a rank, and F, B the times of all stages of a
rank for one micro-batch:

| schedule         | idle time of a rank | micro-batches in flight on rank r | source                          |
| ---------------- | ------------------- | --------------------------------- | ------------------------------- |
| afab             | (p-1)(F+B)          | m                                 | GPipe, arXiv 1811.06965         |
| 1f1b             | (p-1)(F+B)          | min(m, p-r)                       | Megatron, arXiv 2104.04473, 2.2 |
| interleaved-1f1b | (p-1)(F+B)/v        | p(1 + (p-1)/(pv)) on rank 0       | the same                        |

Here messages take no time, and m is a multiple of p for the interleaved schedule.

A backward pass of two ops, I and W, in which weight gradients fill idle time: other ranks depend only on I, and W can
run at any time after it. With F, I, W the times of a stage, and 2p - 1 micro-batches or more:

| schedule | idle time of a rank | in flight on rank r | waiting for W on rank r |
| -------- | ------------------- | ------------------- | ----------------------- |
| zb-h1    | (p-1)(F+I-W)        | p-r                 | r+1                     |
| zb-h2    | (p-1)(F+I-2W)       | 2(p-r)-1            | 2r+1                    |

if W takes no longer than F and I; a longer W delays the results that other ranks depend on.
Source: Qi et al., arXiv 2401.10241, sections 2 and 5.3.

The schedules of forward passes alone, for evaluation, are here too.
"""

from collections.abc import Sequence
from itertools import pairwise

from shardwright.schedule.actions import Action, Op, Schedule, make


def afab(n_ranks: int, n_microbatches: int) -> Schedule:
    """Run all forward passes, then all backward passes, in the same order of micro-batches."""
    ranks = (
        [Action(rank, "F", i) for i in range(n_microbatches)] + [Action(rank, "B", i) for i in range(n_microbatches)]
        for rank in range(n_ranks)
    )
    return make(n_ranks, n_microbatches, ranks)


def one_f_one_b(n_ranks: int, n_microbatches: int) -> Schedule:
    """Run as many warm-up forward passes as there are later ranks, then one forward and one backward in turn."""
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
    """Put stage s on rank s % n_ranks, `virtual_stages` on each rank; a rank runs a round of micro-batches through its
    first virtual stage, then through its second, and so on.

    Megatron-LM requires n_microbatches to be a multiple of n_ranks, and runs rounds of n_ranks. Here any number runs:
    the micro-batches are partitioned into rounds of n_ranks or slightly more, the longer rounds first. A round has at
    least n_ranks micro-batches, so that its first micro-batch reaches the next virtual stage of a rank when the rank
    has run its last one; and the warm-up, sized for the longest round, is enough for the later rounds. With fewer than
    n_ranks micro-batches there is one round. `virtual_stages` is 2 or more.
    """
    n_stages = n_ranks * virtual_stages
    rounds = _rounds(n_ranks, n_microbatches)

    def order(rank: int, op: Op) -> list[Action]:
        stages = range(rank, n_stages, n_ranks)
        return [Action(s, op, i) for batch in rounds for s in (stages if op == "F" else stages[::-1]) for i in batch]

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
    """Return `warm_up` forward actions, then one forward and one backward in turn, then the other backward actions."""
    warm_up = min(warm_up, len(forward))
    steady = len(forward) - warm_up
    pairs = zip(forward[warm_up:], backward[:steady], strict=True)
    return forward[:warm_up] + [action for pair in pairs for action in pair] + backward[steady:]


def _rounds(n_ranks: int, n_microbatches: int) -> list[range]:
    """Return the micro-batches in consecutive rounds of at least n_ranks (if there are as many), none longer than the
    previous one."""
    count = max(1, n_microbatches // n_ranks)
    short, longer = divmod(n_microbatches, count)
    ends = [short * i + min(i, longer) for i in range(count + 1)]
    return [range(begin, end) for begin, end in pairwise(ends)]


def forward_only(path: Sequence[int], n_ranks: int, n_microbatches: int) -> Schedule:
    """Return the forward passes of every micro-batch; stage s is on rank `path[s]`.

    A rank runs `n_ranks` micro-batches through its first stage, then through its next, so that the inputs of a later
    stage arrive when the rank is about to need them (the order of forward passes in interleaved 1F1B,
    arXiv 2104.04473, section 2.2).
    """
    ranks: list[list[Action]] = [[] for _ in range(n_ranks)]
    for first in range(0, n_microbatches, n_ranks):
        for stage, rank in enumerate(path):
            group = range(first, min(first + n_ranks, n_microbatches))
            ranks[rank].extend(Action(stage, "F", microbatch) for microbatch in group)
    return make(len(path), n_microbatches, ranks, name="forward")


def zb_h1(n_ranks: int, n_microbatches: int) -> Schedule:
    """Run 1F1B in which every rank has as many unfinished micro-batches as rank 0: rank r runs r fewer forward passes
    ahead and defers r more weight gradients."""
    ranks = (deferred(rank, n_microbatches, ahead=n_ranks - 1 - rank, behind=rank) for rank in range(n_ranks))
    return make(n_ranks, n_microbatches, ranks)


def zb_h2(n_ranks: int, n_microbatches: int) -> Schedule:
    """Run twice the forward passes ahead and twice the deferred weight gradients, so that no rank is idle before the
    first gradient; the ends of the ranks are staggered like their starts."""
    ranks = (deferred(rank, n_microbatches, ahead=2 * (n_ranks - 1 - rank), behind=2 * rank) for rank in range(n_ranks))
    return make(n_ranks, n_microbatches, ranks, staggered=True)


def deferred(stage: int, n_microbatches: int, *, ahead: int, behind: int) -> list[Action]:
    """Run F `ahead` micro-batches before I and W `behind` micro-batches after it; otherwise F, I, W in turn."""
    microbatches = range(n_microbatches)
    lags: tuple[tuple[Op, int], ...] = ("F", -ahead), ("I", 0), ("W", behind)
    return [
        Action(stage, op, step - lag)
        for step in range(-ahead, n_microbatches + behind)
        for op, lag in lags
        if step - lag in microbatches
    ]
