"""Qwen3-Next: gated delta nets in a pattern with gated full attention, and experts with a gated shared expert."""

from collections.abc import Iterator
from typing import Any

from shardwright.hugging_face import llama, qwen, qwen_moe
from shardwright.hugging_face.architecture import Architecture, Config, Table, register
from shardwright.layout.key import MOST_LAYERS
from shardwright.model.spec import ModelSpec

LINEAR, FULL = "linear_attention", "full_attention"
SIZES = {
    "linear_attention.n_k_heads": "linear_num_key_heads",
    "linear_attention.n_v_heads": "linear_num_value_heads",
    "linear_attention.k_dim": "linear_key_head_dim",
    "linear_attention.v_dim": "linear_value_head_dim",
    "linear_attention.conv_width": "linear_conv_kernel_dim",
    "linear_attention.full_interval": "_full_interval",
}
NET: Table = {
    "attention.qkvz": "linear_attn.in_proj_qkvz",
    "attention.ba": "linear_attn.in_proj_ba",
    ("attention.q_conv", "attention.k_conv", "attention.v_conv"): "linear_attn.conv1d",
    "attention.a_log": "linear_attn.A_log",
    "attention.dt_bias": "linear_attn.dt_bias",
    "attention.norm": "linear_attn.norm",
    "attention.out": "linear_attn.out_proj",
}
_DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "norm_topk_prob": True,
}
"""Qwen3NextConfig's defaults for missing keys, except the defaults of all architectures."""


def complete(config: Config) -> Config:
    """Return config.json with Qwen3NextConfig's defaults, and the interval of layers with full attention as
    `_full_interval`; 0: no layer has it."""
    interval, kinds = config.get("full_attention_interval", 4), config.get("layer_types")
    if kinds:
        interval = _interval(kinds) or 0
    elif interval > config.get("num_hidden_layers", 0):
        interval = 0
    return llama.complete(_DEFAULTS | config) | {"_full_interval": interval}


def _kinds(interval: int, n_layers: int) -> list[str]:
    return [FULL if interval and (layer + 1) % interval == 0 else LINEAR for layer in range(n_layers)]


def _interval(kinds: list[Any]) -> int | None:
    """Return the interval of the layers with full attention; None if there is no such pattern."""
    n = min(len(kinds), MOST_LAYERS)
    interval = kinds.index(FULL) + 1 if FULL in kinds else 0
    return interval if kinds == _kinds(interval, n) else None


def problems(config: Config) -> Iterator[str]:
    """Yield the faults of `layer_types`, and a shared expert without features."""
    kinds, layers = config.get("layer_types"), config.get("num_hidden_layers")
    if kinds is not None and len(kinds) != layers:
        yield f"layer_types has {len(kinds)} entries for num_hidden_layers={layers}; valid: one for each layer"
    elif kinds is not None and (unknown := sorted({str(kind) for kind in kinds} - {LINEAR, FULL})):
        yield f"layer_types has {', '.join(unknown)}; valid: {FULL}, {LINEAR}"
    elif kinds is not None and _interval(kinds) is None:
        yield f"layer_types has no supported pattern; valid: {FULL} in every n-th layer, {LINEAR} in all others"
    yield from qwen_moe.shared_problems(config)


def written(spec: ModelSpec) -> Config:
    """Return the kinds of all layers, the dense layers and the width of the shared expert."""
    kinds = [LINEAR if spec.is_linear(layer) else FULL for layer in range(spec.n_layers)]
    return qwen_moe.written(spec) | {"layer_types": kinds}


QWEN3_NEXT = register(
    Architecture(
        model_type="qwen3_next",
        class_name="Qwen3NextForCausalLM",
        sizes=qwen_moe.SIZES | {"moe.d_shared": "shared_expert_intermediate_size"} | SIZES,
        choices=qwen.CHOICES
        | {"norm_offset": True, "attention_gate": True}
        | {"moe.n_shared": 1, "moe.shared_gate": True, "moe.score": "softmax", "moe.bias_rate": 0.0},
        fixed=qwen.FIXED,
        complete=complete,
        written=written,
        ends=llama.ENDS,
        layer=qwen.ATTENTION | NET | llama.NETWORK | qwen_moe.EXPERTS | qwen_moe.SHARED,
        rope_fraction=0.25,
        ignored=llama.IGNORED | {r"mtp\..*": "transformers has no module of multi-token prediction for Qwen3-Next"},
        problems=problems,
    )
)
