"""Messages of the sums of gradients over data ranks, compressed or uncompressed.

| gradients | a reduce-scatter of X elements is     | an all-reduce of X elements is                           |
| --------- | ------------------------------------- | -------------------------------------------------------- |
| none      | a reduce-scatter of g X bytes         | an all-reduce of g X bytes                               |
| bf16      | an all-to-all of 2 X bytes            | an all-to-all and an all-gather, each of 2 X bytes       |
| int8      | an all-to-all of (1 + 4/128) X bytes  | the same with (1 + 4/128) X bytes                        |
| int4      | an all-to-all of (1/2 + 4/128) X bytes | the same with (1/2 + 4/128) X bytes                     |

g: bytes of an element in a reduction of the stack. 4/128: a scale of 4 bytes for each block of 128 elements. With
`layout.node_ranks` g a reduce-scatter over n ranks is two all-to-alls: one of these bytes over the g ranks of a node,
and one of 1/g of them over n/g nodes. Ignored: the time of rounding and of summing the received parts; that rows which
are no multiple of 128 have shorter blocks, and that vectors are sent uncompressed. Gradients that
PowerSGD does not compress are sent as with none.
Source: parallel/compression.py.

Activations in 8 bits (`layout.compress_dispatch`, `compress_pipeline`) send 1 + 4/128 bytes an element: rows to
experts in the forward pass, and between stages activations and their gradients. Ignored: the time of rounding.

Gradients of matrices that are sent as products of thin matrices (`layout.compress_gradients` "powersgd-r").

For each logical matrix (n x m) two factors are all-reduced, of r n and r m elements in fp32. The factors of all
matrices of a stage are sent together, after its last backward pass. For C elements, N rows and M columns of all
matrices of a rank:

    sent       4 r N and 4 r M bytes instead of 4 C
    computed   8 r C FLOPs: the two products that make the factors, and two more, for the gradient and for the message
               that this rank has sent; 8 r^2 N: Gram and Schmidt's orthonormal columns, each projected twice
    moved      64 C bytes: error and gradient are added (12), read for both factors (8), both products are written and
               joined (24), taken from the error (12) and copied to the gradient (8)
    held       4 (C + r M) bytes: errors, and the right factors for the next step

With r up to 32 the products move more than they compute, so the longer of both counts. Ignored: buffers of factors and
of one product, and the start of the small operations of Gram and Schmidt, some 6 r of each shape of a matrix. Source:
Vogels et al., arXiv 1905.13727; parallel/powersgd.py.

Gradients of matrices that are sent as the k largest elements of each block (`layout.compress_gradients` "topk-k").

For C elements in b blocks of all matrices of a rank, n ranks:

    sent       an all-gather of 5 n k b bytes: an element in fp32 and its place, in messages of up to 64 MiB
    moved      52 C bytes: error and gradient are added (12), padded to blocks (8), made absolute (8), read (4) and
               copied without the largest elements to the error (20); 4 C for the zeros that elements are added to, 8 C
               to copy these to the gradient; 26 n k b for the elements that arrive and their places
    held       4 C bytes: errors

Ignored: the comparisons of the selection. Source: Stich et al., arXiv 1809.07599; parallel/topk.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shardwright.cost.collectives import Number, PricedMessage, all_gather, all_reduce, all_to_all, reduce_scatter
from shardwright.cost.job import Candidates, Floats, Ints, Job
from shardwright.cost.ledger import Formulas
from shardwright.cost.matmuls import reached_flops_per_s
from shardwright.cost.parameters import RankParameters
from shardwright.cost.passes import reached_bytes_per_s
from shardwright.cost.pipeline import Stages
from shardwright.layout.keys import ERROR_FEEDBACK, POWERSGD
from shardwright.layout.layout import Layout
from shardwright.model.row import Row
from shardwright.model.spec import ModelSpec
from shardwright.split.compression import (
    BLOCK,
    PLACE_BYTES,
    REPLICA_BUCKET_BYTES,
    blocks_of_shard,
    elements_of_block,
    factored,
    powersgd_rank,
    sparsified,
    transit_row_bytes,
)

_SCALE = 4 / BLOCK
SENT_BYTES = {"bf16": 2.0, "int8": 1 + _SCALE, "int4": 0.5 + _SCALE}
"""Bytes of an element in a message."""


@dataclass(frozen=True)
class GradientSums:
    """The summation of gradients: `element_bytes` of an element in a message, whether it is `compressed`, and how many
    consecutive ranks of a group share a node, (n,) or a number."""

    element_bytes: float
    compressed: bool
    node_ranks: Ints | int = 1

    @staticmethod
    def from_layout(job: Job, layout: Layout, node_ranks: Ints | int) -> "GradientSums":
        """Return the sums of a layout over groups in which `node_ranks` ranks share a node."""
        given = layout.compress_gradients
        if given in ("none", *ERROR_FEEDBACK):
            return GradientSums(job.stack.speed.reduce_bytes, compressed=False)
        return GradientSums(SENT_BYTES[given], compressed=True, node_ranks=node_ranks)

    def reduce_scatter(
        self, what: str, n_elements: Number, size: Ints, stride: Number, calls: Ints
    ) -> list[PricedMessage]:
        """Return the messages after which every rank has its shard of the sum of `n_elements`, in each of the calls."""
        n_bytes, n, g = np.asarray(n_elements * self.element_bytes), np.asarray(size), self.node_ranks
        if not self.compressed:
            return [PricedMessage(what, reduce_scatter, n_bytes, n, stride, calls)]
        hops = (n % g == 0) & (n > g) & (np.asarray(g) > 1)
        if not hops.any():
            return [PricedMessage(what, all_to_all, n_bytes, n, stride, calls)]
        inside, across = np.where(hops, g, n), np.where(hops, n // g, 1)
        return [
            PricedMessage(f"{what}, in nodes", all_to_all, n_bytes, inside, stride, calls),
            PricedMessage(f"{what}, between nodes", all_to_all, n_bytes / g, across, stride * np.asarray(g), calls),
        ]

    def all_reduce(self, what: str, n_elements: Number, size: Ints, stride: Number, calls: Ints) -> list[PricedMessage]:
        """Return the messages after which every rank has the sum of `n_elements`, in each of the calls."""
        n_bytes = n_elements * self.element_bytes
        if not self.compressed:
            return [PricedMessage(what, all_reduce, n_bytes, size, stride, calls)]
        return [
            PricedMessage(f"{what}, all-to-all", all_to_all, n_bytes, size, stride, calls),
            PricedMessage(f"{what}, all-gather", all_gather, n_bytes, size, stride, calls),
        ]


def transit_bytes(job: Job, compressed: str) -> float:
    """Return the bytes of an element of an activation between ranks, for the layout's value of `compress_dispatch` or
    `compress_pipeline`."""
    columns = job.model.d_model
    return job.element_bytes if compressed == "none" else transit_row_bytes(columns) / columns


def waits_for_replicas(layout: Layout) -> bool:
    """Return whether shards of gradients that have replicas stay on the device until the last micro-batch of a step, in
    which FSDP2 sums them over replicas. Compressed gradients are summed after the step's last backward pass, wherever
    they are stored (`parallel.compressed.OverReplicas`)."""
    return layout.compress_gradients == "none"


MOVED_BYTES = 64.0
"""Bytes that are read and written for an element of a matrix."""
LEFT, RIGHT = "left factors of gradients, all-reduce", "right factors of gradients, all-reduce"
LARGEST = "largest elements of gradients, all-gather"
CHOSEN_MOVED_BYTES, ARRIVED_MOVED_BYTES = 64.0, 26.0
"""Bytes that are read and written for an element of a matrix with top-k, and for an element that arrives."""


def counts(model: ModelSpec, stages: Stages, candidates: Candidates) -> Ints:
    """Return elements, rows, columns and blocks of each stage's matrices with gradients that are compressed with error
    feedback, (4, n, S): of logical matrices sent as products rows and columns, of others blocks; of a rank of tp."""
    rank, k = powersgd_rank(candidates.shared), elements_of_block(candidates.shared)
    result = np.zeros((4, len(candidates), len(stages.layers)), np.int64)
    for block, layers in stages.layers_by_kind.items():
        for row in block.rows if rank or k else ():
            if rank and factored(row, rank):
                result += np.array(_row_counts(row))[:, None, None] * layers
            for tp, ep in np.unique(np.stack([candidates.tp, candidates.ep], 1), axis=0).tolist() if k else ():
                if sparsified(row, k, tp, ep, model.n_kv_heads):
                    of_shard = np.array([row.numel // tp, 0, 0, blocks_of_shard(row, tp)])
                    result += (
                        of_shard[:, None, None] * ((candidates.tp == tp) & (candidates.ep == ep))[:, None] * layers
                    )
    return result


def _row_counts(row: Row) -> tuple[int, int, int, int]:
    experts = row.shape[0] if len(row.shape) > 2 else 1
    return row.numel, experts * row.shape[-2], experts * len(row.parts) * row.shape[-1], 0


def messages(candidates: Candidates, params: RankParameters) -> list[PricedMessage]:
    """Return the messages after the last backward pass: with products the all-reduces of the factors, once for each
    stage of the rank; with top-k the all-gathers of the largest elements."""
    rank, calls = powersgd_rank(candidates.shared), np.maximum(params.compressed_stages, 1)
    if k := elements_of_block(candidates.shared):
        n_bytes = (4 + PLACE_BYTES) * k * params.blocks_of_gradients * candidates.gradient_ranks
        calls = np.maximum(calls, -(-n_bytes // REPLICA_BUCKET_BYTES))
        return [PricedMessage(LARGEST, all_gather, n_bytes / calls, candidates.gradient_ranks, candidates.tp, calls)]
    if not rank:
        return []
    return [
        PricedMessage(what, all_reduce, 4 * rank * sides / calls, candidates.gradient_ranks, candidates.tp, calls)
        for what, sides in ((LEFT, params.left_rows), (RIGHT, params.right_columns))
    ]


def computed(job: Job, candidates: Candidates, params: RankParameters) -> dict[str, Floats]:
    """Return the seconds of the products and of the orthonormal columns in a step, or of choosing and adding the
    largest elements, (n,), by name."""
    if k := elements_of_block(candidates.shared):
        arrived = k * params.blocks_of_gradients * candidates.gradient_ranks
        f = Formulas(
            "s", compressed=params.compressed, arrived=arrived, element_rate=reached_bytes_per_s(job),
            chosen_bytes=CHOSEN_MOVED_BYTES, arrived_bytes=ARRIVED_MOVED_BYTES,
        )  # fmt: skip
        moved = f.chosen_bytes * f.compressed + f.arrived_bytes * f.arrived
        what = "largest elements of gradients"
        return {what: f(what, moved / f.element_rate, "after the last backward pass; arXiv 1809.07599")}
    f = Formulas(
        "s", moved_bytes=MOVED_BYTES, r=powersgd_rank(candidates.shared), compressed=params.compressed,
        left_rows=params.left_rows, element_rate=reached_bytes_per_s(job),
        matmul_rate=reached_flops_per_s(job, job.precision),
    )  # fmt: skip
    moving, multiplying = f.moved_bytes * f.compressed / f.element_rate, 8 * f.r * f.compressed / f.matmul_rate
    orthonormal = 8 * f.r * f.r * f.left_rows / f.matmul_rate
    source = "after the last backward pass; arXiv 1905.13727, algorithm 1"
    what = "products of gradients"
    return {what: f(what, np.maximum(moving, multiplying) + orthonormal, source)}


def problems(job: Job, layout: Layout) -> Iterator[str]:
    """Yield the reasons why gradients of this job cannot be compressed with error feedback."""
    if layout.compress_gradients in POWERSGD and job.element_bytes != 4:
        yield (
            f"layout.compress_gradients={layout.compress_gradients!r} needs matmuls in fp32, the type of the "
            f"parameters, and here the precision is {job.precision}; price it with --precision fp32, or "
            f"compress_gradients='bf16'"
        )
