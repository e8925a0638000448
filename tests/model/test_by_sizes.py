"""A model by a few sizes: what is missing follows from them, never from a preset."""

from dataclasses import replace
from typing import Any

import pytest

from shardwright.model.by_sizes import sizes_of_spec, spec_of_sizes
from shardwright.model.presets import PRESETS
from shardwright.system.errors import ConfigError

LLAMA = "n_layers=32,d_model=4096,n_heads=32,d_ffn=11008,vocab_size=32000"


def test_a_few_sizes_are_a_model():
    assert spec_of_sizes(LLAMA, 4096) == PRESETS["llama-2-7b"]


def test_a_missing_width_of_heads_is_the_models_over_its_heads():
    # Qwen3's presets have heads of 128 at any width, and the preset of a run file's default has heads of 16.
    sizes = "n_layers=36,d_model=4096,n_heads=64,n_kv_heads=8,d_ffn=12288,vocab_size=151936"
    assert spec_of_sizes(sizes, 4096).head_dim == 64
    assert spec_of_sizes(f"{sizes},head_dim=128", 4096).head_dim == 128


def test_every_key_of_the_model_and_of_its_tables_can_be_given():
    more = "tied_embedding=true,norm=layernorm,activation=gelu_tanh,positions=learned,bias=true"
    gpt = f"n_layers=12,d_model=768,n_heads=12,d_ffn=3072,vocab_size=50257,{more}"
    assert spec_of_sizes(gpt, 1024) == PRESETS["gpt2"]
    mixtral = (
        LLAMA.replace("d_ffn=11008,", "") + ",n_kv_heads=8,moe.n_experts=8,moe.top_k=2,moe.d_ffn=14336,moe.bias_rate=0"
    )
    assert spec_of_sizes(mixtral, 32768).n_parameters == PRESETS["mixtral-8x7b"].n_parameters
    latent = "latent_attention.kv_rank=512,latent_attention.q_rank=1536,latent_attention.nope_dim=128"
    latent += ",latent_attention.rope_dim=64,latent_attention.v_dim=96"
    assert spec_of_sizes(f"{LLAMA},{latent}", 4096).head_dim == 96


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ("n_layers=2,d_model=64,vocab_size=100", ["n_heads is missing; it is: query heads", "d_ffn is missing"]),
        (f"{LLAMA},hidden=3", ["--model hidden=3: no such size; did you mean 'd_model'?"]),
        (f"{LLAMA},n_kv_heads=x", ["--model n_kv_heads=x: a whole number is needed"]),
        (f"{LLAMA},bias=1", ["--model bias=1: true or false is needed"]),
        (f"{LLAMA},norm=rms", ["--model norm=rms: did you mean 'rmsnorm'?"]),
        (f"{LLAMA},n_layers=2", ["given twice"]),
        (f"{LLAMA},moe.top_k=2", ["moe.n_experts is missing", "moe.d_ffn is missing"]),
        (LLAMA.replace("n_heads=32", "n_heads=24"), ["d_model / n_heads = 4096 / 24 is not whole; give head_dim"]),
        (LLAMA.replace("n_heads=32", "n_heads=0"), ["4096 / 0 is not whole"]),
        (f"{LLAMA},nope_layers=1", ["--model nope_layers=1: no such size; did you mean"]),
        (f"{LLAMA},moe.dense_layers=1", ["--model moe.dense_layers=1: no such size"]),
        (f"{LLAMA},n_kv_heads=5", ["--model: n_kv_heads=5"]),
    ],
)
def test_what_is_wrong_with_sizes_is_said_at_once(sizes: str, said: list[str]):
    with pytest.raises(ConfigError) as error:
        spec_of_sizes(sizes, 4096)
    for part in said:
        assert part in str(error.value)


@pytest.mark.parametrize(
    "lists",
    [{"nope_layers": (3, 7)}, {"nope_layers": (3,), "temperature_scale": 0.1, "temperature_interval": 8192}],
    ids=lambda lists: "+".join(lists),
)
def test_a_model_with_a_list_of_layers_has_no_sizes(lists: dict[str, Any]):
    with pytest.raises(ConfigError, match=r"sizes that differ between layers; plan --model reads its config\.json"):
        sizes_of_spec(replace(PRESETS["llama-2-7b"], **lists))
