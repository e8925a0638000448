"""Forward passes alone, as evaluation runs them."""

from collections.abc import Sequence

from shardwright.schedule.actions import Action, Schedule, make


def forward_only(path: Sequence[int], n_ranks: int, n_microbatches: int) -> Schedule:
    """Every microbatch through the stages, of which number s lies on rank `path[s]`.

    A rank takes `n_ranks` microbatches through its first stage, then through its next, so that what comes round to a
    later stage meets a rank that is about to need it (the order of forward passes in interleaved 1F1B,
    arXiv 2104.04473, section 2.2).
    """
    ranks: list[list[Action]] = [[] for _ in range(n_ranks)]
    for first in range(0, n_microbatches, n_ranks):
        for stage, rank in enumerate(path):
            group = range(first, min(first + n_ranks, n_microbatches))
            ranks[rank].extend(Action(stage, "F", microbatch) for microbatch in group)
    return make(len(path), n_microbatches, ranks, name="forward")
