"""Qwen1.5-MoE and Qwen2-MoE: Qwen2's attention, and experts with a gated shared expert; dense layers in a pattern."""

from collections.abc import Iterator

from shardwright.hugging_face import llama, windows
from shardwright.hugging_face.architecture import Architecture, Config, Table, register
from shardwright.hugging_face.qwen3_moe import DENSE, EXPERTS, dense_layers
from shardwright.model.spec import ModelSpec

_SHARED_WIDTH = "shared_expert_intermediate_size"
SHARED: Table = {
    "ffn.shared.gate": "mlp.shared_expert.gate_proj",
    "ffn.shared.up": "mlp.shared_expert.up_proj",
    "ffn.shared.down": "mlp.shared_expert.down_proj",
    "ffn.shared_gate": "mlp.shared_expert_gate",
}
_DEFAULTS = {
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
        complete=lambda config: llama.complete(_DEFAULTS | config),
        written=written,
        ends=llama.ENDS,
        layer=llama.ATTENTION | llama.NETWORK | EXPERTS | SHARED,
        ignored=llama.IGNORED,
        problems=problems,
    )
)
