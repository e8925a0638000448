"""Counts and sizes of compressed gradients and parameters, which `parallel` sends and `cost` prices, and the sizes of
buckets: of gradients in their all-reduce, and of logits in the loss; no torch."""

from shardwright.layout.keys import ERROR_FEEDBACK, POWERSGD, TOPK
from shardwright.layout.layout import Layout
from shardwright.model.row import Row
from shardwright.split.tensor import kv_replicas
from shardwright.system.units import MiB

BLOCK = 128
"""Maximum number of elements of a block. A scale of 4 bytes adds 3 % to 8-bit integers."""


def block_length(columns: int) -> int:
    """Return the elements of a block: a row has the fewest blocks of equal length; the last may be shorter."""
    return -(-columns // -(-columns // BLOCK))


def transit_row_bytes(columns: int) -> int:
    """Return the bytes of a row of an activation in 8 bits: a byte for each element of its blocks, the last one padded,
    and a scale for each block."""
    length = block_length(columns)
    return -(-columns // length) * (length + 4)


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


def elements_of_block(layout: Layout) -> int:
    """Return how many elements of each block of a gradient a rank sends with top-k; 0 without."""
    how = layout.compress_gradients
    return int(how.removeprefix("topk-")) if how in TOPK else 0


PLACE_BYTES = 1
"""Bytes of the place of an element in its block."""


def sparsified(row: Row, k: int, tp: int, ep: int, n_kv_heads: int) -> bool:
    """Return whether a rank sends the `k` largest elements of each block of a parameter's gradient: of each hidden
    matrix that tp shards without replicas, if these elements with their places have fewer bytes than the block in fp32.
    Experts on a mesh of their own, with tp or ep, are summed without compression."""
    if not (k and row.hidden and row.trained) or (row.split == "experts" and ep > 1):
        return False
    replicated = row.split_dim is None or (row.split == "kv_column" and kv_replicas(n_kv_heads, tp) > 1)
    return not (tp > 1 and replicated) and k * (4 + PLACE_BYTES) < 4 * block_length(shard_columns(row, tp))


def shard_columns(row: Row, tp: int) -> int:
    """Return the elements of a row of a matrix on a rank of tp."""
    return row.shape[-1] // tp if row.split == "row" else row.shape[-1]


def blocks_of_shard(row: Row, tp: int) -> int:
    """Return the blocks of a matrix, or of a stack of matrices, on a rank of tp."""
    columns = shard_columns(row, tp)
    n_rows = row.numel // row.shape[-1] // (tp if row.split_dim == 0 else 1)
    return n_rows * -(-columns // block_length(columns))


def gradient_roundings(layout: Layout) -> int:
    """Return how often a gradient element is rounded before it is summed over all data ranks: once in each hop of a
    reduce-scatter, once on its way to the replicas and once on its way back."""
    if layout.compress_gradients in ("none", *ERROR_FEEDBACK):
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
