"""Cohere: Command R and Command R+, and Cohere2: Command R7B and Command A, with windows.

Attention and the feed-forward network read one LayerNorm without bias, and both outputs are added together. In Cohere2
only layers with a window rotate queries and keys."""

from collections.abc import Iterator

from shardwright.hugging_face import glm4, llama, windows
from shardwright.hugging_face.architecture import Architecture, Config, Stored, Table, register
from shardwright.model.spec import ModelSpec

SIZES = llama.SIZES | {
    "norm_eps": "layer_norm_eps",
    "logit_divisor": "_logit_divisor",
    "qkv_bias": "attention_bias",
    "o_bias": "attention_bias",
}
CHOICES = llama.CHOICES | {"norm": "layernorm", "norm_bias": False, "parallel_branches": True}
LAYER: Table = llama.ATTENTION | glm4.INTERLEAVED | {
    "ffn.gate": "mlp.gate_proj", "ffn.up": "mlp.up_proj", "ffn.down": "mlp.down_proj"
}  # fmt: skip
NORMS: Table = {
    f"attention.{name}_norm": Stored(f"self_attn.{name}_norm", interleaved=True, folded=True) for name in "qk"
}
DEFAULT_TOKEN_ID = 255001


def complete(config: Config, theta: float) -> Config:
    """Return config.json with the defaults of CohereConfig, and the inverse of `logit_scale` as our divisor."""
    defaults = {"logit_scale": 0.0625, "attention_bias": False, "layer_norm_eps": 1e-5, "rope_theta": theta}
    defaults |= {"use_qk_norm": False}
    config = llama.complete(defaults | config, tied=True)
    return config | {"_logit_divisor": 1 / config["logit_scale"]}


def complete_windows(config: Config) -> Config:
    """Return `complete` of Cohere2, whose layers without a window do not rotate."""
    config = complete(config, 10000.0)
    config = windows.complete(config, interval=config.get("sliding_window_pattern", 4), keeps_whole=True)
    if not config["sliding_window"]:
        return config | {"_nope_interval": 1, "_nope_layers": []}
    listed = [*range(config["_first_window"]), *config["_global_layers"]]
    return config | {"_nope_interval": config["_global_interval"], "_nope_layers": listed}


def problems(config: Config) -> Iterator[str]:
    """Yield a width of heads that transformers does not take, which computes it from the other sizes."""
    width = config.get("hidden_size", 0) // config.get("num_attention_heads", 1)
    if config.get("head_dim") != width:
        yield f"head_dim={config.get('head_dim')}: transformers takes hidden_size / num_attention_heads = {width}"


def _problems_of_windows(config: Config) -> Iterator[str]:
    yield from problems(config)
    yield from windows.problems(config)


def written(spec: ModelSpec) -> Config:
    """Return the factor of logits."""
    return {"logit_scale": 1 / spec.logit_divisor}


def _written_windows(spec: ModelSpec) -> Config:
    """Return the factor of logits and the kinds of layers. Without a layer with a window, `sliding_window` is the
    longest sequence, because transformers refuses null."""
    return written(spec) | windows.layer_types(spec) | {"sliding_window": spec.window or spec.max_seq_len}


COHERE2 = register(
    Architecture(
        model_type="cohere2",
        class_name="Cohere2ForCausalLM",
        sizes=SIZES | windows.SIZES | {"nope_interval": "_nope_interval", "nope_layers": "_nope_layers"},
        choices=CHOICES,
        fixed={"hidden_act": "silu"},
        complete=complete_windows,
        ends=llama.ENDS,
        layer=LAYER,
        null_if_zero=windows.NULL_IF_ZERO,
        ignored=llama.IGNORED,
        default_token_id=DEFAULT_TOKEN_ID,
        problems=_problems_of_windows,
        written=_written_windows,
    )
)
COHERE = register(
    Architecture(
        model_type="cohere",
        class_name="CohereForCausalLM",
        sizes=SIZES | {"qk_norm": "use_qk_norm", "qk_norm_heads": "use_qk_norm"},
        choices=CHOICES,
        fixed={"hidden_act": "silu"},
        complete=lambda config: complete(config, 500000.0),
        ends=llama.ENDS,
        layer=LAYER | NORMS,
        ignored=llama.IGNORED,
        default_token_id=DEFAULT_TOKEN_ID,
        problems=problems,
        written=written,
    )
)
