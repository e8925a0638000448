"""The distinct numbers of an array of few."""

import numpy as np

from shardwright.cost.job import Ints


def numbered(values: Ints) -> tuple[Ints, Ints]:
    """The distinct ones of n whole numbers from 0 on, in order, (u,), and for each of the n which of them it is, (n,).

    As `np.unique` with `return_inverse`, without sorting where the largest is not far above n.
    """
    most = int(values.max(initial=0))
    if most > 4 * len(values):
        found, back = np.unique(values, return_inverse=True)
        return found, back
    there = np.zeros(most + 1, dtype=bool)
    there[values] = True
    places = np.cumsum(there) - 1
    return np.flatnonzero(there), places[values]
