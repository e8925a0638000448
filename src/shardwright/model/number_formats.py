"""The choice of matmuls computed in fp8, and their recipes; no torch. `model/fp8.py` computes them.

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

from shardwright.layout.layout import Layout
from shardwright.model.modules import layer_rows
from shardwright.model.row import Row
from shardwright.model.spec import ModelSpec

Fp8Recipe = Literal["tensorwise", "rowwise", "blockwise"]
BLOCK = 128
ALIGNED = 16
"""Features, and tokens that are summed, have to be multiples of this: rows of 16 bytes."""


@dataclass(frozen=True)
class Fp8:
    """The fp8 settings of the layers.

    `skip_layers`: number of first and of last layers left out; if positive, multi-token prediction modules are too.
    `weight_gradient`: whether the gradients of weights, except of experts, are computed in fp8 too. `block`: the side
    of a block, for blockwise. `experts`: whether routed experts are in fp8 too."""

    recipe: Fp8Recipe
    skip_layers: int = 0
    weight_gradient: bool = True
    block: int = BLOCK
    experts: bool = False

    def __post_init__(self) -> None:
        assert self.recipe in get_args(Fp8Recipe)
        assert not (self.weight_gradient and self.recipe == "blockwise")

    def rows(self, spec: ModelSpec, layer: int) -> list[Row]:
        """Return the rows of a layer's hidden matrices whose matmuls are in fp8, without adapters; routed experts only
        with `experts`."""
        if self.skip_layers and not self.skip_layers <= layer < spec.n_layers - self.skip_layers:
            return []
        routed = ("expert",) if self.experts else ()
        return [
            row
            for row in layer_rows(spec, layer)
            if not row.adapter and ((row.kind == "matrix" and row.matmul == "all") or row.kind in routed)
        ]

    def linears(self, spec: ModelSpec) -> Iterator[tuple[int, Row]]:
        """Yield (layer, row) for every matrix in fp8."""
        for layer in range(spec.n_blocks):
            for row in self.rows(spec, layer):
                yield layer, row


def sides(row: Row, tp: int) -> tuple[int, int]:
    """Return the output and input features of a rank's shard of a matrix, or of a whole expert."""
    out, into = row.shape[-2:]
    return (out // tp, into) if row.split_dim == 0 else (out, into // tp) if row.split_dim == 1 else (out, into)


def block_of(spec: ModelSpec, fp8: Fp8, tp: int) -> int:
    """Return the largest block, up to `fp8.block`, that divides every shard."""
    return gcd(*(side for _, row in fp8.linears(spec) for side in sides(row, tp)), fp8.block)


def problems(spec: ModelSpec, layout: Layout, fp8: Fp8, tokens: int) -> Iterator[str]:
    """Yield why a layout of a model cannot compute in fp8, one sentence each; `tokens`: of a rank's micro-batch."""
    name, tp = f"precision.fp8={fp8.recipe!r}", layout.tp
    multiple = fp8.block if fp8.recipe == "blockwise" else ALIGNED
    if 2 * fp8.skip_layers >= spec.n_layers:
        yield (
            f"precision.fp8_skip_layers={fp8.skip_layers} leaves none of the {spec.n_layers} layers in fp8; valid: 0 "
            f"to {(spec.n_layers - 1) // 2}, or precision.fp8='none'"
        )
    if fp8.experts and spec.moe is None:
        yield "precision.fp8_experts=true: this model has no experts; leave it out"
    unaligned: dict[tuple[str, str, int], None] = {}
    for _, row in fp8.linears(spec):
        for what, side in zip(("output", "input"), sides(row, tp), strict=True):
            if side % multiple:
                unaligned.setdefault((row.name, what, side), None)
    if unaligned:
        of_rank = f" of a rank (tp={tp})" if tp > 1 else ""
        shown = "; ".join(f"{name}: {side} {what} features" for name, what, side in list(unaligned)[:3])
        yield (
            f"{name} needs features{of_rank} in multiples of {multiple}, and {len(unaligned)} sizes are not ({shown}); "
            f"change the sizes of [model]{', lower layout.tp' if tp > 1 else ''}"
            f"{', set precision.fp8_experts=false' if fp8.experts else ''}, or set precision.fp8='none'"
        )
    if fp8.weight_gradient and tokens % ALIGNED:
        yield (
            f"{name} sums the gradient of a weight over {tokens} tokens of a micro-batch on a rank, which is not a "
            f"multiple of {ALIGNED}; change batch.micro_batch or batch.seq_len, or set "
            f"precision.fp8_weight_gradient=false"
        )
    yield from replica_problems(spec, layout, fp8)


def replica_problems(spec: ModelSpec, layout: Layout, fp8: Fp8 | None) -> Iterator[str]:
    """Yield why a layout cannot compute in fp8, by the rules that also apply at test size."""
    tp = layout.tp
    if fp8 is not None and tp > spec.n_kv_heads and spec.latent_attention is None:
        yield (
            f"precision.fp8={fp8.recipe!r} with layout.tp={tp} above {spec.n_kv_heads} kv heads: a rank's replica of a "
            f"kv head has a part of its gradient, and rounding parts is not rounding their sum; valid: tp up to "
            f"{spec.n_kv_heads}"
        )
    if fp8 is not None and spec.lora is not None and spec.lora.base != "compute":
        yield (
            f"precision.fp8={fp8.recipe!r} with lora.base={spec.lora.base!r}: frozen matrices would be rounded to "
            f"{spec.lora.base} and then to fp8; set precision.fp8='none', or lora.base='compute'"
        )
    if fp8 is not None and layout.compress_weights != "none":
        yield (
            f"precision.fp8={fp8.recipe!r} with layout.compress_weights={layout.compress_weights!r}: weights would be "
            f"rounded to integers and those to fp8; set one of them to 'none'"
        )
