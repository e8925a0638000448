"""The parameters of a model, one row (`model.row.Row`) for each: the only place that defines their names, shapes and
roles.

Parameter counts, initial values, the split over tensor-parallel ranks, matmuls and FLOPs, the memory and time of the
cost model, and the optimizer's parameter groups are all read from these rows. A family of models is a function that
yields the rows of a layer, and the module that runs the layer; `register` adds one, built-in or a user's.

No torch.
"""

import math
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from shardwright.model.lora_sizes import adapter_names
from shardwright.model.mup import WIDTH_POWERS
from shardwright.model.row import Row, Split
from shardwright.model.sizes import ModelSizes
from shardwright.system import extensions
from shardwright.system.errors import ConfigError


def linear(
    name: str,
    n_out: int,
    n_in: int,
    split: Split,
    input: str,
    *,
    std: float,
    bias: bool = False,
    parts: tuple[tuple[str, int], ...] = (),
    heads: int = 1,
    ordered: bool = False,
    every_head: int = 0,
) -> Iterator[Row]:
    """Yield the rows of a linear: its weight (n_out, n_in) and, with `bias`, its bias (n_out,), which is sharded like
    the output: with a column-parallel weight, but not with a row-parallel one."""
    yield Row(
        name=f"{name}.weight",
        shape=(n_out, n_in),
        kind="matrix",
        split=split,
        std=std,
        matmul="all",
        input=input,
        ordered=ordered,
        parts=parts or ((name.rpartition(".")[2], n_out // heads),),
        heads=heads,
        every_head=every_head,
    )
    if bias:
        yield Row(name=f"{name}.bias", shape=(n_out,), kind="bias", split="replicated" if split == "row" else split)


def with_adapters(spec: ModelSizes, in_order: Iterable[Row]) -> Iterator[Row]:
    """Yield rows as the model has them: with `spec.lora` they are frozen, hidden matrices in the type of its base, and
    after each target come the rows of its adapter, `lora_a` (r, in) and `lora_b` (out, r), of experts (E, r, in) and
    (E, out, r), and with DoRA `lora_magnitude` (out,). A has the variance of PEFT's initial values, 1 / (3 in). The
    load of the experts, a statistic of the last step, is not frozen."""
    lora = spec.lora
    for row in in_order:
        if lora is None:
            yield row
            continue
        yield replace(row, frozen=row.counted, stored=lora.base if can_adapt(row) and lora.base != "compute" else "")
        if not can_adapt(row) or not lora.takes(row.matrix):
            continue
        (*experts, n_out, n_in), r = row.shape, lora.rank
        split_a, split_b = _ADAPTER_SPLITS[row.split]
        name_a, name_b, name_m = adapter_names(row.name)
        yield replace(
            row, name=name_a, shape=(*experts, r, n_in), split=split_a, std=(3 * n_in) ** -0.5, adapter="a",
            parts=(("lora_a", r),), heads=1, every_head=0,
        )  # fmt: skip
        yield replace(
            row, name=name_b, shape=(*experts, n_out, r), split=split_b, std=0.0, adapter="b", input=name_a,
            every_head=0,
        )  # fmt: skip
        if lora.dora:
            split_m: Split = "replicated" if row.split == "row" else row.split
            yield Row(name=name_m, shape=row.shape[:-1], kind="bias", split=split_m, adapter="m")


_ADAPTER_SPLITS: dict[Split, tuple[Split, Split]] = {
    "column": ("per_head", "column"),
    "kv_column": ("per_head", "kv_column"),
    "row": ("row", "per_head"),
    "replicated": ("replicated", "replicated"),
    "experts": ("experts", "experts"),
}
"""How A and B are split over tp, by the split of the matrix."""


def can_adapt(row: Row) -> bool:
    """Return whether a parameter can have an adapter: a hidden matrix, of all tokens or of experts."""
    return row.hidden and row.matmul is not None


def norm(
    name: str, width: int, kind: str = "rmsnorm", split: Split = "replicated", *, offset: bool = False
) -> Iterator[Row]:
    """Yield the rows of a norm over `width` features: a weight of ones, or of zeros with `offset`, and for a
    "layernorm" a bias of zeros."""
    yield Row(name=f"{name}.weight", shape=(width,), kind="norm", split=split, fill=0.0 if offset else 1.0)
    if kind == "layernorm":
        yield Row(name=f"{name}.bias", shape=(width,), kind="bias", split=split)


def residual_norm(spec: ModelSizes, name: str) -> Iterator[Row]:
    """Yield the rows of a norm of the residual stream or of a branch's output (`model.norm.residual_norm`)."""
    kind = spec.norm if spec.norm_bias else "no bias"
    yield from norm(name, spec.d_model, kind, offset=spec.norm_offset)


def branch_input(spec: ModelSizes, branch: str) -> str:
    """Return the name of the tensor that a branch reads: a norm, or the residual stream itself."""
    if spec.parallel_branches:
        return "attention_norm"
    return f"{branch}_norm" if spec.norm_before else f"{branch}_residual"


def attention(spec: ModelSizes, input: str | None = None) -> Iterator[Row]:
    """Yield the rows of grouped-query attention (`model.attention.Attention`), which reads `input`."""
    input = input or branch_input(spec, "attention")
    h, c, bias, std = spec.d_model, spec.head_dim, spec.bias, spec.init_std
    columns: tuple[tuple[str, Split, int], ...] = (
        ("q", "column", spec.n_heads),
        ("k", "kv_column", spec.n_kv_heads),
        ("v", "kv_column", spec.n_kv_heads),
    )
    for name, split, heads in columns:
        parts = (("q", c), ("gate", c)) if name == "q" and spec.attention_gate else ((name, c),)
        yield from linear(
            f"attention.{name}", heads * len(parts) * c, h, split, input,
            std=std, bias=bias or spec.qkv_bias, parts=parts, heads=heads, ordered=True,
        )  # fmt: skip
    if spec.qk_norm and spec.qk_norm_weight:
        for name, split, heads in columns[:2]:
            of_all_heads = spec.qk_norm_whole or spec.qk_norm_heads
            width, of_norm = (heads * c, split) if of_all_heads else (c, "per_head")
            offset = spec.norm_offset and not spec.qk_norm_heads
            yield from norm(f"attention.{name}_norm", width, split=of_norm, offset=offset)
    if spec.attention_sinks:
        yield Row(name="attention.sinks", shape=(spec.n_heads,), kind="bias", split="column")
    yield from linear(
        "attention.o", h, spec.n_heads * c, "row", "attention",
        std=residual_std(spec), bias=bias or spec.o_bias, ordered=True,
    )  # fmt: skip


def latent_attention(spec: ModelSizes, input: str | None = None) -> Iterator[Row]:
    """Yield the rows of latent attention (`model.latent_attention.LatentAttention`), which reads `input`."""
    input = input or branch_input(spec, "attention")
    latent = spec.latent_attention
    assert latent is not None
    h, heads, std = spec.d_model, spec.n_heads, spec.init_std
    if latent.q_rank:
        yield from linear("attention.q_down", latent.q_rank, h, "replicated", input, std=std)
        yield from norm("attention.q_latent_norm", latent.q_rank)
    yield from linear(
        "attention.q_up", heads * spec.qk_dim, latent.q_rank or h, "column", "attention.q_latent_norm"
        if latent.q_rank else input,
        std=std, parts=(("q_nope", latent.nope_dim), ("q_rope", latent.rope_dim)), heads=heads, ordered=True,
    )  # fmt: skip
    yield from linear(
        "attention.kv_down", latent.kv_rank + latent.rope_dim, h, "replicated", input,
        std=std, parts=(("kv_latent", latent.kv_rank), ("k_rope", latent.rope_dim)), every_head=latent.rope_dim,
    )  # fmt: skip
    yield from norm("attention.kv_latent_norm", latent.kv_rank)
    yield from linear(
        "attention.kv_up", heads * (latent.nope_dim + latent.v_dim), latent.kv_rank, "column",
        "attention.kv_latent_norm",
        std=std, parts=(("k_nope", latent.nope_dim), ("v", latent.v_dim)), heads=heads, ordered=True,
    )  # fmt: skip
    yield from linear("attention.o", h, heads * latent.v_dim, "row", "attention", std=residual_std(spec), ordered=True)


def linear_attention(spec: ModelSizes) -> Iterator[Row]:
    """Yield the rows of linear attention (`model.linear_attention.GatedDeltaNet`). The four projections, and the two
    of decay and beta, are stacked for each query and key head, with the value heads that it serves.

    At first a state decays by softplus(-4) = 2 % a token, and by e^n times that with n normal.
    """
    sizes, input, std = spec.linear_attention, branch_input(spec, "attention"), spec.init_std
    assert sizes is not None
    groups, group, h = sizes.n_k_heads, sizes.n_v_heads // sizes.n_k_heads, spec.d_model
    keys, values = groups * sizes.k_dim, sizes.n_v_heads * sizes.v_dim
    parts = ("q", sizes.k_dim), ("k", sizes.k_dim), ("v", group * sizes.v_dim), ("z", group * sizes.v_dim)
    yield from linear(
        "attention.qkvz", 2 * (keys + values), h, "column", input, std=std, parts=parts, heads=groups, ordered=True
    )
    yield from linear(
        "attention.ba", 2 * sizes.n_v_heads, h, "column", input,
        std=std, parts=(("b", group), ("a", group)), heads=groups, ordered=True,
    )  # fmt: skip
    for name, width in (("q", keys), ("k", keys), ("v", values)):
        yield Row(
            name=f"attention.{name}_conv.weight", shape=(width, 1, sizes.conv_width), kind="bias", split="column",
            std=(3 * sizes.conv_width) ** -0.5,
        )  # fmt: skip
    yield Row(name="attention.a_log", shape=(sizes.n_v_heads,), kind="bias", split="column", std=1.0)
    yield Row(name="attention.dt_bias", shape=(sizes.n_v_heads,), kind="bias", split="column", fill=-4.0)
    yield from norm("attention.norm", sizes.v_dim, split="per_head")
    yield from linear("attention.out", h, values, "row", "attention", std=residual_std(spec), ordered=True)


def feed_forward(
    spec: ModelSizes, name: str, width: int, input: str | None = None, ordered: bool = False
) -> Iterator[Row]:
    """Yield the rows of a feed-forward network of inner width `width` (`model.feed_forward.FeedForward`), which reads
    `input`. `ordered`: attention reads `input` too."""
    input, ordered = input or branch_input(spec, "ffn"), ordered or spec.parallel_branches
    for inner in ("gate", "up") if spec.gated else ("up",):
        yield from linear(
            f"{name}.{inner}", width, spec.d_model, "column", input,
            std=spec.init_std, bias=spec.bias, ordered=ordered,
        )  # fmt: skip
    yield from linear(
        f"{name}.down", spec.d_model, width, "row", f"{name}.inner",
        std=residual_std(spec), bias=spec.bias, ordered=ordered,
    )  # fmt: skip


def mixture(spec: ModelSizes) -> Iterator[Row]:
    """Yield the rows of a mixture of experts (`model.moe.MoE`): router, experts and shared experts."""
    moe = spec.moe
    assert moe is not None
    h, g, n, std = spec.d_model, moe.d_ffn, moe.n_experts, spec.init_std
    yield _router(spec, "ffn.router", n)
    if moe.bias:
        yield Row(name="ffn.router.logit_bias", shape=(n,), kind="bias")
    if moe.bias_rate:
        yield Row(name="ffn.router.bias", shape=(n,), kind="balance")
    if moe.keeps_load:
        yield Row(name="ffn.router.load", shape=(n,), kind="balance", fill=1.0, counted=False)
    for inner in ("gate", "up") if spec.gated else ("up",):
        yield from _expert(inner, (n, g, h), "routed", std, moe.bias)
    yield from _expert("down", (n, h, g), "experts.inner", residual_std(spec), moe.bias)
    if moe.shared_width:
        yield from feed_forward(spec, "ffn.shared", moe.shared_width)
    if moe.shared_gate:
        yield _router(spec, "ffn.shared_gate", 1)


def _router(spec: ModelSizes, name: str, n_out: int) -> Row:
    """Return the row of a router, or of the gate of shared experts, which every rank of tp has."""
    return Row(
        name=f"{name}.weight", shape=(n_out, spec.d_model), kind="router", std=spec.init_std, matmul="all",
        input=branch_input(spec, "ffn"), parts=((name.rpartition(".")[2], n_out),),
    )  # fmt: skip


def _expert(name: str, shape: tuple[int, int, int], input: str, std: float, bias: bool) -> Iterator[Row]:
    yield Row(
        name=f"ffn.experts.{name}", shape=shape, kind="expert", split="experts", std=std, matmul="routed", input=input,
        parts=((name, shape[1]),),
    )  # fmt: skip
    if bias:
        yield Row(name=f"ffn.experts.{name}_bias", shape=shape[:2], kind="bias", split="experts")


def residual_std(spec: ModelSizes) -> float:
    """Return the initial standard deviation of projections that add to the residual stream: init_std / sqrt(2 L), L
    layers. The variance of the sum of all 2 L does not grow with L (GPT-2, Radford et al. 2019, section 2.3). With a
    `base_depth` of muP, whose branches are divided by the depth, L is that."""
    return spec.init_std / math.sqrt(2 * spec.n_layers / spec.depth_ratio)


def decoder_layer(spec: ModelSizes, layer: int) -> Iterator[Row]:
    """Yield the rows of a decoder layer: x + attention(norm x), then x + ffn(norm x), or with other norms or parallel
    branches (`model.transformer.Block`)."""
    if spec.norm_before:
        yield from residual_norm(spec, "attention_norm")
    if spec.is_linear(layer):
        yield from linear_attention(spec)
    else:
        yield from attention(spec) if spec.latent_attention is None else latent_attention(spec)
    if spec.norm_after:
        yield from residual_norm(spec, "attention_post_norm")
    if spec.norm_before and not spec.parallel_branches:
        yield from residual_norm(spec, "ffn_norm")
    yield from mixture(spec) if spec.has_experts(layer) else feed_forward(spec, "ffn", spec.d_ffn)
    if spec.norm_after:
        yield from residual_norm(spec, "ffn_post_norm")


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of models: the parameters of a layer, and the module that runs it.

    `layer`: (`ModelSpec`, number of the layer) -> its rows, in the order in which the forward pass uses them.
    `block`: (spec, number of the layer) -> nn.Module with parameters of exactly those names and shapes, whose forward
    takes (x_BTD, positions_T, rotary_2TC or None, site_keys_2B or None) and returns x_BTD; or where to import it from,
    as "module:name". With cp, an attribute `attend` of its modules is replaced by context-parallel attention.
    `documents`: whether that forward takes `model.documents.Documents` or None as fifth argument, and passes them to
    attention, and `model.balance.RealTokens` as sixth, and passes them to mixtures of experts (`MoE.forward`).
    `problems`: spec -> the rules of the family that it breaks, one sentence each.
    """

    name: str
    help: str
    layer: Callable[[Any, int], Iterable[Row]]
    block: Callable[..., Any] | str
    problems: Callable[[Any], Iterable[str]] = lambda _: ()
    documents: bool = False

    def make(self, spec: ModelSizes, layer: int) -> Any:
        """Return the module that runs layer number `layer`."""
        block = pkgutil.resolve_name(self.block) if isinstance(self.block, str) else self.block
        return block(spec, layer)


FAMILIES: dict[str, Family] = {}


def register(family: Family) -> Family:
    """Add a family; its name is then valid for `[model] family`. Raises ConfigError if the name is taken."""
    return extensions.add(FAMILIES, "a model family", family)


register(
    Family(
        name="decoder",
        help="attention, then a feed-forward network or a mixture of experts, each behind a norm",
        layer=decoder_layer,
        block="shardwright.model.transformer:Block",
        documents=True,
    )
)


MTP_BLOCK = "block."
"""Prefix of the names of a layer's rows if the layer is the block of a multi-token prediction module."""


def mtp_module(spec: ModelSizes, layer: int) -> Iterator[Row]:
    """Yield the rows of a multi-token prediction module (`model.transformer.MTPModule`), whose block is layer number
    `layer` of the family. It uses the model's embedding and head."""
    yield from residual_norm(spec, "embedding_norm")
    yield from residual_norm(spec, "hidden_norm")
    yield from linear("projection", spec.d_model, 2 * spec.d_model, "replicated", "projection", std=spec.init_std)
    for row in FAMILIES[spec.family].layer(spec, layer):
        yield replace(row, name=MTP_BLOCK + row.name)
    yield from residual_norm(spec, "norm")


def _with_mup(spec: ModelSizes, of_base: Iterable[Row], in_layer: bool = True) -> Iterator[Row]:
    """Yield rows whose initial values and factors follow the width and the depth, from rows of the base model's."""
    width, depth = spec.width_ratio, spec.depth_ratio if in_layer else 1.0
    for row in of_base:
        std = row.std * width ** WIDTH_POWERS.get(row.kind, (0.0, 0.0))[0]
        yield replace(row, std=std, width_ratio=width, depth_ratio=depth) if spec.mup else row


def _base_rows(spec: ModelSizes, layer: int) -> Iterator[Row]:
    """Return the parameters of a layer without adapters."""
    in_layer = (mtp_module if layer >= spec.n_layers else FAMILIES[spec.family].layer)(spec, layer)
    return _with_mup(spec, in_layer)


@cache
def layer_rows(spec: ModelSizes, layer: int) -> tuple[Row, ...]:
    """Return the parameters of layer number `layer`, with names within the layer; from number `spec.n_layers` on, of a
    multi-token prediction module. Raises ConfigError if column-parallel rows read the same tensor and differ in
    `ordered`."""
    of_base = tuple(_base_rows(spec, layer))
    ordered: dict[str, Row] = {}
    for row in (row for row in of_base if row.split in ("column", "kv_column") and row.input):
        first = ordered.setdefault(row.input, row)
        if row.ordered != first.ordered:
            raise ConfigError(
                f"model family {spec.family!r}: {first.name} and {row.name} read {row.input!r} and are computed "
                f"together, but ordered={first.ordered} and {row.ordered}; valid: the same for both"
            )
    return tuple(with_adapters(spec, of_base))


@cache
def end_rows(spec: ModelSizes) -> tuple[Row, ...]:
    """Return the parameters before the first layer and after the last. A tied embedding is one row, with a matmul."""
    h, vocabulary, std = spec.d_model, spec.vocab_size, spec.init_std
    embedding = Row(
        name="embedding.weight", shape=(vocabulary, h), kind="embedding", split="vocabulary", std=std,
        parts=(("embedding", vocabulary),),
    )  # fmt: skip
    head = replace(
        embedding, name="head.weight", kind="head", matmul="all", input="norm", parts=(("head", vocabulary),)
    )
    learned = Row(name="position_embedding.weight", shape=(spec.max_seq_len, h), kind="embedding", std=std)
    in_order = (
        replace(embedding, matmul="all", input="norm") if spec.tied_embedding else embedding,
        *([learned] if spec.positions == "learned" else []),
        *residual_norm(spec, "norm"),
        *([] if spec.tied_embedding else [head]),
    )
    return tuple(with_adapters(spec, _with_mup(spec, in_order, in_layer=False)))


@cache
def rows(spec: ModelSizes) -> dict[str, Row]:
    """Return every parameter of the model by its global name: `layers.3.attention.q.weight`, `norm.weight`."""
    in_layers = {f"layers.{layer}.{row.name}": row for layer in range(spec.n_blocks) for row in layer_rows(spec, layer)}
    return in_layers | {row.name: row for row in end_rows(spec)}


def row_of(spec: ModelSizes, name: str) -> Row:
    """Return the row of a parameter by its global name."""
    row = rows(spec).get(name)
    assert row is not None, f"no row of the {spec.family} family is named {name}"
    return row


def parameter_of(tensor: str) -> str:
    """Return the global name of the parameter that a tensor of a run belongs to: `layers.0.attention.q.weight` for
    `optimizer/exp_avg/layers.0.attention.q.weight`."""
    return tensor.rpartition("/")[2]


def layer_of(name: str) -> int:
    """Return the number of the layer of a parameter by its global name, which starts with `layers.`."""
    return int(name.split(".")[1])


def within_layer(name: str) -> str:
    """Return the name of a parameter or module within its layer: `attention.q.weight` for
    `layers.0.attention.q.weight`."""
    return name.split(".", 2)[2]
