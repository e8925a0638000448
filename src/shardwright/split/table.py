"""How each module of a decoder is split over the tensor-parallel axis: the table that every reader shares.

| split      | the weight, (out, in)                 | a rank's input            | a rank's output                 |
| ---------- | ------------------------------------- | ------------------------- | ------------------------------- |
| column     | rows dealt out                        | all features              | its share of the features       |
| kv_column  | as column, by kv head; with fewer heads than ranks each head goes to tp / heads ranks as a copy ||
| row        | columns dealt out                     | its share of the features | all features, after a sum       |
| vocabulary | rows dealt out: embedding             | token ids                 | all features, after a sum       |
|            | rows dealt out: head                  | all features              | logits of its share of the ids  |
| tokens     | a copy on every rank                  | every token, or under sequence parallelism its shard ||
| heads      | a copy on every rank                  | its share of the heads    | its share of the heads          |
| every_head | none                                  | as `tokens`               | every token, for its heads      |
| experts    | not cut over tp: dealt out over ep    | rows of the tokens that picked them | rows of the same tokens |

Sources: Shoeybi et al., Megatron-LM, arXiv 1909.08053, section 3; Korthikanti et al., arXiv 2205.05198, section 4.2
for the token shards. Modules that read one input are written in one row: its gradient is summed over the ranks once.
"""

from dataclasses import dataclass
from typing import Literal

from shardwright.layout import Layout

How = Literal["column", "kv_column", "row", "vocabulary", "tokens", "heads", "every_head", "experts"]


@dataclass(frozen=True)
class Split:
    """One row: the modules `names` of the module `owner` (a path; `*` is any layer; "" the whole model)."""

    owner: str
    names: tuple[str, ...]
    how: tuple[How, ...]
    """One for each name; column and kv_column may stand in one row, others alone."""
    mixes_tokens: bool = False
    """What lies between column and row products looks at several tokens, so they have to be in their order."""


DECODER = (
    Split("", ("embedding",), ("vocabulary",)),
    Split("", ("position_embedding",), ("tokens",)),
    Split("layers.*", ("attention_norm",), ("tokens",)),
    Split("layers.*.attention", ("q", "k", "v"), ("column", "kv_column", "kv_column"), mixes_tokens=True),
    Split("layers.*.attention", ("q_norm",), ("heads",)),
    Split("layers.*.attention", ("k_norm",), ("heads",)),
    Split("layers.*.attention", ("o",), ("row",), mixes_tokens=True),
    Split("layers.*.attention", ("q_down", "q_latent_norm", "kv_down", "kv_latent_norm"), ("tokens",) * 4),
    Split("layers.*.attention", ("q_up",), ("column",), mixes_tokens=True),
    Split("layers.*.attention", ("kv_up",), ("column",), mixes_tokens=True),
    Split("layers.*.attention", ("rotated_key",), ("every_head",), mixes_tokens=True),
    Split("layers.*", ("ffn_norm",), ("tokens",)),
    Split("layers.*.ffn", ("gate", "up"), ("column", "column")),
    Split("layers.*.ffn", ("down",), ("row",)),
    Split("layers.*.ffn", ("router",), ("tokens",)),
    Split("layers.*.ffn", ("experts",), ("experts",)),
    Split("layers.*.ffn.shared", ("gate", "up"), ("column", "column")),
    Split("layers.*.ffn.shared", ("down",), ("row",)),
    Split("", ("norm",), ("tokens",)),
    Split("", ("head",), ("vocabulary",)),
)


def how_split(name: str, table: tuple[Split, ...] = DECODER) -> How:
    """How the module that a parameter belongs to is split; `layers.3.attention.q.weight` -> "column"."""
    *path, module, _ = name.split(".")
    owner = ".".join("*" if part.isdecimal() else part for part in path)
    for row in table:
        if row.owner == owner and module in row.names:
            return row.how[row.names.index(module)]
    raise AssertionError(f"the table says nothing of {name}")


def split_dim(name: str) -> int | None:
    """The dim of a parameter that is dealt out over tp; None if every rank has a copy of it."""
    match how_split(name):
        case "column" | "kv_column" | "vocabulary":
            return 0
        case "row":
            return 1 if name.endswith(".weight") else None
        case _:
            return None


def summed_over(name: str, layout: Layout, n_kv_heads: int) -> Literal["tp", "tp_copies"] | None:
    """Over which ranks the gradients of the copies of a parameter are parts that have to be added up.

    A copy that saw this rank's heads, or this rank's token shard, has a part of the gradient. One that saw every
    token and every feature has all of it, and adding would count it tp times.
    """
    how = how_split(name)
    if layout.tp == 1:
        return None
    if how == "kv_column":
        return "tp_copies" if kv_copies(n_kv_heads, layout.tp) > 1 else None
    if how == "heads":
        return "tp"
    copied = how == "tokens" or (how == "row" and split_dim(name) is None)
    return "tp" if copied and layout.token_shards else None


def kv_copies(n_kv_heads: int, tp: int) -> int:
    """Ranks of tp that hold the same key and value heads: tp / kv heads where there are fewer, else 1."""
    return max(1, tp // n_kv_heads)


def vocabulary_rows(vocab_size: int, tp: int, tp_rank: int) -> range:
    """The rows of embedding and head that a rank has: equal shares, rounded up, and what is left at the end.

    The matrices keep their true size, in memory as in checkpoints: no row is added to make the shares equal.
    """
    share = -(-vocab_size // tp)
    return range(vocab_size)[tp_rank * share : (tp_rank + 1) * share]
