"""GLM-4.5: Llama's attention with biases and half of each head rotated, and the experts of DeepSeek-V3."""

from shardwright.hugging_face import deepseek_v3, llama, qwen3
from shardwright.hugging_face.architecture import Architecture, register
from shardwright.hugging_face.qwen3_moe import EXPERTS

_DEFAULTS = {
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
            **deepseek_v3.MOE_SIZES,
            "qkv_bias": "attention_bias",
            "qk_norm": "use_qk_norm",
            "moe.normalise": "norm_topk_prob",
            "mtp_modules": "num_nextn_predict_layers",
        },
        choices=llama.CHOICES | {"moe.score": "sigmoid"},
        fixed={"hidden_act": "silu"},
        complete=lambda config: llama.complete(_DEFAULTS | config, norm_eps=1e-5),
        rope_fraction=0.5,
        ends=llama.ENDS,
        layer=qwen3.ATTENTION | llama.NETWORK | EXPERTS | deepseek_v3.SHARED,
        module=deepseek_v3.MODULE,
        copied=deepseek_v3.DEEPSEEK_V3.copied,
        ignored=deepseek_v3.DEEPSEEK_V3.ignored,
    )
)
