"""GLM-4: Llama with biases of queries, keys and values, with half of each head rotated, in interleaved pairs, and with
gate and up in one tensor. GLM-4-0414 (`glm4`) also norms the outputs of the branches. GLM-4.5 has the experts of
DeepSeek-V3, and does not interleave the rotated pairs."""

from shardwright.hugging_face import deepseek, llama, qwen
from shardwright.hugging_face.architecture import Architecture, Config, Stored, Table, register
from shardwright.hugging_face.qwen_moe import EXPERTS

INTERLEAVED: Table = {
    "attention.q": Stored("self_attn.q_proj", interleaved=True),
    "attention.k": Stored("self_attn.k_proj", interleaved=True),
}
LAYER: Table = (
    llama.ATTENTION | INTERLEAVED | {"ffn_norm": "post_attention_layernorm"}
    | {("ffn.gate", "ffn.up"): "mlp.gate_up_proj", "ffn.down": "mlp.down_proj"}
)  # fmt: skip
NORMS_AFTER: Table = {"attention_post_norm": "post_self_attn_layernorm", "ffn_post_norm": "post_mlp_layernorm"}


def complete(config: Config) -> Config:
    """Return config.json with the defaults of GlmConfig and Glm4Config, which are the same."""
    heads = {"num_key_value_heads": 2, "head_dim": 128, "attention_bias": True}
    return llama.complete(heads | config, norm_eps=1.5625e-7)


GLM = register(
    Architecture(
        model_type="glm",
        class_name="GlmForCausalLM",
        sizes=llama.SIZES | {"qkv_bias": "attention_bias"},
        choices=llama.CHOICES,
        fixed={"hidden_act": "silu"},
        complete=complete,
        ends=llama.ENDS,
        layer=LAYER,
        rope_fraction=0.5,
        ignored=llama.IGNORED,
    )
)
GLM4 = register(
    Architecture(
        model_type="glm4",
        class_name="Glm4ForCausalLM",
        sizes=GLM.sizes,
        choices=llama.CHOICES | {"norm_position": "both"},
        fixed=GLM.fixed,
        complete=complete,
        ends=llama.ENDS,
        layer=LAYER | NORMS_AFTER,
        rope_fraction=0.5,
        ignored=llama.IGNORED,
    )
)

_MOE_DEFAULTS = {
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "attention_bias": False,
    "use_qk_norm": False,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 0,
}
"""Glm4MoeConfig's defaults for missing keys, except the defaults of all architectures, and of the number of modules of
multi-token prediction, which transformers does not train."""


GLM4_MOE = register(
    Architecture(
        model_type="glm4_moe",
        class_name="Glm4MoeForCausalLM",
        sizes={
            **llama.SIZES,
            **deepseek.MOE_SIZES,
            "qkv_bias": "attention_bias",
            "qk_norm": "use_qk_norm",
            "moe.normalise": "norm_topk_prob",
            "mtp_modules": "num_nextn_predict_layers",
        },
        choices=llama.CHOICES | {"moe.score": "sigmoid"},
        fixed={"hidden_act": "silu"},
        complete=lambda config: llama.complete(_MOE_DEFAULTS | config, norm_eps=1e-5),
        rope_fraction=0.5,
        ends=llama.ENDS,
        layer=qwen.ATTENTION | llama.NETWORK | EXPERTS | deepseek.SHARED,
        module=deepseek.MODULE,
        copied=deepseek.DEEPSEEK_V3.copied,
        ignored=deepseek.DEEPSEEK_V3.ignored,
    )
)
