"""OLMo 2, with norms after the branches, OLMo 3, with windows in most layers, and OLMoE, a mixture with norms before
the branches.

All norm all queries of a token together, and all its keys."""

from shardwright.hugging_face import llama, qwen, windows
from shardwright.hugging_face.architecture import Architecture, Config, Table, register
from shardwright.hugging_face.qwen_moe import EXPERTS
from shardwright.hugging_face.rope import write_rope
from shardwright.model.spec import ModelSpec

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
        layer=qwen.ATTENTION | llama.NETWORK | NORMS_AFTER,
        ignored=llama.IGNORED,
    )
)


def _complete_olmo3(config: Config) -> Config:
    config = windows.split_rope(llama.complete(config, norm_eps=1e-5), 500000.0)
    return windows.complete(config, interval=4)


def _written_olmo3(spec: ModelSpec) -> Config:
    """Return the kinds of layers and the rotary parameters of each kind. `transformers` reads a `rope_theta` outside of
    `rope_parameters` for one kind only."""
    flat = write_rope(spec)
    whole = {"rope_type": "default"} | (flat["rope_scaling"] or {}) | {"rope_theta": spec.rope_theta}
    local = {"rope_type": "default", "rope_theta": spec.window_rope_theta or spec.rope_theta}
    kinds = {windows.GLOBAL: whole, windows.WINDOWED: local}
    return windows.layer_types(spec) | {"rope_parameters": kinds, "rope_scaling": None}


OLMO3 = register(
    Architecture(
        model_type="olmo3",
        class_name="Olmo3ForCausalLM",
        sizes=llama.SIZES | windows.SIZES | {"window_rope_theta": "_window_rope_theta"},
        choices=OLMO2.choices,
        fixed=OLMO2.fixed,
        complete=_complete_olmo3,
        ends=llama.ENDS,
        layer=OLMO2.layer,
        null_if_zero=windows.NULL_IF_ZERO,
        ignored=llama.IGNORED,
        problems=windows.problems,
        written=_written_olmo3,
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
        layer=qwen.ATTENTION | EXPERTS,
        ignored=llama.IGNORED,
    )
)
