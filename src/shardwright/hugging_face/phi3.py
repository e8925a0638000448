"""Phi-3 and Phi-4: Llama with query, key and value in one tensor, and gate and up in one tensor."""

from collections.abc import Iterator

from shardwright.hugging_face import llama, windows
from shardwright.hugging_face.architecture import Architecture, Config, register

_LONGROPE = ("su", "yarn", "longrope")


def complete(config: Config) -> Config:
    """Return config.json with Phi3Config's defaults, which reads the scalings `su` and `yarn` as longrope."""
    config = llama.complete({"original_max_position_embeddings": 4096} | config, norm_eps=1e-5)
    for key in ("rope_parameters", "rope_scaling"):
        names = {name: "longrope" for name in ("type", "rope_type") if (config.get(key) or {}).get(name) in _LONGROPE}
        if names:
            config = config | {key: config[key] | names}
    return windows.complete(config, window=0, by_layer=False)


def problems(config: Config) -> Iterator[str]:
    """Yield the faults of `layer_types`, and the scalings of rotary frequencies that Phi3Config refuses."""
    yield from windows.every_layer(config)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ("default", "longrope"):
        yield f"rope_scaling of type {kind!r} is not supported for phi3; valid: 'longrope', or none"


PHI3 = register(
    Architecture(
        model_type="phi3",
        class_name="Phi3ForCausalLM",
        sizes=llama.SIZES | windows.SIZES,
        choices=llama.CHOICES,
        fixed={
            "hidden_act": "silu",
            "attention_bias": False,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
        },
        complete=complete,
        problems=problems,
        ends=llama.ENDS,
        layer={
            "attention_norm": "input_layernorm",
            ("attention.q", "attention.k", "attention.v"): "self_attn.qkv_proj",
            "attention.o": "self_attn.o_proj",
            "ffn_norm": "post_attention_layernorm",
            ("ffn.gate", "ffn.up"): "mlp.gate_up_proj",
            "ffn.down": "mlp.down_proj",
        },
        null_if_zero=windows.NULL_IF_ZERO,
        rope_fraction=1.0,
        ignored=llama.IGNORED,
    )
)
