"""OLMo 2, with norms after the branches, and OLMoE, a mixture with norms before them.

Both norm all queries of a token together, and all its keys."""

from shardwright.hugging_face import llama, qwen3
from shardwright.hugging_face.architecture import Architecture, Table, register
from shardwright.hugging_face.qwen3_moe import EXPERTS

CHOICES = llama.CHOICES | {"qk_norm": True, "qk_norm_whole": True}
NORMS_AFTER: Table = {
    "attention_post_norm": "post_attention_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
}

OLMO2 = register(
    Architecture(
        model_type="olmo2",
        class_name="Olmo2ForCausalLM",
        sizes=llama.SIZES,
        choices=CHOICES | {"norm_position": "after"},
        fixed={"hidden_act": "silu", "attention_bias": False},
        complete=lambda config: llama.complete(config, norm_eps=1e-5),
        ends=llama.ENDS,
        layer=qwen3.ATTENTION | llama.NETWORK | NORMS_AFTER,
        ignored=llama.IGNORED,
    )
)

OLMOE = register(
    Architecture(
        model_type="olmoe",
        class_name="OlmoeForCausalLM",
        sizes=llama.SIZES
        | {
            "moe.n_experts": ("num_experts", "num_local_experts"),
            "moe.top_k": "num_experts_per_tok",
            "moe.d_ffn": "intermediate_size",
            "moe.normalise": "norm_topk_prob",
        },
        choices=CHOICES | {"moe.score": "softmax", "moe.bias_rate": 0.0},
        fixed={"hidden_act": "silu", "attention_bias": False, "clip_qkv": None},
        complete=lambda config: llama.complete({"norm_topk_prob": False} | config, norm_eps=1e-5),
        ends=llama.ENDS,
        layer=qwen3.ATTENTION | EXPERTS,
        ignored=llama.IGNORED,
    )
)
