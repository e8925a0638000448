"""Qwen3: Llama with a norm of each query and key head."""

from shardwright.hugging_face import llama, qwen2, windows
from shardwright.hugging_face.architecture import Architecture, Config, Table, register

CHOICES = llama.CHOICES | {"qk_norm": True}
FIXED = {"hidden_act": "silu", "attention_bias": False}
NORMS: Table = {"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}
ATTENTION = llama.ATTENTION | NORMS


def complete(config: Config, kv_heads: int = 32) -> Config:
    """Return config.json with Qwen3Config's defaults: heads of 128 elements, and 32 key and value heads."""
    return llama.complete({"head_dim": 128, "num_key_value_heads": kv_heads} | config)


QWEN3 = register(
    Architecture(
        model_type="qwen3",
        class_name="Qwen3ForCausalLM",
        sizes=llama.SIZES | windows.SIZES,
        choices=CHOICES,
        fixed=FIXED,
        complete=lambda config: qwen2.complete_windows(complete(config)),
        ends=llama.ENDS,
        layer=ATTENTION | llama.NETWORK,
        null_if_zero=windows.NULL_IF_ZERO,
        ignored=llama.IGNORED,
        problems=windows.problems,
        written=qwen2.written_windows,
    )
)
