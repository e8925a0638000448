"""Low-rank adapters (LoRA): their table in the run file, the matrices that have one, their scale, and the bytes of a
quantised base; no torch.

With an adapter a linear computes y = x W^T + s (x A^T) B^T. W (out, in) is frozen; A (r, in) and B (out, r) are
trained. B is zero at first, so a run starts with the outputs of the base weights. Each routed expert has an A and a B
of its own for each of its matrices, stacked as the matrices are: (E, r, in) and (E, out, r).

With DoRA an adapter also has a magnitude m = |W| + d (out,), and y = (x W^T + s (x A^T) B^T) m / |W + s B A|, with the
norm of each row, which is a constant in the backward pass. The parameter is d, which is zero at first. peft's is m.

Sources: Hu et al., LoRA, arXiv 2106.09685, section 4.1; Kalajdzievski, rsLoRA, arXiv 2312.03732, for s = alpha /
sqrt(r); Liu et al., DoRA, arXiv 2402.09353, sections 4.1 and 4.3.
"""

import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

BaseType = Literal["compute", "int8", "nf4"]
"""The types of the frozen matrices of layers; `model/quantised.py` converts them."""
BLOCK = 64
"""Elements of nf4 with one scale (Dettmers et al., QLoRA, arXiv 2305.14314, section 3)."""

GROUPS = {
    "attention": "all matrices of attention",
    "ffn": "all matrices of feed-forward networks and of shared experts",
    "experts": "all matrices of routed experts, with one A and one B for each expert",
}
"""The targets that name several matrices of a layer."""


@dataclass(frozen=True, kw_only=True)
class LoraSpec:
    """The adapters of a model whose other parameters are frozen."""

    rank: int = field(
        metadata={"help": "Rank r of the adapter of each target, A (r, in) and B (out, r); 0: all weights are trained."}
    )
    alpha: float = field(
        default=16.0, metadata={"help": "The output of an adapter is multiplied by alpha / rank (LoRA, section 4.1)."}
    )
    targets: tuple[str, ...] = field(
        default=("attention", "ffn"),
        metadata={
            "help": "The matrices with an adapter: attention, ffn or experts (routed experts) for all matrices of "
            "these modules, or last parts of a matrix's name, such as q, ffn.down, shared.up or experts.up."
        },
    )
    rslora: bool = field(
        default=False,
        metadata={"help": "Multiply by alpha / sqrt(rank) instead, with which outputs do not fall with the rank."},
    )
    dropout: float = field(
        default=0.0,
        metadata={
            "help": "Probability with which an element of an adapter's input is dropped in training; each matrix has "
            "its own mask. The base reads the whole input."
        },
    )
    dora: bool = field(
        default=False,
        metadata={
            "help": "Train also a magnitude for each output of a target, by which the row of W + s B A is multiplied "
            "after it is divided by its norm (DoRA)."
        },
    )
    base: BaseType = field(
        default="compute",
        metadata={
            "help": "Type in which the frozen matrices of layers are stored: compute for the type of matmuls, or int8 "
            "or nf4 (QLoRA), which are converted to it for each matmul."
        },
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "targets", tuple(self.targets))  # files have lists

    @property
    def scale(self) -> float:
        """The factor s of an adapter's output."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def takes(self, matrix: str) -> bool:
        """Return whether a matrix (`Row.matrix`), such as `attention.q` within a layer, has an adapter."""
        return any(names(target, matrix) for target in self.targets)


def names(target: str, matrix: str) -> bool:
    """Return whether a target names a matrix."""
    parts, last = matrix.split("."), target.split(".")
    if target not in GROUPS:
        return parts[-len(last) :] == last
    return target in parts[:-1] and (target == "experts" or "experts" not in parts)


class AdapterNames(NamedTuple):
    """The names of the parameters of a matrix's adapter."""

    a: str
    b: str
    magnitude: str


def adapter_names(parameter: str) -> AdapterNames:
    """Return the names of A, B and the magnitude of a matrix's parameter: `attention.q.lora_a` for
    `attention.q.weight`, and `ffn.experts.up_lora_a` for `ffn.experts.up`, which is no module."""
    begin = parameter.removesuffix("weight") if parameter.endswith(".weight") else f"{parameter}_"
    return AdapterNames(f"{begin}lora_a", f"{begin}lora_b", f"{begin}lora_magnitude")


@dataclass(frozen=True)
class StoredRow:
    """The bytes of a row of a quantised matrix, or of one of its equal shards over tp.

    int8: a byte for each element, and the row's scale in fp32.
    nf4: 4 bits for each element of every block that the shard touches, a byte for the scale of each block, and for all
    scales of the row a factor and an offset in fp32.

    All numbers follow from the whole row, so that they are the same for every layout. `n_columns`: elements of the
    whole row; `shards`: shards over tp; `shard`: the number of this one.
    """

    kind: Literal["int8", "nf4"]
    n_columns: int
    shards: int = 1
    shard: int = 0

    @property
    def columns(self) -> range:
        """The columns of the shard."""
        n = self.n_columns // self.shards
        return range(self.shard * n, (self.shard + 1) * n)

    @property
    def blocks(self) -> range:
        """The blocks of nf4 that the shard touches."""
        return range(self.columns.start // BLOCK, -(-self.columns.stop // BLOCK))

    @property
    def n_blocks(self) -> int:
        """The blocks for which every shard has room: as many as any shard touches."""
        return max(len(StoredRow(self.kind, self.n_columns, self.shards, shard).blocks) for shard in range(self.shards))

    @property
    def n_bytes(self) -> int:
        """The bytes of the shard."""
        return len(self.columns) + 4 if self.kind == "int8" else self.n_blocks * (BLOCK // 2 + 1) + 8
