"""Granite 3 with a mixture of experts in every layer, whose matrices of all experts are in two tensors."""

from shardwright.hugging_face import granite, llama
from shardwright.hugging_face.architecture import Architecture, Table, register

EXPERTS: Table = {
    "ffn_norm": "post_attention_layernorm",
    "ffn.router": "block_sparse_moe.router.layer",
    ("ffn.experts.gate", "ffn.experts.up"): "block_sparse_moe.input_linear.weight",
    "ffn.experts.down": "block_sparse_moe.output_linear.weight",
}
_DEFAULTS = dict.fromkeys(granite.SCALES.values(), 1.0) | {"num_local_experts": 8, "num_experts_per_tok": 2}

GRANITE_MOE = register(
    Architecture(
        model_type="granitemoe",
        class_name="GraniteMoeForCausalLM",
        sizes=llama.SIZES
        | granite.SCALES
        | {
            "moe.n_experts": "num_local_experts",
            "moe.top_k": "num_experts_per_tok",
            "moe.d_ffn": "intermediate_size",
        },
        choices=llama.CHOICES | {"moe.score": "softmax", "moe.normalise": True, "moe.bias_rate": 0.0},
        fixed={"hidden_act": "silu", "attention_bias": False},
        complete=lambda config: llama.complete(_DEFAULTS | config),
        ends=llama.ENDS,
        layer=llama.ATTENTION | EXPERTS,
        ignored=llama.IGNORED,
    )
)
