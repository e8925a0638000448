"""Counts and sizes of compressed gradients and parameters, which `parallel` sends and `cost` prices; no torch."""

from shardwright.layout.keys import POWERSGD
from shardwright.layout.layout import Layout
from shardwright.model.modules import Row

BLOCK = 128
"""Elements of a block, at most. A scale of 4 bytes adds 3 % to integers of 8 bits."""


def block_length(columns: int) -> int:
    """Elements of a block of a row: it is cut into the fewest blocks of equal length, the last of which may be
    shorter."""
    return -(-columns // -(-columns // BLOCK))


def powersgd_rank(layout: Layout) -> int:
    """The rank of the products that gradients of matrices travel as; 0 where they do not."""
    how = layout.compress_gradients
    return int(how.removeprefix("powersgd-")) if how in POWERSGD else 0


def factored(row: Row, rank: int) -> bool:
    """Whether the gradient of a parameter travels as products of this rank: all its logical matrices do, or none."""
    if not row.hidden:
        return False
    columns = row.shape[-1]
    return all(rank * (row.heads * n + columns) < row.heads * n * columns for _, n in row.parts)


def gradient_roundings(layout: Layout) -> int:
    """How often an element of a gradient is rounded on its way to its sum over all data ranks: once in each hop of a
    reduce-scatter, and once on its way to replicas and once on its way back."""
    if layout.compress_gradients == "none" or layout.compress_gradients in POWERSGD:
        return 0
    sharded = layout.zero > 0 and layout.dp_shard * layout.cp > 1
    replicas = layout.dp_replicate * (1 if layout.zero else layout.cp)
    hops = 2 if 1 < layout.node_ranks < layout.dp_shard * layout.cp else 1
    return sharded * hops + 2 * (replicas > 1)
