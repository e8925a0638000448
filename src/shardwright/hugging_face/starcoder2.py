"""StarCoder2: Llama with LayerNorms, biases of all linears, and a network without gate."""

from collections.abc import Iterator

from shardwright.hugging_face import llama
from shardwright.hugging_face.architecture import Architecture, Config, register

_DEFAULTS = {"num_key_value_heads": 2, "norm_epsilon": 1e-5, "use_bias": True, "initializer_range": 0.018042}


def problems(config: Config) -> Iterator[str]:
    """Yield why a sliding window is not supported; one that covers the longest sequence is no limit."""
    window, longest = config.get("sliding_window"), config.get("max_position_embeddings", 4096)
    if window is not None and not (isinstance(window, int) and window >= longest):
        yield (
            f"sliding_window={window!r} with max_position_embeddings={longest}: StarCoder2 is supported without an "
            "effective window; valid: null, or at least max_position_embeddings"
        )


STARCODER2 = register(
    Architecture(
        model_type="starcoder2",
        class_name="Starcoder2ForCausalLM",
        sizes=llama.SIZES | {"norm_eps": "norm_epsilon", "bias": "use_bias"},
        choices={"norm": "layernorm", "activation": "gelu_tanh", "positions": "rope"},
        fixed={"hidden_act": "gelu_pytorch_tanh"},
        complete=lambda config: llama.complete(_DEFAULTS | config, tied=True),
        ends=llama.ENDS,
        layer=llama.ATTENTION
        | {"ffn_norm": "post_attention_layernorm", "ffn.up": "mlp.c_fc", "ffn.down": "mlp.c_proj"},
        ignored=llama.IGNORED,
        problems=problems,
    )
)
