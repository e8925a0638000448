"""gpt-oss in bf16 or mxfp4: attention with sinks and biases, in every second layer in a window; biases of experts and
router; and matrices of all experts in two tensors, transposed in bf16, in which rows of gate and up alternate."""

from shardwright.hugging_face import llama, windows
from shardwright.hugging_face.architecture import Architecture, Config, Stored, Table, register
from shardwright.model.spec import ModelSpec

EXPERTS: Table = {
    "ffn_norm": "post_attention_layernorm",
    "ffn.router.weight": "mlp.router.weight",
    "ffn.router.logit_bias": "mlp.router.bias",
    ("ffn.experts.gate", "ffn.experts.up"): Stored("mlp.experts.gate_up_proj", transposed=True, alternating=True),
    ("ffn.experts.gate_bias", "ffn.experts.up_bias"): Stored("mlp.experts.gate_up_proj_bias", alternating=True),
    "ffn.experts.down": Stored("mlp.experts.down_proj", transposed=True),
    "ffn.experts.down_bias": Stored("mlp.experts.down_proj_bias"),
}
CHOICES = {
    "attention_sinks": True,
    "activation": "swiglu_clamped",
    "moe.bias": True,
    "moe.score": "softmax",
    "moe.normalise": True,
    "moe.bias_rate": 0.0,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 64,
    "attention_bias": True,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "rope_theta": 150000.0,
}
"""GptOssConfig's defaults for missing keys, except the defaults of all architectures."""


def complete(config: Config) -> Config:
    """Return config.json with GptOssConfig's defaults: windows of 128 in the layers with even numbers, from 0."""
    rope = {} if config.get("rope_parameters") or config.get("rope_scaling") else {"rope_scaling": _YARN}
    return windows.complete(llama.complete(_DEFAULTS | rope | config, norm_eps=1e-5), interval=2, window=128)


def written(spec: ModelSpec) -> Config:
    """Return the kinds of layers, and rotary parameters without scaling if there is none: YaRN is the default."""
    plain = {} if spec.rope_scaling else {"rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta}}
    return windows.layer_types(spec) | plain


GPT_OSS = register(
    Architecture(
        model_type="gpt_oss",
        class_name="GptOssForCausalLM",
        sizes=llama.SIZES
        | windows.SIZES
        | {
            "qkv_bias": "attention_bias",
            "o_bias": "attention_bias",
            "moe.n_experts": "num_local_experts",
            "moe.top_k": "num_experts_per_tok",
            "moe.d_ffn": "intermediate_size",
        },
        choices=llama.CHOICES | CHOICES,
        fixed={"hidden_act": "silu", "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        complete=complete,
        ends=llama.ENDS,
        layer=llama.ATTENTION | EXPERTS | {"attention.sinks": "self_attn.sinks"},
        null_if_zero=windows.NULL_IF_ZERO,
        quantised=("mxfp4",),
        ignored=llama.IGNORED,
        problems=windows.problems,
        written=written,
    )
)
