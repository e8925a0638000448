"""Each key of the model either changes the price of a layout, or costs nothing for a stated reason."""

from dataclasses import fields, replace
from typing import Any

import pytest

from shardwright.cost.hardware import cluster
from shardwright.cost.job import Job
from shardwright.cost.step import estimate
from shardwright.layout.layout import Layout
from shardwright.model.presets import PRESETS
from shardwright.model.spec import ModelSpec

BASE = replace(PRESETS["llama-3.2-1b"], tied_embedding=False)

STEP: dict[str, dict[str, Any]] = {
    "n_layers": {"n_layers": 20},
    "d_model": {"d_model": 4096},
    "n_heads": {"n_heads": 16},
    "n_kv_heads": {"n_kv_heads": 4},
    "head_dim": {"head_dim": 128},
    "d_ffn": {"d_ffn": 4096},
    "vocab_size": {"vocab_size": 64000},
    "norm": {"norm": "layernorm"},
    "norm_position": {"norm_position": "both"},
    "parallel_branches": {"parallel_branches": True},
    "activation": {"activation": "gelu"},
    "positions": {"positions": "learned"},
    "bias": {"bias": True},
    "nope_interval": {"nope_interval": 4},
    "nope_layers": {"nope_layers": (1,)},
    "window": {"window": 128},
    "logit_softcap": {"logit_softcap": 30.0},
    "attention_gate": {"attention_gate": True},
    "tied_embedding": {"tied_embedding": True},
    "dropout": {"dropout": 0.1},
    "mtp_modules": {"mtp_modules": 1},
    "rope_fraction": {"rope_fraction": 0.5},
    "qk_norm": {"qk_norm": True},
    "qk_norm_whole": {"qk_norm": True, "qk_norm_whole": True},
    "qk_norm_heads": {"qk_norm": True, "qk_norm_heads": True},
    "embedding_scale": {"embedding_scale": 2.0},
    "residual_scale": {"residual_scale": 0.5},
    "logit_divisor": {"logit_divisor": 2.0},
}
"""Changes that make a step longer or shorter by 1e-5 or more."""
FREE: dict[str, tuple[dict[str, Any], str]] = {
    "norm_eps": ({"norm_eps": 1e-3}, "a constant of a kernel"),
    "rope_theta": ({"rope_theta": 5e5}, "changes the values of a table"),
    "attention_scale": ({"attention_scale": 0.1}, "an argument of the kernel of attention"),
    "init_std": ({"init_std": 0.1}, "initial values alone"),
}
"""Changes that leave step and memory as they are, with the reason."""
NEGLECTED = {
    "qk_norm_weight": "a vector of head_dim elements",
    "qkv_bias": "its gradient is a sum over tokens; with it, predictions of published runs with biases get worse",
    "o_bias": "as qkv_bias",
    "attention_sinks": "one score for each head and token",
    "attention_softcap": "a tanh of each score in the kernel; without one: tests/cost/test_activations.py",
    "temperature_interval": "changes the values of a table",
    "norm_offset": "a cast of each norm's input and output, without torch.compile; its memory is priced",
}
"""Keys whose operation costs time that the formulas leave out."""
ELSEWHERE = {
    "temperature_scale": "with nope_interval",
    "family": "a name",
    "max_seq_len": "a table of positions; only learned positions have parameters for it",
    "norm_bias": "a layernorm alone",
    "rope_scaling": "changes the values of a table",
    "window_chunked": "with window",
    "global_interval": "with window",
    "first_window": "with window",
    "global_layers": "with window",
    "window_rope_theta": "changes the values of a table",
    "moe": "a section with tests of its own",
    "latent_attention": "a section with tests of its own",
    "linear_attention": "a section with tests of its own",
    "mtp_weight": "a factor of a scalar",
    "mup": "changes initial values, rates and factors",
    "lora": "a section with tests of its own: tests/cost/test_adapters.py",
}
"""Keys that this test does not change, because they need another key or have tests of their own."""


def cost(spec: ModelSpec, **layout: Any) -> tuple[float, float]:
    """Seconds of a step, and bytes at the peak, on one H100."""
    job = Job(model=spec, cluster=cluster("h100:1/1"), global_batch=4, seq_len=4096)
    priced = estimate(job, Layout(**layout), 2)
    return priced.step_s, priced.peak_bytes


def test_every_key_of_the_model_is_priced_or_has_a_reason():
    named = [*STEP, *FREE, *NEGLECTED, *ELSEWHERE]
    assert sorted(named) == sorted({field.name for field in fields(ModelSpec)})


@pytest.mark.parametrize("name", STEP)
def test_a_key_that_costs_time_changes_the_step(name: str):
    assert cost(replace(BASE, **STEP[name]))[0] != pytest.approx(cost(BASE)[0], rel=1e-5)


def test_scaled_queries_cost_a_product_in_the_layers_that_do_not_rotate():
    def more(nope_interval: int) -> float:
        spec = replace(BASE, nope_interval=nope_interval)
        return cost(replace(spec, temperature_scale=0.1))[0] - cost(spec)[0]

    assert more(0) == pytest.approx(0, abs=1e-9)
    assert more(2) == pytest.approx(2 * more(4), rel=1e-6)
    assert more(4) > 0


@pytest.mark.parametrize("name", FREE)
def test_a_key_that_costs_nothing_changes_neither_time_nor_memory(name: str):
    assert cost(replace(BASE, **FREE[name][0])) == pytest.approx(cost(BASE), rel=1e-5)


def test_norms_with_an_offset_cost_memory():
    offset = replace(BASE, norm_offset=True)
    tokens, norms = 2 * 4096, 2 * BASE.n_layers + 1
    assert cost(offset)[1] - cost(BASE)[1] == pytest.approx(1.01 * tokens * norms * BASE.d_model * 2, rel=1e-6)


def test_a_chunked_loss_prices_the_soft_cap_of_logits_too():
    capped = replace(BASE, logit_softcap=30.0)
    more = cost(capped, loss_chunk_tokens=1024)[0] - cost(BASE, loss_chunk_tokens=1024)[0]
    whole = cost(capped)[0] - cost(BASE)[0]
    assert more / whole == pytest.approx(17 / 13, rel=0.01)
    assert whole > 0
