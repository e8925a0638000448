"""Schedules of forward passes only, for evaluation."""

from collections.abc import Sequence

from shardwright.schedule.actions import Action, Schedule, make


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
