"""Mistral: Llama whose layers all attend to a window; Ministral, in which the layers of `layer_types` do; and Mixtral:
Llama's attention, and a mixture of experts in every layer."""

from dataclasses import replace

from shardwright.hugging_face import llama, windows
from shardwright.hugging_face.architecture import Architecture, Table, register

MISTRAL = register(
    Architecture(
        model_type="mistral",
        class_name="MistralForCausalLM",
        sizes=llama.SIZES | windows.SIZES,
        choices=llama.CHOICES,
        fixed={"hidden_act": "silu"},
        complete=lambda config: windows.complete(llama.complete({"num_key_value_heads": 8} | config), by_layer=False),
        ends=llama.ENDS,
        layer=llama.ATTENTION | llama.NETWORK,
        null_if_zero=windows.NULL_IF_ZERO,
        ignored=llama.IGNORED,
        problems=windows.every_layer,
    )
)

MINISTRAL = register(
    replace(
        MISTRAL,
        model_type="ministral",
        class_name="MinistralForCausalLM",
        complete=lambda config: windows.complete(llama.complete({"num_key_value_heads": 8} | config)),
        problems=windows.problems,
        written=windows.layer_types,
    )
)

EXPERTS: Table = {
    "ffn_norm": "post_attention_layernorm",
    "ffn.router": "block_sparse_moe.gate",
    "ffn.experts.gate": "block_sparse_moe.experts.{expert}.w1.weight",
    "ffn.experts.up": "block_sparse_moe.experts.{expert}.w3.weight",
    "ffn.experts.down": "block_sparse_moe.experts.{expert}.w2.weight",
}

_DEFAULTS = {"num_local_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 8, "rope_theta": 1e6}
"""MixtralConfig's defaults for missing keys, except the defaults of all architectures."""

MIXTRAL = register(
    Architecture(
        model_type="mixtral",
        class_name="MixtralForCausalLM",
        sizes=llama.SIZES
        | {
            "moe.n_experts": "num_local_experts",
            "moe.top_k": "num_experts_per_tok",
            "moe.d_ffn": "intermediate_size",
        },
        choices=llama.CHOICES | {"moe.score": "softmax", "moe.normalise": True, "moe.bias_rate": 0.0},
        fixed={"hidden_act": "silu", "sliding_window": None},
        complete=lambda config: llama.complete(_DEFAULTS | config, norm_eps=1e-5),
        ends=llama.ENDS,
        layer=llama.ATTENTION | EXPERTS,
        ignored=llama.IGNORED,
    )
)
