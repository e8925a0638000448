"""A row: one parameter of a model, with its shape and role and how tensor parallelism splits it.

| split      | dim split over tp             | a rank's input of the matmul        | a rank's output                 |
| ---------- | ----------------------------- | ----------------------------------- | ------------------------------- |
| column     | 0, output features            | all features                        | its shard of output features    |
| kv_column  | 0, by kv head; with fewer kv heads than ranks, tp / heads ranks hold a replica of one head           |||
| row        | 1, input features             | its shard of input features         | all features, after a sum       |
| vocabulary | 0, token ids                  | embedding: token ids                | all features, after a sum       |
|            |                               | head: all features                  | logits of its shard of the ids  |
| replicated | none                          | all tokens, or its token shard under sequence parallelism            ||
| per_head   | none                          | the rank's heads                    | the rank's heads                |
| experts    | none; dim 0 is split over ep  | rows of the tokens routed to them   | rows of the same tokens         |

An adapter (`model/lora_sizes.py`) follows the matrix W: column: A is per_head, as every rank has the gradient from its
own output features, and B is sharded as W; row: A is sharded as W, and B is per_head, as every rank has the gradient
from its own input features; replicated: both are replicated; experts: both are sharded as W, by expert. A magnitude is
sharded as a bias of W is.

Sources: Shoeybi et al., Megatron-LM, arXiv 1909.08053, section 3; Korthikanti et al., arXiv 2205.05198, section 4.2
for token shards. No torch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from shardwright.model.lora_sizes import StoredRow
from shardwright.model.mup import WIDTH_POWERS

Kind = Literal["matrix", "embedding", "head", "norm", "bias", "router", "expert", "balance"]
"""`matrix`: a hidden matrix; `bias`: vectors and filters, without weight decay; `balance`: not trained by gradients,
updated from the load of the experts."""


Split = Literal["column", "kv_column", "row", "vocabulary", "replicated", "per_head", "experts"]


Tokens = Literal["all", "routed"]
"""The tokens of a matmul: all tokens, or the tokens that the router sends to an expert."""


SPLIT_DIM: dict[Split, int] = {"column": 0, "kv_column": 0, "vocabulary": 0, "row": 1}
"""The dim of a parameter that is sharded over tp; with the other splits it is replicated."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One parameter.

    `name`: within its layer (`attention.q.weight`) or, outside the layers, in the model (`norm.weight`).
    `shape`: (out, in) of a matrix, (experts, out, in) of experts, (experts, out) of their biases, (n,) of a vector.
    `std`: standard deviation of the normal initial values; 0: every element is `fill`.
    `matmul`: the tokens for which it is multiplied; None for norms, biases and embeddings that are only looked up.
    `input`: the tensor that the matmul reads. Rows of a layer with one `input` and split over their outputs are one
    matmul, and one all-gather or all-reduce of that tensor over tp.
    `ordered`: the output needs the tokens in the order of the sequence (attention); otherwise each token is computed on
    its own, in any order.
    `parts`: the logical matrices that are stacked along the output dim, as (name, rows); `heads`: how often that stack
    is repeated (the K and V rows of every head in latent attention).
    `every_head`: the number of last outputs that the heads of all tp ranks read (the rotated key of latent attention).
    `counted`: whether published parameter counts include it.
    `width_ratio`, `depth_ratio`: of the model to the base model of muP (`model.mup`), the second in layers only; `std`
    follows the width already.
    `adapter`: "a" or "b" for the two matrices of an adapter, "m" for its magnitude. `frozen`: only adapters are
    trained, and it is none.
    `stored`: "int8" or "nf4" for a frozen matrix that is stored in this type; "": in the type of matmuls.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    split: Split = "replicated"
    std: float = 0.0
    fill: float = 0.0
    matmul: Tokens | None = None
    input: str = ""
    ordered: bool = False
    parts: tuple[tuple[str, int], ...] = ()
    heads: int = 1
    every_head: int = 0
    counted: bool = True
    width_ratio: float = 1.0
    depth_ratio: float = 1.0
    adapter: Literal["", "a", "b", "m"] = ""
    frozen: bool = False
    stored: Literal["", "int8", "nf4"] = ""

    def __post_init__(self) -> None:
        if self.parts:
            rows = self.heads * sum(n for _, n in self.parts)
            assert rows == self.shape[-2], f"{self.name}: parts have {rows} rows, the matrix {self.shape[-2]}"

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def module(self) -> str:
        """The module that has the parameter: `attention.q` for `attention.q.weight`."""
        return self.name.rpartition(".")[0]

    @property
    def matrix(self) -> str:
        """The name of a matrix as targets of adapters have it: `attention.q` for `attention.q.weight`, and
        `ffn.experts.up`."""
        return self.name.removesuffix(".weight")

    @property
    def recipe(self) -> str:
        """The attribute of the module with the recipe of the parameter's matmul (`model.matmul.Recipe`)."""
        return "down_recipe" if self.name.endswith("experts.down") else "recipe"

    @property
    def split_dim(self) -> int | None:
        """The dim that is sharded over tp; None if every rank of tp has the whole parameter."""
        return SPLIT_DIM.get(self.split)

    @property
    def trained(self) -> bool:
        """Return whether it has a gradient."""
        return self.kind != "balance" and not self.frozen

    @property
    def hidden(self) -> bool:
        """Return whether it is a matrix, or a stack of matrices, inside the layers; not a router, embedding or head."""
        return self.kind in ("matrix", "expert")

    @property
    def lr_factor(self) -> float:
        """The learning rate with muP / the learning rate of the base model."""
        return self.width_ratio ** WIDTH_POWERS.get(self.kind, (0.0, 0.0))[1]

    @property
    def decay_factor(self) -> float:
        """The weight decay with muP / the weight decay of the base model: learning rate x decay stays."""
        return 1 / self.lr_factor

    @property
    def eps_factor(self) -> float:
        """The `eps` of Adam with muP / the `eps` of the base model, as sizes of gradients."""
        return 1 / (self.width_ratio * self.depth_ratio)

    @property
    def decays(self) -> bool:
        """Return whether weight decay applies: to matrices and embeddings, not to norms and biases."""
        return self.kind not in ("norm", "bias", "balance")


def stored_bytes(row: Row, element_bytes: int) -> int:
    """Return the bytes of a parameter of `element_bytes` an element, or of its rows if it is quantised."""
    if not row.stored:
        return row.numel * element_bytes
    return math.prod(row.shape[:-1]) * StoredRow(row.stored, row.shape[-1]).n_bytes


def flops_of_matrices(row: Row, flops: Callable[[int, int], float]) -> float:
    """Return the sum of `flops(rows, columns)` over the logical matrices of a parameter."""
    matrices = [n * row.heads for _, n in row.parts] or [row.shape[-2]]
    return sum(flops(rows, row.shape[-1]) for rows in matrices) * math.prod(row.shape[:-2])
