"""A small model of an architecture of transformers that Shardwright has no table for."""

from typing import Any

import pytest
import torch


def arcee_model() -> Any:
    """Return an Arcee model of transformers with random weights; skips the test without transformers."""
    transformers = pytest.importorskip("transformers")
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = transformers.ArceeConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=0.03, **ids)
    torch.manual_seed(0)
    return transformers.ArceeForCausalLM(config)
