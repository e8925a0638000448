"""Llama 4, its text part: chunks in the layers that rotate, experts of scaled inputs, and a shared expert.

`transformers` norms queries and keys, without weights, after their rotation. Here they are normed before it, which is
the same: a rotation changes no norm.
"""

from collections.abc import Iterator

from shardwright.hugging_face import glm4, llama, smollm3, windows
from shardwright.hugging_face.architecture import Architecture, Config, Stored, Table, register
from shardwright.hugging_face.rope import read_rope
from shardwright.layout.key import MOST_LAYERS
from shardwright.model.spec import ModelSpec

CHUNKED = "chunked_attention"
NETWORK: Table = {
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "feed_forward.gate_proj",
    "ffn.up": "feed_forward.up_proj",
    "ffn.down": "feed_forward.down_proj",
    "ffn.router": "feed_forward.router",
    ("ffn.experts.gate", "ffn.experts.up"): Stored("feed_forward.experts.gate_up_proj", transposed=True),
    "ffn.experts.down": Stored("feed_forward.experts.down_proj", transposed=True),
    "ffn.shared.gate": "feed_forward.shared_expert.gate_proj",
    "ffn.shared.up": "feed_forward.shared_expert.up_proj",
    "ffn.shared.down": "feed_forward.shared_expert.down_proj",
}
_DEFAULTS = {
    "vocab_size": 202048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "num_experts_per_tok": 1,
    "num_local_experts": 16,
    "interleave_moe_layer_step": 1,
    "use_qk_norm": True,
    "no_rope_layer_interval": 4,
    "attention_chunk_size": 8192,
    "attn_temperature_tuning": True,
    "floor_scale": 8192,
    "attn_scale": 0.1,
    "attention_bias": False,
    "rope_theta": 500000.0,
}
"""Llama4TextConfig's defaults for missing keys, except the defaults of all architectures."""


def complete(config: Config) -> Config:
    """Return config.json with Llama4TextConfig's defaults, and its patterns of layers as our fields. A chunk as long as
    the longest sequence is none."""
    config = llama.complete(_DEFAULTS | config, norm_eps=1e-5)
    layers = config["num_hidden_layers"]
    numbers = range(min(layers, MOST_LAYERS) if isinstance(layers, int) else 0)  # others are refused with the sizes
    config |= smollm3.unrotated(config.get("no_rope_layers"), len(numbers), config["no_rope_layer_interval"])
    rotates = [_rotates(config, layer) for layer in numbers]
    kinds = config.get("layer_types") or [CHUNKED if rotated else windows.GLOBAL for rotated in rotates]
    chunk = config["attention_chunk_size"]
    chunked = CHUNKED in kinds and 0 < chunk < config["max_position_embeddings"]
    config |= windows.pattern(kinds) if chunked else windows.NO_PATTERN
    step = config["interleave_moe_layer_step"]
    dense: list[int] = []
    if isinstance(of_experts := config.get("moe_layers"), list):
        steps = (n for n in range(1, len(numbers) + 1) if of_experts == [*numbers[n - 1 :: n]])
        step = next(steps, 0)
        step, dense = (step, []) if step else (1, [layer for layer in numbers if layer not in of_experts])
    tuned = bool(config["attn_temperature_tuning"] and config["attn_scale"] and not all(rotates))
    return config | {
        "_chunk": chunk if chunked else 0,
        "_chunked": chunked,
        "_interval": step,
        "_dense_layers": dense,
        "_qk_norm_weight": not config["use_qk_norm"],
        "_temperature_scale": float(config["attn_scale"]) if tuned else 0.0,
        "_temperature_interval": config["floor_scale"] if tuned else 0,
    }


def _rotates(config: Config, layer: int) -> bool:
    interval = config["_nope_interval"]
    return not (interval and (layer + 1) % interval == 0) and layer not in config["_nope_layers"]


def problems(config: Config) -> Iterator[str]:
    """Yield the faults of the patterns of layers, and settings that transformers computes in another order."""
    layers, rotated = config["num_hidden_layers"], config.get("no_rope_layers")
    yield from windows.problems(config, CHUNKED)
    if rotated is not None:
        yield from smollm3.unrotated_problems(rotated, layers)
    of_experts = config.get("moe_layers")
    whole = isinstance(of_experts, list) and all(type(layer) is int and 0 <= layer < layers for layer in of_experts)
    if of_experts is not None and not whole:
        yield f"moe_layers={of_experts!r} is not a list of numbers of layers; valid: 0 to {layers - 1}"
    for key in ("attention_chunk_size", "no_rope_layer_interval", "interleave_moe_layer_step", "floor_scale"):
        if type(config[key]) is not int or config[key] < 1:
            yield f"{key}={config[key]!r} is not a whole number above 0"
    scaling = read_rope(config)[1]
    if config["use_qk_norm"] and scaling is not None and scaling.attention_scale != 1:
        yield f"rope_scaling of type {scaling.kind!r} scales queries and keys, which use_qk_norm=true norms again"


def written(spec: ModelSpec) -> Config:
    """Return the patterns of layers and the sizes that several fields make."""
    layers = range(spec.n_layers)
    return smollm3.written(spec) | windows.layer_types(spec, CHUNKED) | {
        "moe_layers": [layer for layer in layers if spec.has_experts(layer)],
        "attention_chunk_size": spec.window or spec.max_seq_len,
        "attn_temperature_tuning": spec.temperature_scale > 0,
        "attn_scale": spec.temperature_scale or 0.1,
        "floor_scale": spec.temperature_interval or 8192,
    }  # fmt: skip


LLAMA4_TEXT = register(
    Architecture(
        model_type="llama4_text",
        class_name="Llama4ForCausalLM",
        sizes={
            **llama.SIZES,
            **windows.PATTERN,
            **smollm3.NOPE,
            "d_ffn": "intermediate_size_mlp",
            "qkv_bias": "attention_bias",
            "o_bias": "attention_bias",
            "qk_norm": "use_qk_norm",
            "qk_norm_weight": "_qk_norm_weight",
            "window": "_chunk",
            "window_chunked": "_chunked",
            "temperature_scale": "_temperature_scale",
            "temperature_interval": "_temperature_interval",
            "moe.n_experts": "num_local_experts",
            "moe.top_k": "num_experts_per_tok",
            "moe.d_ffn": "intermediate_size",
            "moe.interval": "_interval",
            "moe.dense_layers": "_dense_layers",
        },
        choices=llama.CHOICES
        | {
            "moe.n_shared": 1,
            "moe.score": "sigmoid",
            "moe.normalise": False,
            "moe.bias_rate": 0.0,
            "moe.scale_input": True,
        },
        fixed={"hidden_act": "silu"},
        complete=complete,
        ends=llama.ENDS,
        layer=llama.ATTENTION | glm4.INTERLEAVED | NETWORK,
        null_if_zero=("attention_chunk_size",),
        ignored=llama.IGNORED,
        problems=problems,
        written=written,
    )
)
