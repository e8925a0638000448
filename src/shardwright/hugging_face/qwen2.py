"""Qwen2 and Qwen2.5: Llama with biases of queries, keys and values, and windows from some layer on if asked for."""

from shardwright.hugging_face import llama, windows
from shardwright.hugging_face.architecture import Architecture, Config, register
from shardwright.model.spec import ModelSpec


def complete_windows(config: Config) -> Config:
    """Return config.json with the pattern of windows: none without `use_sliding_window`, otherwise from layer
    `max_window_layers` on."""
    if not config.get("use_sliding_window", False):
        config = config | {"sliding_window": 0}
    return windows.complete(config, first=config.get("max_window_layers", 28))


def written_windows(spec: ModelSpec) -> Config:
    """Return the keys of config.json of the pattern of windows."""
    uses = {"use_sliding_window": spec.window > 0, "max_window_layers": spec.first_window}
    return windows.layer_types(spec) | uses


QWEN2 = register(
    Architecture(
        model_type="qwen2",
        class_name="Qwen2ForCausalLM",
        sizes=llama.SIZES | windows.SIZES,
        choices=llama.CHOICES | {"qkv_bias": True},
        fixed={"hidden_act": "silu"},
        complete=lambda config: complete_windows(llama.complete({"num_key_value_heads": 32} | config)),
        ends=llama.ENDS,
        layer=llama.ATTENTION | llama.NETWORK,
        null_if_zero=windows.NULL_IF_ZERO,
        ignored=llama.IGNORED,
        problems=windows.problems,
        written=written_windows,
    )
)
