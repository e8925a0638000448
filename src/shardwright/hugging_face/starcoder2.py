"""StarCoder2: Llama with LayerNorms, biases of all linears, and a network without gate.

Dropout of published files is not read: set model.dropout."""

from shardwright.hugging_face import llama, windows
from shardwright.hugging_face.architecture import Architecture, register

_DEFAULTS = {"num_key_value_heads": 2, "norm_epsilon": 1e-5, "use_bias": True, "initializer_range": 0.018042}


STARCODER2 = register(
    Architecture(
        model_type="starcoder2",
        class_name="Starcoder2ForCausalLM",
        sizes=llama.SIZES | windows.SIZES | {"norm_eps": "norm_epsilon", "bias": "use_bias"},
        choices={"norm": "layernorm", "activation": "gelu_tanh", "positions": "rope"},
        fixed={"hidden_act": "gelu_pytorch_tanh"},
        complete=lambda config: windows.complete(
            llama.complete(_DEFAULTS | config, tied=True), window=0, by_layer=False
        ),
        problems=windows.every_layer,
        null_if_zero=windows.NULL_IF_ZERO,
        ends=llama.ENDS,
        layer=llama.ATTENTION
        | {"ffn_norm": "post_attention_layernorm", "ffn.up": "mlp.c_fc", "ffn.down": "mlp.c_proj"},
        ignored=llama.IGNORED,
    )
)
