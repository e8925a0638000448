"""A message: what a group of ranks sends in a step. The step time prices messages, and `cost.traffic` lists them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardwright.cost.hardware import Cluster
from shardwright.cost.job import Floats, Ints
from shardwright.cost.ledger import Formulas

Number = Floats | NDArray[np.floating[Any]] | Ints | float
Collective = Callable[[Cluster, ArrayLike, ArrayLike, ArrayLike, str], Floats]


@dataclass(frozen=True)
class Message:
    """A collective, or a send, with which a group of ranks communicates `calls` times. Numbers or arrays (n,).

    `n_bytes`: of the whole buffer of one call, as the functions of `cost.collectives` count them; `size`, `stride`:
    ranks of the group and their distance. A group of one rank sends nothing.
    """

    what: str
    collective: Collective
    n_bytes: Number
    size: Number
    stride: Number
    calls: Number = 1

    def seconds(self, cluster: Cluster, in_step: float = 1.0) -> Floats:
        """Seconds of all calls, one after another; (n,). `in_step`: by how much that is longer in a step than
        alone."""
        if in_step != 1:
            alone = f"{self.what}, alone"
            seconds = replace(self, what=alone).seconds(cluster)
            if not seconds.any():
                return seconds
            f = Formulas("s", {"in_step": in_step, alone: seconds})
            return f(self.what, f.in_step * f[alone])
        if np.all(self.calls == 1):
            return self.collective(cluster, self.n_bytes, self.size, self.stride, self.what)
        once = f"{self.what}, one call"
        one = self.collective(cluster, self.n_bytes, self.size, self.stride, once)
        if not one.any():
            return one
        f = Formulas("s", {"calls": self.calls, once: one})
        return f(self.what, f.calls * f[once])


def named(collective: Collective) -> str:
    """`all-gather`."""
    return collective.__name__.replace("_", "-")
