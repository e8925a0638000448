"""Gemma: Llama with gelu instead of silu, weights of norms stored as w for 1 + w, and scaled embeddings."""

import math

from shardwright.hugging_face import llama
from shardwright.hugging_face.architecture import Architecture, Config, register

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
