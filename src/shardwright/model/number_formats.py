"""Which matmuls are computed in fp8, and by which recipe; no torch. `model/fp8.py` computes them.

| recipe     | a scale for each                               | gradients | source                                     |
| ---------- | ---------------------------------------------- | --------- | ------------------------------------------ |
| tensorwise | tensor                                         | e5m2      | Micikevicius et al., arXiv 2209.05433      |
| rowwise    | row of an operand, along the summed dim        | e4m3      | torchao, `rowwise`                         |
| blockwise  | 1 x 128 of activations and gradients,          | e4m3      | DeepSeek-V3, arXiv 2412.19437, section 3.3 |
|            | 128 x 128 of weights                           |           |                                            |

Activations and weights are in e4m3 (4 significant bits, up to 448); e5m2 has 3, up to 57344.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd
from typing import Literal, get_args

from shardwright.layout import Layout
from shardwright.model.modules import Row, layer_rows
from shardwright.model.spec import ModelSpec

Fp8Recipe = Literal["tensorwise", "rowwise", "blockwise"]
BLOCK = 128
ALIGNED = 16
"""What matmuls in fp8 ask of the number of features and of summed tokens: rows of 16 bytes."""


@dataclass(frozen=True)
class Fp8:
    """`skip_layers`: so many first and so many last layers are left out, and with any of them the modules of
    multi-token prediction; `weight_gradient`: whether the gradients of weights are computed in fp8, too, but those of
    experts; `block`: of blockwise, the side of a block; `experts`: whether routed experts are in fp8, too."""

    recipe: Fp8Recipe
    skip_layers: int = 0
    weight_gradient: bool = True
    block: int = BLOCK
    experts: bool = False

    def __post_init__(self) -> None:
        assert self.recipe in get_args(Fp8Recipe)
        assert not (self.weight_gradient and self.recipe == "blockwise")

    def rows(self, spec: ModelSpec, layer: int) -> list[Row]:
        """The hidden matrices of a layer, by their rows, whose matmuls are in fp8; of routed experts by choice."""
        if self.skip_layers and not self.skip_layers <= layer < spec.n_layers - self.skip_layers:
            return []
        routed = ("expert",) if self.experts else ()
        return [
            row
            for row in layer_rows(spec, layer)
            if (row.kind == "matrix" and row.matmul == "all") or row.kind in routed
        ]

    def linears(self, spec: ModelSpec) -> Iterator[tuple[int, Row]]:
        """(layer, row) of every such matrix."""
        for layer in range(spec.n_blocks):
            for row in self.rows(spec, layer):
                yield layer, row


def sides(row: Row, tp: int) -> tuple[int, int]:
    """Output and input features of a rank's shard of a matrix, or of a whole expert."""
    out, into = row.shape[-2:]
    return (out // tp, into) if row.split_dim == 0 else (out, into // tp) if row.split_dim == 1 else (out, into)


def block_of(spec: ModelSpec, fp8: Fp8, tp: int) -> int:
    """The largest block, up to `fp8.block`, that divides every shard."""
    return gcd(*(side for _, row in fp8.linears(spec) for side in sides(row, tp)), fp8.block)


def problems(spec: ModelSpec, layout: Layout, fp8: Fp8, tokens: int) -> Iterator[str]:
    """Why a layout of a model cannot compute in fp8, a sentence each; `tokens` of a micro-batch on a rank."""
    name, tp = f"precision.fp8={fp8.recipe!r}", layout.tp
    multiple = fp8.block if fp8.recipe == "blockwise" else ALIGNED
    if 2 * fp8.skip_layers >= spec.n_layers:
        yield (
            f"precision.fp8_skip_layers={fp8.skip_layers} leaves none of the {spec.n_layers} layers in fp8; valid: 0 "
            f"to {(spec.n_layers - 1) // 2}, or precision.fp8='none'"
        )
    if fp8.experts and spec.moe is None:
        yield "precision.fp8_experts=true: this model has no experts; leave it out"
    wrong: dict[tuple[str, str, int], None] = {}
    for _, row in fp8.linears(spec):
        for what, side in zip(("output", "input"), sides(row, tp), strict=True):
            if side % multiple:
                wrong.setdefault((row.name, what, side), None)
    if wrong:
        of_rank = f" of a rank (tp={tp})" if tp > 1 else ""
        shown = "; ".join(f"{name}: {side} {what} features" for name, what, side in list(wrong)[:3])
        yield (
            f"{name} needs features{of_rank} in multiples of {multiple}, and {len(wrong)} sizes are not ({shown}); "
            f"change the sizes of [model]{', lower layout.tp' if tp > 1 else ''}"
            f"{', set precision.fp8_experts=false' if fp8.experts else ''}, or set precision.fp8='none'"
        )
    if fp8.weight_gradient and tokens % ALIGNED:
        yield (
            f"{name} sums the gradient of a weight over {tokens} tokens of a micro-batch on a rank, which is no "
            f"multiple of {ALIGNED}; change batch.micro_batch or batch.seq_len, or set "
            f"precision.fp8_weight_gradient=false"
        )
    yield from replica_problems(spec, layout, fp8)


def replica_problems(spec: ModelSpec, layout: Layout, fp8: Fp8 | None) -> Iterator[str]:
    """Why a layout cannot compute in fp8 by the rules that hold at test size, too."""
    tp = layout.tp
    if fp8 is not None and tp > spec.n_kv_heads and spec.latent_attention is None:
        yield (
            f"precision.fp8={fp8.recipe!r} with layout.tp={tp} above {spec.n_kv_heads} kv heads: a rank's replica of a "
            f"kv head has a part of its gradient, and rounding parts is not rounding their sum; valid: tp up to "
            f"{spec.n_kv_heads}"
        )
    if fp8 is not None and layout.compress_weights != "none":
        yield (
            f"precision.fp8={fp8.recipe!r} with layout.compress_weights={layout.compress_weights!r}: weights would be "
            f"rounded to integers and those to fp8; set one of them to 'none'"
        )
