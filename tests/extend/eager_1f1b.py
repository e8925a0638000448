"""A pipeline schedule of your own: 1F1B whose ranks run twice as many forward passes before their first backward pass.

The output of a forward pass then has the time of one more action to reach the next rank, at the cost of nearly twice as
many micro-batches in flight.
"""

from shardwright.schedule.actions import Action, Schedule, make
from shardwright.schedule.registry import Kind, register


def eager_1f1b(n_ranks: int, n_microbatches: int) -> Schedule:
    """Return 2 (p - 1 - r) + 1 forward passes for rank r, then backward and forward passes in turn."""
    ranks = []
    for rank in range(n_ranks):
        forward = [Action(rank, "F", i) for i in range(n_microbatches)]
        backward = [Action(rank, "B", i) for i in range(n_microbatches)]
        first = min(2 * (n_ranks - 1 - rank) + 1, n_microbatches)
        actions, rest = forward[:first], forward[first:]
        for i, action in enumerate(backward):
            actions += [action, *rest[i : i + 1]]
        ranks.append(actions)
    return make(n_ranks, n_microbatches, ranks)


register(
    Kind(name="eager-1f1b", builder=eager_1f1b, help="1F1B with about twice as many forward passes before the first B")
)
