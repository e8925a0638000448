"""Schedules that split the backward pass and fill idle time with weight gradients: ZB-H1, ZB-H2.

Other ranks depend only on I; W can run at any time after it. With p ranks, F, I, W the times of a stage, no time for
messages, and 2p - 1 micro-batches or more:

| schedule | idle time of a rank | in flight on rank r | waiting for W on rank r |
| -------- | ------------------- | ------------------- | ----------------------- |
| zb-h1    | (p-1)(F+I-W)        | p-r                 | r+1                     |
| zb-h2    | (p-1)(F+I-2W)       | 2(p-r)-1            | 2r+1                    |

if W takes no longer than F and I; a longer W delays the results that other ranks depend on.
Source: Qi et al., arXiv 2401.10241, sections 2 and 5.3.
"""

from shardwright.schedule.actions import Action, Op, Schedule, make


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
