"""Qwen3 with a mixture of experts in every layer."""

from shardwright.hugging_face import llama, qwen3, windows
from shardwright.hugging_face.architecture import Architecture, Table, register

EXPERTS: Table = {
    "ffn_norm": "post_attention_layernorm",
    "ffn.router": "mlp.gate",
    "ffn.experts.gate": "mlp.experts.{expert}.gate_proj.weight",
    "ffn.experts.up": "mlp.experts.{expert}.up_proj.weight",
    "ffn.experts.down": "mlp.experts.{expert}.down_proj.weight",
}

QWEN3_MOE = register(
    Architecture(
        model_type="qwen3_moe",
        class_name="Qwen3MoeForCausalLM",
        sizes=llama.SIZES
        | {
            "moe.n_experts": ("num_experts", "num_local_experts"),
            "moe.top_k": "num_experts_per_tok",
            "moe.d_ffn": "moe_intermediate_size",
            "moe.normalise": "norm_topk_prob",
        },
        choices=qwen3.CHOICES | {"moe.score": "softmax", "moe.bias_rate": 0.0},
        fixed=qwen3.FIXED | {"use_sliding_window": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
        complete=lambda config: qwen3.complete({"norm_topk_prob": False} | config, kv_heads=4),
        ends=llama.ENDS,
        layer=qwen3.ATTENTION | EXPERTS,
        ignored=llama.IGNORED,
        problems=windows.refused,
    )
)
