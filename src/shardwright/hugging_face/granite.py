"""Granite 3: Llama with constant factors of embeddings, attention scores, branches and logits; also with a mixture of
experts in every layer, whose matrices of all experts are in two tensors."""

from shardwright.hugging_face import llama
from shardwright.hugging_face.architecture import Architecture, Table, register

SCALES = {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention_scale": "attention_multiplier",
    "logit_divisor": "logits_scaling",
}
_DEFAULTS = dict.fromkeys(SCALES.values(), 1.0) | {"attention_bias": False, "mlp_bias": False}

GRANITE = register(
    Architecture(
        model_type="granite",
        class_name="GraniteForCausalLM",
        sizes=llama.SIZES | SCALES | {"bias": ("attention_bias", "mlp_bias")},
        choices=llama.CHOICES,
        fixed={"hidden_act": "silu"},
        complete=lambda config: llama.complete(_DEFAULTS | config),
        ends=llama.ENDS,
        layer=llama.ATTENTION | llama.NETWORK,
        ignored=llama.IGNORED,
    )
)

EXPERTS: Table = {
    "ffn_norm": "post_attention_layernorm",
    "ffn.router": "block_sparse_moe.router.layer",
    ("ffn.experts.gate", "ffn.experts.up"): "block_sparse_moe.input_linear.weight",
    "ffn.experts.down": "block_sparse_moe.output_linear.weight",
}
_MOE_DEFAULTS = dict.fromkeys(SCALES.values(), 1.0) | {"num_local_experts": 8, "num_experts_per_tok": 2}

GRANITE_MOE = register(
    Architecture(
        model_type="granitemoe",
        class_name="GraniteMoeForCausalLM",
        sizes=llama.SIZES
        | SCALES
        | {
            "moe.n_experts": "num_local_experts",
            "moe.top_k": "num_experts_per_tok",
            "moe.d_ffn": "intermediate_size",
        },
        choices=llama.CHOICES | {"moe.score": "softmax", "moe.normalise": True, "moe.bias_rate": 0.0},
        fixed={"hidden_act": "silu", "attention_bias": False},
        complete=lambda config: llama.complete(_MOE_DEFAULTS | config),
        ends=llama.ENDS,
        layer=llama.ATTENTION | EXPERTS,
        ignored=llama.IGNORED,
    )
)
