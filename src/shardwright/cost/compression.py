"""Seconds of the sums of gradients over data ranks and of the gathers of weights, compressed or as they are.

| gradients | a reduce-scatter of X elements is     | an all-reduce of X elements is                           |
| --------- | ------------------------------------- | -------------------------------------------------------- |
| none      | a reduce-scatter of g X bytes         | an all-reduce of g X bytes                               |
| bf16      | an all-to-all of 2 X bytes            | an all-to-all and an all-gather, each of 2 X bytes       |

| int8      | an all-to-all of (1 + 4/128) X bytes  | the same with (1 + 4/128) X bytes                        |
| int4      | an all-to-all of (1/2 + 4/128) X bytes | the same with (1/2 + 4/128) X bytes                     |

g: bytes of an element in a reduction of the stack. 4/128: a scale of 4 bytes for each block of 128 elements. With
`layout.node_ranks` g a reduce-scatter over n ranks is two all-to-alls: of those bytes over the g ranks of a node, of
1/g of them over n/g nodes. Ignored: the time of rounding and of the sum where parts arrive; that rows which are no
multiple of 128 have shorter blocks, and that vectors travel as they are.
Source: parallel/compression.py, parallel/blocks_of_integers.py.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from shardwright.compression import BLOCK
from shardwright.cost import collectives, ledger
from shardwright.cost.hardware import Cluster
from shardwright.cost.job import Floats, Ints, Job
from shardwright.layout import Layout

_SCALE = 4 / BLOCK
SENT_BYTES = {"bf16": 2.0, "int8": 1 + _SCALE, "int4": 0.5 + _SCALE}
"""Bytes of an element on its way."""


@dataclass(frozen=True)
class Sums:
    """How gradients are summed: `element_bytes` of an element on its way, and whether it is `compressed`."""

    cluster: Cluster
    element_bytes: float
    compressed: bool
    node_ranks: int = 1

    @staticmethod
    def of(job: Job, layout: Layout) -> "Sums":
        """The sums of a layout."""
        given = layout.compress_gradients
        if given == "none":
            return Sums(job.cluster, job.stack.speed.reduce_bytes, compressed=False)
        return Sums(job.cluster, SENT_BYTES[given], compressed=True, node_ranks=layout.node_ranks)

    def reduce_scatter(self, n_elements: Floats | Ints, size: ArrayLike, stride: ArrayLike, what: str) -> Floats:
        """Seconds until every rank has its shard of the sum of `n_elements`."""
        n_bytes, n, g = n_elements * self.element_bytes, np.asarray(size), self.node_ranks
        if not self.compressed:
            return collectives.reduce_scatter(self.cluster, n_bytes, n, stride, what)
        hops = (n % g == 0) & (n > g) & (g > 1)
        if not hops.any():
            return collectives.all_to_all(self.cluster, n_bytes, n, stride, what)
        inside, across = f"{what}, in nodes", f"{what}, between nodes"
        steps = {
            inside: collectives.all_to_all(self.cluster, n_bytes, np.where(hops, g, n), stride, inside),
            across: collectives.all_to_all(
                self.cluster, n_bytes / g, np.where(hops, n // g, 1), np.asarray(stride) * g, across
            ),
        }
        return ledger.total(what, steps)

    def all_reduce(self, n_elements: Floats | Ints, size: ArrayLike, stride: ArrayLike, what: str) -> Floats:
        """Seconds until every rank has the sum of `n_elements`."""
        n_bytes = n_elements * self.element_bytes
        if not self.compressed:
            return collectives.all_reduce(self.cluster, n_bytes, size, stride, what)
        steps = {f"{what}, all-to-all": collectives.all_to_all, f"{what}, all-gather": collectives.all_gather}
        return ledger.total(
            what, {name: send(self.cluster, n_bytes, size, stride, name) for name, send in steps.items()}
        )
