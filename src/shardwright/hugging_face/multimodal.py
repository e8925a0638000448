"""The text parts of models of text and images: Llama 4, Gemma 3 and Mistral Small 3.1.

Their `text_config` is the configuration of an architecture of text, and their tensors of text have a prefix. Tensors of
images are left out, and `export` writes the text part.
"""

from dataclasses import replace
from typing import Any

from shardwright.hugging_face import gemma, llama, llama4, mistral
from shardwright.hugging_face.architecture import Architecture, register

_LEFT_OUT = {r"(vision_model|vision_tower|multi_modal_projector)\..*": "only the text part of the model is read"}
_GEMMA3_DEFAULTS = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "max_position_embeddings": 131072,
    "hidden_activation": "gelu_pytorch_tanh",
}
"""Gemma3TextConfig's defaults for keys that published configurations leave out."""


def _text_architecture(text: Architecture, model_type: str, class_name: str, defaults: dict[str, Any]) -> Architecture:
    """Return the architecture of a model of text and images with the text part `text`."""
    return register(
        replace(
            text,
            model_type=model_type,
            class_name=class_name,
            text_defaults=defaults,
            prefix="language_model.model.",
            ends=llama.ENDS | {"head": "language_model.lm_head"},
            ignored={**text.ignored, **_LEFT_OUT},
        )
    )


LLAMA4 = _text_architecture(llama4.LLAMA4_TEXT, "llama4", "Llama4ForConditionalGeneration", {})
GEMMA3 = _text_architecture(gemma.GEMMA3, "gemma3", "Gemma3ForConditionalGeneration", _GEMMA3_DEFAULTS)
MISTRAL3 = _text_architecture(mistral.MISTRAL, "mistral3", "Mistral3ForConditionalGeneration", {})
