"""Phi-3 and Phi-4: Llama with query, key and value in one tensor, and gate and up in one tensor."""

from shardwright.hugging_face import llama, windows
from shardwright.hugging_face.architecture import Architecture, register

PHI3 = register(
    Architecture(
        model_type="phi3",
        class_name="Phi3ForCausalLM",
        sizes=llama.SIZES | windows.SIZES,
        choices=llama.CHOICES,
        fixed={
            "hidden_act": "silu",
            "attention_bias": False,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
        },
        complete=lambda config: windows.complete(llama.complete(config, norm_eps=1e-5), window=0),
        ends=llama.ENDS,
        layer={
            "attention_norm": "input_layernorm",
            ("attention.q", "attention.k", "attention.v"): "self_attn.qkv_proj",
            "attention.o": "self_attn.o_proj",
            "ffn_norm": "post_attention_layernorm",
            ("ffn.gate", "ffn.up"): "mlp.gate_up_proj",
            "ffn.down": "mlp.down_proj",
        },
        null_if_zero=windows.NULL_IF_ZERO,
        rope_fraction=1.0,
        ignored=llama.IGNORED,
    )
)
