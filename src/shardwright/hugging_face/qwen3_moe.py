"""Qwen3 with a mixture of experts, in every layer or with dense layers in a pattern."""

from shardwright.hugging_face import llama, qwen3, windows
from shardwright.hugging_face.architecture import Architecture, Config, Table, register
from shardwright.model.spec import ModelSpec

EXPERTS: Table = {
    "ffn_norm": "post_attention_layernorm",
    "ffn.router": "mlp.gate",
    "ffn.experts.gate": "mlp.experts.{expert}.gate_proj.weight",
    "ffn.experts.up": "mlp.experts.{expert}.up_proj.weight",
    "ffn.experts.down": "mlp.experts.{expert}.down_proj.weight",
}
DENSE = {"moe.interval": "decoder_sparse_step", "moe.dense_layers": "mlp_only_layers"}
SIZES: dict[str, str | tuple[str, ...]] = {
    **llama.SIZES,
    "moe.n_experts": ("num_experts", "num_local_experts"),
    "moe.top_k": "num_experts_per_tok",
    "moe.d_ffn": "moe_intermediate_size",
    "moe.normalise": "norm_topk_prob",
    **DENSE,
}


def dense_layers(spec: ModelSpec) -> Config:
    """Return the numbers of the dense layers, besides the layers that the interval leaves out."""
    moe = spec.moe
    return {} if moe is None else {"mlp_only_layers": sorted({*range(moe.first_dense), *moe.dense_layers})}


def complete(config: Config) -> Config:
    """Return config.json with Qwen3MoeConfig's defaults."""
    experts = {"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []}
    return qwen3.complete(experts | config, kv_heads=4)


QWEN3_MOE = register(
    Architecture(
        model_type="qwen3_moe",
        class_name="Qwen3MoeForCausalLM",
        sizes=SIZES,
        choices=qwen3.CHOICES | {"moe.score": "softmax", "moe.bias_rate": 0.0},
        fixed=qwen3.FIXED | {"use_sliding_window": False},
        complete=complete,
        written=dense_layers,
        ends=llama.ENDS,
        layer=qwen3.ATTENTION | llama.NETWORK | EXPERTS,
        ignored=llama.IGNORED,
        problems=windows.refused,
    )
)
