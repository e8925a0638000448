"""Qwen2, Qwen2.5 and Qwen3: Llama with windows from some layer on if asked for.

Qwen2 and Qwen2.5 have biases of queries, keys and values; Qwen3 has a norm of each query and key head.
"""

from shardwright.hugging_face import llama, windows
from shardwright.hugging_face.architecture import Architecture, Config, Table, register
from shardwright.model.spec import ModelSpec

CHOICES = llama.CHOICES | {"qk_norm": True}
FIXED = {"hidden_act": "silu", "attention_bias": False}
NORMS: Table = {"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}
ATTENTION = llama.ATTENTION | NORMS


def _complete_windows(config: Config) -> Config:
    """Return config.json with the pattern of windows: none without `use_sliding_window`, otherwise from layer
    `max_window_layers` on."""
    if not config.get("use_sliding_window", False):
        config = config | {"sliding_window": 0}
    return windows.complete(config, first=config.get("max_window_layers", 28))


def _written_windows(spec: ModelSpec) -> Config:
    """Return the keys of config.json of the pattern of windows."""
    uses = {"use_sliding_window": spec.window > 0, "max_window_layers": spec.first_window}
    return windows.layer_types(spec) | uses


def complete_qwen3(config: Config, kv_heads: int = 32) -> Config:
    """Return config.json with Qwen3Config's defaults: heads of 128 elements, and 32 key and value heads."""
    return llama.complete({"head_dim": 128, "num_key_value_heads": kv_heads} | config)


QWEN3 = register(
    Architecture(
        model_type="qwen3",
        class_name="Qwen3ForCausalLM",
        sizes=llama.SIZES | windows.SIZES,
        choices=CHOICES,
        fixed=FIXED,
        complete=lambda config: _complete_windows(complete_qwen3(config)),
        ends=llama.ENDS,
        layer=ATTENTION | llama.NETWORK,
        null_if_zero=windows.NULL_IF_ZERO,
        ignored=llama.IGNORED,
        problems=windows.problems,
        written=_written_windows,
    )
)

QWEN2 = register(
    Architecture(
        model_type="qwen2",
        class_name="Qwen2ForCausalLM",
        sizes=llama.SIZES | windows.SIZES,
        choices=llama.CHOICES | {"qkv_bias": True},
        fixed={"hidden_act": "silu"},
        complete=lambda config: _complete_windows(llama.complete({"num_key_value_heads": 32} | config)),
        ends=llama.ENDS,
        layer=llama.ATTENTION | llama.NETWORK,
        null_if_zero=windows.NULL_IF_ZERO,
        ignored=llama.IGNORED,
        problems=windows.problems,
        written=_written_windows,
    )
)
