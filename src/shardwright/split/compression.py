"""Counts and sizes of compressed gradients and parameters, which `parallel` sends and `cost` prices; no torch.

Bucket sizes of gradients in their all-reduce, and of logits in the loss.
"""

from shardwright.layout.keys import POWERSGD
from shardwright.layout.layout import Layout
from shardwright.model.modules import Row
from shardwright.system.units import MiB

BLOCK = 128
"""Maximum number of elements of a block. A scale of 4 bytes adds 3 % to 8-bit integers."""


def block_length(columns: int) -> int:
    """Return the elements of a block: a row has the fewest blocks of equal length; the last may be shorter."""
    return -(-columns // -(-columns // BLOCK))


def powersgd_rank(layout: Layout) -> int:
    """Return the rank of the low-rank products that the gradients of matrices are sent as; 0 without PowerSGD."""
    how = layout.compress_gradients
    return int(how.removeprefix("powersgd-")) if how in POWERSGD else 0


def factored(row: Row, rank: int) -> bool:
    """Return whether a parameter's gradient is sent as products of this rank: all its logical matrices are, or none."""
    if not (row.hidden and row.trained):
        return False
    columns = row.shape[-1]
    return all(rank * (row.heads * n + columns) < row.heads * n * columns for _, n in row.parts)


def gradient_roundings(layout: Layout) -> int:
    """Return how often a gradient element is rounded before it is summed over all data ranks: once in each hop of a
    reduce-scatter, once on its way to the replicas and once on its way back."""
    if layout.compress_gradients == "none" or layout.compress_gradients in POWERSGD:
        return 0
    sharded = layout.zero > 0 and layout.dp_shard * layout.cp > 1
    replicas = layout.dp_replicate * (1 if layout.zero else layout.cp)
    hops = 2 if 1 < layout.node_ranks < layout.dp_shard * layout.cp else 1
    return sharded * hops + 2 * (replicas > 1)


BUCKET_BYTES = 25 * 2**20
"""Bytes of gradients that ZeRO-0 sums in one all-reduce, unless one parameter has more.

Large enough for full bandwidth, and small enough that the first buckets are reduced while the backward pass computes
the others. As in PyTorch's DDP (Li et al., arXiv 2006.15704).
"""
REPLICA_BUCKET_BYTES = 64 * MiB
"""Bytes of compressed gradients, measured before compression, that are summed over replicas at once where FSDP2 shards,
unless one gradient has more."""
LOGITS_TOGETHER = 2**22
"""Number of logits that the loss processes at a time on a CPU, where it copies them to fp32: 16 MiB."""
LOGITS_TOGETHER_ON_GPU = 2**26
"""`LOGITS_TOGETHER` on a GPU: 256 MiB, enough that the kernels take longer than their launches."""
CONVERTED_BYTES = 64 * MiB
"""Bytes of gradients that a single rank converts at once from the compute type to the type of the parameters."""
