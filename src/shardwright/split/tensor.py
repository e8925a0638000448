"""Who holds what over the tensor-parallel axis: replicas of parameters whose gradients are parts, and the vocabulary.

How each parameter is split is in its row (`model/modules.py`).
"""

from typing import Literal

from shardwright.layout import Layout
from shardwright.model.modules import Row


def summed_over(row: Row, layout: Layout, n_kv_heads: int) -> Literal["tp", "tp_copies"] | None:
    """Over which ranks the gradients of the replicas of a parameter are parts that have to be added up.

    A replica that saw this rank's heads, or this rank's token shard, has a part of the gradient. One that saw every
    token and every feature has all of it, and adding would count it tp times.
    """
    if layout.tp == 1:
        return None
    if row.split == "kv_column":
        return "tp_copies" if kv_copies(n_kv_heads, layout.tp) > 1 else None
    if row.split == "per_head":
        return "tp"
    return "tp" if row.split == "replicated" and layout.token_shards else None


def kv_copies(n_kv_heads: int, tp: int) -> int:
    """Ranks of tp that hold the same key and value heads: tp / kv heads where there are fewer, else 1."""
    return max(1, tp // n_kv_heads)


def vocabulary_rows(vocab_size: int, tp: int, tp_rank: int) -> range:
    """The rows of embedding and head that a rank has: equal shares, rounded up, and what is left at the end.

    The matrices keep their true size, in memory as in checkpoints: no row is added to make the shares equal.
    """
    share = -(-vocab_size // tp)
    return range(vocab_size)[tp_rank * share : (tp_rank + 1) * share]
