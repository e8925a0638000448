"""DeepSeek-V2 and V2-Lite: latent attention, dense first layers, then experts that a softmax picks, and shared experts.

As in DeepSeek-V3, only an epsilon of 1e-6 is supported. `transformers` never normalises the weights of this model's
experts, whatever `norm_topk_prob` is, so only false is supported.
"""

from shardwright.hugging_face import deepseek_v3, llama
from shardwright.hugging_face.architecture import Architecture, Config, register
from shardwright.hugging_face.qwen3_moe import EXPERTS
from shardwright.model.spec import ModelSpec

_GREEDY, _GROUPS = "greedy", "group_limited_greedy"
_DEFAULTS = {
    "num_attention_heads": 32,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1407,
    "first_k_dense_replace": 0,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
}
"""DeepseekV2Config's defaults for missing keys, except the defaults of all architectures."""


def complete(config: Config) -> Config:
    """Return config.json with DeepseekV2Config's defaults; a greedy choice ignores the groups of experts."""
    ungrouped = {"n_group": 1, "topk_group": 1} if config.get("topk_method", _GREEDY) == _GREEDY else {}
    config = _DEFAULTS | config | ungrouped
    return llama.complete({"num_key_value_heads": config["num_attention_heads"]} | config)


def method(spec: ModelSpec) -> Config:
    """Return the name of the choice of experts."""
    return {"topk_method": _GROUPS if spec.moe is not None and spec.moe.n_groups > 1 else _GREEDY}


DEEPSEEK_V2 = register(
    Architecture(
        model_type="deepseek_v2",
        class_name="DeepseekV2ForCausalLM",
        sizes={**llama.SIZES, **deepseek_v3.LATENT_SIZES, **deepseek_v3.MOE_SIZES},
        choices=llama.CHOICES | {"moe.score": "softmax", "moe.normalise": False, "moe.bias_rate": 0.0},
        fixed={
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "rms_norm_eps": 1e-6,
            "scoring_func": "softmax",
            "norm_topk_prob": False,
            "moe_layer_freq": 1,
            "topk_method": (_GREEDY, _GROUPS),
        },
        complete=complete,
        written=method,
        ends=llama.ENDS,
        layer=deepseek_v3.ATTENTION | llama.NETWORK | EXPERTS | deepseek_v3.SHARED,
        also=deepseek_v3.query,
        null_if_zero=("q_lora_rank",),
        ignored=llama.IGNORED,
    )
)
