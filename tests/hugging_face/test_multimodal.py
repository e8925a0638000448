"""Proves that the text part of a model of text and images computes what the whole model computes of text alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.training.exporting import export
from shardwright.training.weights import open_weights
from tests.marks import prove

pytest.importorskip("transformers")

import transformers
from torch import nn

from tests.hugging_face.models import gemma3, llama4, mistral, ours, saved, theirs, tokens

VISION: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
VISION |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
PARTS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], dict[str, Any]]] = {
    "Llama4": (
        llama4,
        {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16},
        {"tie_word_embeddings": False},
    ),
    "Gemma3": (gemma3, {"model_type": "siglip_vision_model"}, {"mm_tokens_per_image": 4}),
    "Mistral3": (lambda: mistral(7), {"model_type": "pixtral", "head_dim": 8}, {"tie_word_embeddings": False}),
}


@prove
@pytest.mark.parametrize("name", PARTS)
def test_the_text_part_of_a_model_of_images_is_read_and_written_alone(name: str, tmp_path: Path):
    text, vision, more = PARTS[name]

    def make() -> nn.Module:
        config = {"text_config": text().config.to_dict(), "vision_config": VISION | vision} | more
        whole: nn.Module = getattr(transformers, f"{name}ForConditionalGeneration")(
            getattr(transformers, f"{name}Config")(**config)
        )
        return whole

    source = saved(tmp_path / "hf", make)
    whole = getattr(transformers, f"{name}ForConditionalGeneration").from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        expected_BTV = whole.eval()(input_ids=tokens()).logits
        weights = open_weights(source)
        found_BTV = ours(weights, torch.float32)(tokens())
        export(source, tmp_path / "text")
        alone_BTV = theirs(tmp_path / "text", torch.float32)(tokens()).logits
    assert any("vision" in left_out for left_out in weights.left_out)
    for logits_BTV in (found_BTV, alone_BTV):
        assert float((logits_BTV - expected_BTV).abs().max() / expected_BTV.abs().max()) < 1e-5
