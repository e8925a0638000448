"""Gemma: Llama with gelu instead of silu, weights of norms stored as w for 1 + w, and scaled embeddings.

Gemma 2 and the text part of Gemma 3 also have norms after each branch, and windows. Gemma 2 has soft caps of scores and
logits, Gemma 3 norms of queries and keys, and other rotary frequencies in layers with windows.
"""

import math

from shardwright.hugging_face import llama, qwen, windows
from shardwright.hugging_face.architecture import Architecture, Config, Table, register
from shardwright.model.spec import ModelSpec

CHOICES = llama.CHOICES | {"activation": "geglu_tanh", "norm_offset": True}


def complete(config: Config) -> Config:
    """Return config.json with GemmaConfig's defaults, and the factor of embeddings, which follows from the width."""
    sizes = {"num_key_value_heads": 16, "head_dim": 256, "_embedding_scale": math.sqrt(config.get("hidden_size", 0))}
    return llama.complete(sizes | config, tied=True)


GEMMA = register(
    Architecture(
        model_type="gemma",
        class_name="GemmaForCausalLM",
        sizes=llama.SIZES | {"embedding_scale": "_embedding_scale"},
        choices=CHOICES,
        # transformers reads "gelu" as its approximation by tanh, with which the weights were trained.
        fixed={
            "hidden_act": ("gelu_pytorch_tanh", "gelu"),
            "hidden_activation": "gelu_pytorch_tanh",
            "attention_bias": False,
            "use_bidirectional_attention": False,
        },
        complete=complete,
        ends=llama.ENDS,
        layer=llama.ATTENTION | llama.NETWORK,
        ignored=llama.IGNORED,
    )
)

_SHARED_SIZES = llama.SIZES | windows.SIZES | {
    "embedding_scale": "_embedding_scale",
    "attention_scale": "_attention_scale",
    "attention_softcap": "attn_logit_softcapping",
    "logit_softcap": "final_logit_softcapping",
}  # fmt: skip
_SHARED_CHOICES = CHOICES | {"norm_position": "both"}
_SHARED_NORMS: Table = {
    "attention_post_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
}


def _complete_shared(config: Config) -> Config:
    """Return config.json with the defaults of Gemma 2 and 3, and the factor of scores as our field."""
    config = complete({"num_key_value_heads": 4, "query_pre_attn_scalar": 256} | config)
    scalar = config["query_pre_attn_scalar"]
    return config | {"_attention_scale": 0.0 if scalar == config["head_dim"] else scalar**-0.5}


def _written_shared(spec: ModelSpec) -> Config:
    """Return the kinds of layers, and the factor of scores as its inverse square."""
    scalar = round(spec.attention_scale**-2) if spec.attention_scale else spec.head_dim
    return windows.layer_types(spec) | {"query_pre_attn_scalar": scalar}


def _written_gemma3(spec: ModelSpec) -> Config:
    return _written_shared(spec) | {"rope_local_base_freq": spec.window_rope_theta or spec.rope_theta}


def _complete_gemma2(config: Config) -> Config:
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    return windows.complete(_complete_shared(caps | config), interval=2)


def _complete_gemma3(config: Config) -> Config:
    config = windows.split_rope(_complete_shared(config), 1000000.0, 10000.0)
    none = {"attn_logit_softcapping": 0.0, "final_logit_softcapping": 0.0}
    return windows.complete(none | config, interval=config.get("sliding_window_pattern", 6))


def _architecture(model_type: str, class_name: str, **more: object) -> Architecture:
    shared = {
        "choices": _SHARED_CHOICES,
        "layer": llama.ATTENTION | llama.NETWORK | _SHARED_NORMS,
        "written": _written_shared,
    }
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
            **shared | {"sizes": _SHARED_SIZES} | more,  # type: ignore[arg-type]
        )
    )


GEMMA2 = _architecture("gemma2", "Gemma2ForCausalLM", complete=_complete_gemma2)
GEMMA3 = _architecture(
    "gemma3_text",
    "Gemma3ForCausalLM",
    complete=_complete_gemma3,
    sizes=_SHARED_SIZES | {"window_rope_theta": "_window_rope_theta"},
    choices=_SHARED_CHOICES | {"qk_norm": True},
    layer=qwen.ATTENTION | llama.NETWORK | _SHARED_NORMS,
    written=_written_gemma3,
)
