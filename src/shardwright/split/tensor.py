"""Sharding over tp: replicated parameters with partial gradients, and the rows of the vocabulary on each rank.

The row of a parameter describes how it is split (`model/modules.py`).
"""

from typing import Literal

from shardwright.layout.layout import Layout
from shardwright.model.row import Row


def summed_over(row: Row, layout: Layout, n_kv_heads: int) -> Literal["tp", "tp_replicas"] | None:
    """Return the mesh axis over which partial gradients of a parameter's replicas must be summed, or None.

    A replica that is used for this rank's heads, or for this rank's token shard, has a partial gradient. A replica that
    is used for all tokens and all features has the complete gradient, and a sum would count it tp times.
    """
    if layout.tp == 1:
        return None
    if row.split == "kv_column":
        return "tp_replicas" if kv_replicas(n_kv_heads, layout.tp) > 1 else None
    if row.split == "per_head":
        return "tp"
    return "tp" if row.split == "replicated" and layout.token_shards else None


def kv_replicas(n_kv_heads: int, tp: int) -> int:
    """Return the number of ranks of tp that have the same key and value heads: tp / kv heads if fewer, else 1."""
    return max(1, tp // n_kv_heads)


def vocabulary_rows(vocab_size: int, tp: int, tp_rank: int) -> range:
    """Return the rows of embedding and head on a rank: vocab_size / tp, rounded up; the last ranks have the remainder.

    The matrices have no padding rows, neither in memory nor in checkpoints.
    """
    shard_rows = -(-vocab_size // tp)
    return range(vocab_size)[tp_rank * shard_rows : (tp_rank + 1) * shard_rows]


def chunk_sizes(size: int, n: int) -> tuple[int, ...]:
    """Return the sizes of n shards, as torch.chunk makes them; the last shards may be smaller or empty."""
    most = -(-size // n)
    return tuple(max(0, min(most, size - place * most)) for place in range(n))
