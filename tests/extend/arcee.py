"""An architecture of transformers from outside the package: Arcee, a Llama with squared relu and without gate."""

from shardwright.hugging_face import llama
from shardwright.hugging_face.architecture import Architecture, Config, register


def complete(config: Config) -> Config:
    """Return config.json with ArceeConfig's defaults for missing keys."""
    return llama.complete({"attention_bias": False, "mlp_bias": False} | config, norm_eps=1e-5)


register(
    Architecture(
        model_type="arcee",
        class_name="ArceeForCausalLM",
        # Field of [model] -> its key in config.json. Attention and network have biases, or neither has.
        sizes=llama.SIZES | {"bias": ("attention_bias", "mlp_bias")},
        choices={"norm": "rmsnorm", "activation": "relu2", "positions": "rope"},
        fixed={"hidden_act": "relu2"},
        complete=complete,
        # Our parameters -> the names of tensors: outside of the layers, and in each layer.
        ends=llama.ENDS,
        layer=llama.ATTENTION
        | {
            "ffn_norm": "post_attention_layernorm",
            "ffn.up": "mlp.up_proj",
            "ffn.down": "mlp.down_proj",
        },
        ignored=llama.IGNORED,
    )
)
