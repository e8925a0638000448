"""Granite 3: Llama with constant factors of embeddings, attention scores, branches and logits."""

from shardwright.hugging_face import llama
from shardwright.hugging_face.architecture import Architecture, register

SCALES = {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention_scale": "attention_multiplier",
    "logit_divisor": "logits_scaling",
}
_DEFAULTS = dict.fromkeys(SCALES.values(), 1.0) | {"attention_bias": False, "mlp_bias": False}

GRANITE = register(
    Architecture(
        model_type="granite",
        class_name="GraniteForCausalLM",
        sizes=llama.SIZES | SCALES | {"bias": ("attention_bias", "mlp_bias")},
        choices=llama.CHOICES,
        fixed={"hidden_act": "silu"},
        complete=lambda config: llama.complete(_DEFAULTS | config),
        ends=llama.ENDS,
        layer=llama.ATTENTION | llama.NETWORK,
        ignored=llama.IGNORED,
    )
)
