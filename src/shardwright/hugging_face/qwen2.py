"""Qwen2 and Qwen2.5: Llama with biases of queries, keys and values."""

from shardwright.hugging_face import llama
from shardwright.hugging_face.architecture import Architecture, register

QWEN2 = register(
    Architecture(
        model_type="qwen2",
        class_name="Qwen2ForCausalLM",
        sizes=llama.SIZES,
        choices=llama.CHOICES | {"qkv_bias": True},
        fixed={"hidden_act": "silu", "use_sliding_window": False},
        complete=lambda config: llama.complete({"num_key_value_heads": 32} | config),
        ends=llama.ENDS,
        layer=llama.ATTENTION | llama.NETWORK,
        ignored=llama.IGNORED,
        problems=llama.windows,
    )
)
