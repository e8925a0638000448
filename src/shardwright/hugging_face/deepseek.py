"""DeepSeek-V3 and V2: latent attention, dense first layers, then experts and shared experts.

The experts of V3 have a selection bias; in V2 and V2-Lite a softmax picks experts. The rotated elements are
interleaved. `transformers` norms the latent vectors with an epsilon of 1e-6 for any `rms_norm_eps`, so only that value
is supported. It never normalises the weights of V2's experts, whatever `norm_topk_prob` is, so only false is supported
there.
"""

from dataclasses import replace

from shardwright.hugging_face import llama
from shardwright.hugging_face.architecture import Architecture, Config, Stored, Table, register
from shardwright.hugging_face.qwen_moe import EXPERTS
from shardwright.model.spec import ModelSpec

ATTENTION: Table = {
    "attention_norm": "input_layernorm",
    "attention.q_down": "self_attn.q_a_proj",
    "attention.q_latent_norm": "self_attn.q_a_layernorm",
    "attention.q_up": Stored("self_attn.q_b_proj", interleaved=True),
    "attention.kv_down": Stored("self_attn.kv_a_proj_with_mqa", interleaved=True),
    "attention.kv_latent_norm": "self_attn.kv_a_layernorm",
    "attention.kv_up": "self_attn.kv_b_proj",
    "attention.o": "self_attn.o_proj",
}
SHARED: Table = {
    "ffn.router.bias": "mlp.gate.e_score_correction_bias",
    "ffn.shared.gate": "mlp.shared_experts.gate_proj",
    "ffn.shared.up": "mlp.shared_experts.up_proj",
    "ffn.shared.down": "mlp.shared_experts.down_proj",
}

MODULE: Table = {
    "embedding_norm": "enorm",
    "hidden_norm": "hnorm",
    "projection": "eh_proj",
    "norm": "shared_head.norm",
}

_NO_MODULE = {"num_nextn_predict_layers": 0}


def query(spec: ModelSpec) -> Table:
    """Return the tensor of queries that are made from the residual stream itself, in models with such queries."""
    narrow = spec.latent_attention is not None and spec.latent_attention.q_rank > 0
    return {} if narrow else {"attention.q_up": Stored("self_attn.q_proj", interleaved=True)}


def complete(config: Config) -> Config:
    """Return config.json with DeepseekV3Config's defaults; a null q_lora_rank is a query without a latent vector."""
    heads_and_groups = {"num_key_value_heads": 128, "q_lora_rank": 1536, "n_group": 8, "topk_group": 4}
    return llama.complete({**heads_and_groups, "norm_topk_prob": True, **_NO_MODULE} | config)


MOE_SIZES = {
    "moe.n_experts": "n_routed_experts",
    "moe.top_k": "num_experts_per_tok",
    "moe.d_ffn": "moe_intermediate_size",
    "moe.n_shared": "n_shared_experts",
    "moe.first_dense": "first_k_dense_replace",
    "moe.weight_scale": "routed_scaling_factor",
    "moe.n_groups": "n_group",
    "moe.groups_per_token": "topk_group",
}
LATENT_SIZES: dict[str, str | tuple[str, ...]] = {
    "n_kv_heads": ("num_attention_heads", "num_key_value_heads"),
    "head_dim": "v_head_dim",
    "latent_attention.kv_rank": "kv_lora_rank",
    "latent_attention.q_rank": "q_lora_rank",
    "latent_attention.nope_dim": "qk_nope_head_dim",
    "latent_attention.rope_dim": "qk_rope_head_dim",
    "latent_attention.v_dim": "v_head_dim",
}

DEEPSEEK_V3 = register(
    Architecture(
        model_type="deepseek_v3",
        class_name="DeepseekV3ForCausalLM",
        sizes={
            **llama.SIZES,
            **LATENT_SIZES,
            **MOE_SIZES,
            "moe.normalise": "norm_topk_prob",
            "mtp_modules": "num_nextn_predict_layers",
        },
        choices=llama.CHOICES | {"moe.score": "sigmoid"},
        fixed={
            "hidden_act": "silu",
            "attention_bias": False,
            "rope_interleave": True,
            "rms_norm_eps": 1e-6,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
        },
        complete=complete,
        ends=llama.ENDS,
        layer=ATTENTION | llama.NETWORK | EXPERTS | SHARED,
        module=MODULE,
        copied={"embedding": "embed_tokens", "head": "shared_head.head"},
        also=query,
        null_if_zero=("q_lora_rank",),
        ignored=llama.IGNORED
        | {r"model\.layers\.{n_layers}\..*": "config.json has no such module of multi-token prediction"},
    )
)

KIMI_K2 = register(replace(DEEPSEEK_V3, model_type="kimi_k2"))
"""Kimi-K2's config.json names DeepseekV3ForCausalLM; `export` writes deepseek_v3 unless kimi_k2 is asked for."""

_GREEDY, _GROUPS = "greedy", "group_limited_greedy"
_V2_DEFAULTS = {
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


def _complete_v2(config: Config) -> Config:
    """Return config.json with DeepseekV2Config's defaults; a greedy choice ignores the groups of experts."""
    ungrouped = {"n_group": 1, "topk_group": 1} if config.get("topk_method", _GREEDY) == _GREEDY else {}
    config = _V2_DEFAULTS | config | ungrouped
    return llama.complete({"num_key_value_heads": config["num_attention_heads"]} | config)


def _method(spec: ModelSpec) -> Config:
    """Return the name of the choice of experts."""
    return {"topk_method": _GROUPS if spec.moe is not None and spec.moe.n_groups > 1 else _GREEDY}


DEEPSEEK_V2 = register(
    Architecture(
        model_type="deepseek_v2",
        class_name="DeepseekV2ForCausalLM",
        sizes={**llama.SIZES, **LATENT_SIZES, **MOE_SIZES},
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
        complete=_complete_v2,
        written=_method,
        ends=llama.ENDS,
        layer=ATTENTION | llama.NETWORK | EXPERTS | SHARED,
        also=query,
        null_if_zero=("q_lora_rank",),
        ignored=llama.IGNORED,
    )
)
