"""Gemma 2 and the text part of Gemma 3: Gemma with norms before and after each branch and with windows.

Gemma 2 has soft caps of scores and logits, Gemma 3 norms of queries and keys, and other rotary frequencies in layers
with windows.
"""

from shardwright.hugging_face import gemma, llama, qwen3, windows
from shardwright.hugging_face.architecture import Architecture, Config, Table, register
from shardwright.model.spec import ModelSpec

SIZES = llama.SIZES | windows.SIZES | {
    "embedding_scale": "_embedding_scale",
    "attention_scale": "_attention_scale",
    "attention_softcap": "attn_logit_softcapping",
    "logit_softcap": "final_logit_softcapping",
}  # fmt: skip
CHOICES = gemma.CHOICES | {"norm_position": "both"}
NORMS: Table = {
    "attention_post_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
}


def complete(config: Config) -> Config:
    """Return config.json with the defaults of both, and the factor of scores as our field."""
    config = gemma.complete({"num_key_value_heads": 4, "query_pre_attn_scalar": 256} | config)
    scalar = config["query_pre_attn_scalar"]
    return config | {"_attention_scale": 0.0 if scalar == config["head_dim"] else scalar**-0.5}


def written(spec: ModelSpec) -> Config:
    """Return the kinds of layers, and the factor of scores as its inverse square."""
    scalar = round(spec.attention_scale**-2) if spec.attention_scale else spec.head_dim
    return windows.layer_types(spec) | {"query_pre_attn_scalar": scalar}


def _written_gemma3(spec: ModelSpec) -> Config:
    return written(spec) | {"rope_local_base_freq": spec.window_rope_theta or spec.rope_theta}


def _complete_gemma2(config: Config) -> Config:
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    return windows.complete(complete(caps | config), interval=2)


def _complete_gemma3(config: Config) -> Config:
    config = windows.split_rope(complete(config), 1000000.0, 10000.0)
    none = {"attn_logit_softcapping": 0.0, "final_logit_softcapping": 0.0}
    return windows.complete(none | config, interval=config.get("sliding_window_pattern", 6))


def _architecture(model_type: str, class_name: str, **more: object) -> Architecture:
    shared = {"choices": CHOICES, "layer": llama.ATTENTION | llama.NETWORK | NORMS, "written": written}
    return register(
        Architecture(
            model_type=model_type,
            class_name=class_name,
            fixed={
                "hidden_activation": "gelu_pytorch_tanh",
                "attention_bias": False,
                "use_bidirectional_attention": (False, None),
            },
            ends=llama.ENDS,
            null_if_zero=(*windows.NULL_IF_ZERO, "attn_logit_softcapping", "final_logit_softcapping"),
            ignored=llama.IGNORED,
            problems=windows.problems,
            **shared | {"sizes": SIZES} | more,  # type: ignore[arg-type]
        )
    )


GEMMA2 = _architecture("gemma2", "Gemma2ForCausalLM", complete=_complete_gemma2)
GEMMA3 = _architecture(
    "gemma3_text",
    "Gemma3ForCausalLM",
    complete=_complete_gemma3,
    sizes=SIZES | {"window_rope_theta": "_window_rope_theta"},
    choices=CHOICES | {"qk_norm": True},
    layer=qwen3.ATTENTION | llama.NETWORK | NORMS,
    written=_written_gemma3,
)
