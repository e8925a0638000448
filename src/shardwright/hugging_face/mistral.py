"""Mistral: Llama whose layers all attend to a window, and Ministral, in which the layers of `layer_types` do."""

from dataclasses import replace

from shardwright.hugging_face import llama, windows
from shardwright.hugging_face.architecture import Architecture, register

MISTRAL = register(
    Architecture(
        model_type="mistral",
        class_name="MistralForCausalLM",
        sizes=llama.SIZES | windows.SIZES,
        choices=llama.CHOICES,
        fixed={"hidden_act": "silu"},
        complete=lambda config: windows.complete(llama.complete({"num_key_value_heads": 8} | config), by_layer=False),
        ends=llama.ENDS,
        layer=llama.ATTENTION | llama.NETWORK,
        null_if_zero=windows.NULL_IF_ZERO,
        ignored=llama.IGNORED,
        problems=windows.every_layer,
    )
)

MINISTRAL = register(
    replace(
        MISTRAL,
        model_type="ministral",
        class_name="MinistralForCausalLM",
        complete=lambda config: windows.complete(llama.complete({"num_key_value_heads": 8} | config)),
        problems=windows.problems,
        written=windows.layer_types,
    )
)
