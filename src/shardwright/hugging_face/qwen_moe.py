"""Qwen3 and Qwen2 with a mixture of experts, in every layer or with dense layers in a pattern.

Qwen1.5-MoE and Qwen2-MoE have the attention of Qwen2, and a gated shared expert.
"""

from collections.abc import Iterator

from shardwright.hugging_face import llama, qwen, windows
from shardwright.hugging_face.architecture import Architecture, Config, Table, register
from shardwright.model.spec import ModelSpec

EXPERTS: Table = {
    "ffn_norm": "post_attention_layernorm",
    "ffn.router": "mlp.gate",
    "ffn.experts.gate": "mlp.experts.{expert}.gate_proj.weight",
    "ffn.experts.up": "mlp.experts.{expert}.up_proj.weight",
    "ffn.experts.down": "mlp.experts.{expert}.down_proj.weight",
}
DENSE = {"moe.interval": "decoder_sparse_step", "moe.dense_layers": "mlp_only_layers"}
SIZES: dict[str, str | tuple[str, ...]] = {
    **llama.SIZES,
    "moe.n_experts": ("num_experts", "num_local_experts"),
    "moe.top_k": "num_experts_per_tok",
    "moe.d_ffn": "moe_intermediate_size",
    "moe.normalise": "norm_topk_prob",
    **DENSE,
}


def dense_layers(spec: ModelSpec) -> Config:
    """Return the numbers of the dense layers, besides the layers that the interval leaves out."""
    moe = spec.moe
    return {} if moe is None else {"mlp_only_layers": sorted({*range(moe.first_dense), *moe.dense_layers})}


def _complete_qwen3(config: Config) -> Config:
    """Return config.json with Qwen3MoeConfig's defaults."""
    experts = {"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []}
    return qwen.complete_qwen3(experts | config, kv_heads=4)


QWEN3_MOE = register(
    Architecture(
        model_type="qwen3_moe",
        class_name="Qwen3MoeForCausalLM",
        sizes=SIZES,
        choices=qwen.CHOICES | {"moe.score": "softmax", "moe.bias_rate": 0.0},
        fixed=qwen.FIXED | {"use_sliding_window": False},
        complete=_complete_qwen3,
        written=dense_layers,
        ends=llama.ENDS,
        layer=qwen.ATTENTION | llama.NETWORK | EXPERTS,
        ignored=llama.IGNORED,
        problems=windows.refused,
    )
)

_SHARED_WIDTH = "shared_expert_intermediate_size"
SHARED: Table = {
    "ffn.shared.gate": "mlp.shared_expert.gate_proj",
    "ffn.shared.up": "mlp.shared_expert.up_proj",
    "ffn.shared.down": "mlp.shared_expert.down_proj",
    "ffn.shared_gate": "mlp.shared_expert_gate",
}
_QWEN2_DEFAULTS = {
    "num_key_value_heads": 16,
    "qkv_bias": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 1408,
    _SHARED_WIDTH: 5632,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "norm_topk_prob": False,
}
"""Qwen2MoeConfig's defaults for missing keys, except the defaults of all architectures."""


def written(spec: ModelSpec) -> Config:
    """Return the dense layers, and the width of the one shared expert, which several make here."""
    return dense_layers(spec) | ({} if spec.moe is None else {_SHARED_WIDTH: spec.moe.shared_width})


def problems(config: Config) -> Iterator[str]:
    """Yield unsupported kinds of layers, and a shared expert without features."""
    yield from windows.refused(config)
    yield from shared_problems(config)


def shared_problems(config: Config) -> Iterator[str]:
    """Yield a shared expert without features."""
    if config[_SHARED_WIDTH] == 0:
        yield f"{_SHARED_WIDTH}=0: every mixture of this architecture has a shared expert; valid: 1 or more"


QWEN2_MOE = register(
    Architecture(
        model_type="qwen2_moe",
        class_name="Qwen2MoeForCausalLM",
        sizes=llama.SIZES
        | {
            "qkv_bias": "qkv_bias",
            "moe.n_experts": "num_experts",
            "moe.top_k": "num_experts_per_tok",
            "moe.d_ffn": "moe_intermediate_size",
            "moe.d_shared": _SHARED_WIDTH,
            "moe.normalise": "norm_topk_prob",
        }
        | DENSE,
        choices=llama.CHOICES
        | {"moe.n_shared": 1, "moe.shared_gate": True, "moe.score": "softmax", "moe.bias_rate": 0.0},
        fixed={"hidden_act": "silu", "use_sliding_window": False},
        complete=lambda config: llama.complete(_QWEN2_DEFAULTS | config),
        written=written,
        ends=llama.ENDS,
        layer=llama.ATTENTION | llama.NETWORK | EXPERTS | SHARED,
        ignored=llama.IGNORED,
        problems=problems,
    )
)
