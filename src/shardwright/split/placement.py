"""The assignment of a layer's experts to the ranks of ep by their load; no torch.

An order lists the expert at each of E positions; rank r of n has the positions r E / n to (r + 1) E / n - 1. The
optimizer and checkpoints number experts as the model does: position p has expert p. Such an order is called home.
"""

from collections.abc import Sequence

import numpy as np

LEAST_GAIN = 0.02
"""A swap of two experts has to lower the load of the busiest rank by this fraction of the mean load of a rank."""

Order = tuple[int, ...]


def home(n_experts: int) -> Order:
    """Return the order in which position p has expert p."""
    return tuple(range(n_experts))


def rank_loads(loads: Sequence[float], order: Order, n_ranks: int) -> np.ndarray:
    """Return the sum of the loads of each rank's experts, (n_ranks,)."""
    return np.asarray(loads, dtype=np.float64)[list(order)].reshape(n_ranks, -1).sum(1)


def busiest(loads: Sequence[float], order: Order, n_ranks: int) -> float:
    """Return the load of the busiest rank / the mean load of a rank; 1 without any load."""
    per_rank = rank_loads(loads, order, n_ranks)
    return float(per_rank.max() / per_rank.mean()) if per_rank.any() else 1.0


def place(loads: Sequence[float], order: Order, n_ranks: int, together: int) -> Order:
    """Return an order with a lower load of the busiest rank. `loads`: of each expert; `together`:
    `MoESpec.movable_together`.

    Swaps an expert of the busiest rank with an expert of another rank, the pair after which the larger of both loads is
    the smallest, as long as a swap lowers that load by `LEAST_GAIN` of the mean. Experts that stay on their rank keep
    their positions. Greedy: two swaps that help only together are not found.
    """
    load_E = np.asarray(loads, dtype=np.float64)
    at_P = np.array(order)
    rank_P = np.arange(len(order)) // (len(order) // n_ranks)
    per_rank = rank_loads(loads, order, n_ranks)
    for _ in range(len(order)):
        full = int(per_rank.argmax())
        own, others = np.flatnonzero(rank_P == full), np.flatnonzero(rank_P != full)
        moved = load_E[at_P[own]][:, None] - load_E[at_P[others]][None, :]
        larger = np.maximum(per_rank[full] - moved, per_rank[rank_P[others]][None, :] + moved)
        larger[at_P[own][:, None] // together != at_P[others][None, :] // together] = np.inf
        best = int(larger.argmin()) if larger.size else 0
        if not larger.size or per_rank[full] - larger.flat[best] < max(LEAST_GAIN * per_rank.mean(), 1e-12):
            break
        own_at, other_at = own[best // len(others)], others[best % len(others)]
        change = moved.flat[best]
        per_rank[full] -= change
        per_rank[rank_P[other_at]] += change
        at_P[[own_at, other_at]] = at_P[[other_at, own_at]]
    return _settled(order, tuple(at_P.tolist()), n_ranks)


def _settled(before: Order, after: Order, n_ranks: int) -> Order:
    """Return `after` with each expert that stays on its rank at its position of `before`."""
    per_rank = len(before) // n_ranks
    settled = []
    for start in range(0, len(before), per_rank):
        old, new = before[start : start + per_rank], after[start : start + per_rank]
        arriving = iter([expert for expert in new if expert not in old])
        settled += [expert if expert in new else next(arriving) for expert in old]
    return tuple(settled)
