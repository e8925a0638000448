"""Proves that a model's sizes are exact: parameters against published totals and the built model, FLOPs
against counted ones, and that a bad combination of sizes is named with its arithmetic. The planner needs all
of it without torch."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from shardloom.errors import ConfigError
from shardloom.model.presets import PRESETS, resolve
from shardloom.model.spec import ModelSpec, RopeScaling, descriptions
from shardloom.model.transformer import Transformer

PUBLISHED_PARAMETERS = {
    "smollm2-135m": 134_515_008,
    "smollm2-1.7b": 1_711_376_384,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "gpt2": 124_439_808,
}


def test_llama_3_1_8b_has_its_published_number_of_parameters() -> None:
    assert resolve("llama-3.1-8b").n_parameters == 8_030_261_248


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_parameter_counts_are_the_published_ones(name: str) -> None:
    assert resolve(name).n_parameters == PUBLISHED_PARAMETERS[name]


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith("gpt")])
def test_the_gpt_family_follows_the_formula_of_the_megatron_papers(name: str) -> None:
    spec = resolve(name)
    n_layers, h = spec.n_layers, spec.d_model
    formula = spec.vocab_size * h + spec.max_seq_len * h + n_layers * (12 * h**2 + 13 * h) + 2 * h
    assert spec.n_parameters == formula
    if name[4:-1].replace(".", "").isdigit() and name.endswith("b"):
        assert spec.n_parameters == pytest.approx(float(name[4:-1]) * 1e9, rel=0.03)


@pytest.mark.parametrize("name", PRESETS)
def test_the_built_model_has_the_parameters_the_spec_counts(name: str) -> None:
    spec = resolve(name)
    with torch.device("meta"):
        model = Transformer(spec)
    counted = {name: p.numel() for name, p in model.named_parameters()}
    assert sum(counted.values()) == spec.n_parameters
    prefixes = {
        "embedding": ("embedding.",),
        "positions": ("position_embedding.",),
        "layer.attention": ("layers.0.attention.",),
        "layer.ffn": ("layers.0.ffn.",),
        "layer.norms": ("layers.0.attention_norm.", "layers.0.ffn_norm."),
        "final_norm": ("norm.",),
        "head": ("head.",),
    }
    assert spec.parameters_by_module() == {
        module: sum(n for each, n in counted.items() if each.startswith(prefix)) for module, prefix in prefixes.items()
    }


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"tied_embedding": True},
        {"qk_norm": True, "head_dim": 24},
        {"activation": "gelu_tanh", "norm": "layernorm", "positions": "learned", "bias": True},
    ],
)
def test_training_flops_are_those_counted_in_a_real_forward_and_backward(change: dict) -> None:
    torch.set_num_threads(1)
    spec = replace(resolve("debug"), n_layers=2, **change)
    model, seq_len = Transformer(spec), 32
    tokens_BT = torch.zeros(3, seq_len, dtype=torch.long)
    # The plain kernel is counted as the formula counts; a fused one computes QK^T again in the backward pass.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens_BT).sum().backward()
    assert counter.get_total_flops() / tokens_BT.numel() == spec.train_flops_per_token(seq_len)


def test_causal_flops_halve_the_attention_term_only() -> None:
    spec = resolve("llama-3.1-8b")
    matmuls = 6 * spec.n_matmul_parameters
    full, causal = (spec.train_flops_per_token(8192, causal=causal) for causal in (False, True))
    assert causal - matmuls == (full - matmuls) / 2
    # torchtitan prints 6 * (parameters without embedding) + 12 * 32 * 4096 * 8192 for this model.
    assert full == 6 * (8_030_261_248 - 128256 * 4096 - 65 * 4096) + 12 * 32 * 32 * 128 * 8192


def test_sizes_that_do_not_fit_are_named_with_their_arithmetic() -> None:
    assert replace(resolve("debug"), n_heads=8, n_kv_heads=3).problems() == [
        "n_kv_heads=3 does not divide n_heads=8 (8 = 3*2 + 2); valid: 1, 2, 4, 8"
    ]


def test_all_problems_are_reported_at_once() -> None:
    scaling = RopeScaling(factor=0.5, low_freq_factor=4, high_freq_factor=1, original_max_seq_len=0)
    broken = replace(
        resolve("debug"),
        n_layers=0,
        d_ffn=-1,
        norm="batchnorm",  # type: ignore[arg-type]
        positions="learned",
        rope_scaling=scaling,
        dropout=1.0,
        norm_eps=0.0,
        init_std=-0.1,
    )
    text = "\n".join(broken.problems())
    for word in (
        "n_layers=0 is not positive",
        "d_ffn=-1 is not positive",
        "norm='batchnorm' is not known; valid: rmsnorm, layernorm",
        "rope_scaling needs positions='rope'",
        "rope_scaling.factor=0.5",
        "high_freq_factor=1 is not greater than low_freq_factor=4",
        "original_max_seq_len=0",
        "dropout=1 ",
        "norm_eps=0 ",
        "init_std=-0.1",
    ):
        assert word in text
    assert len(broken.problems()) == 10


@pytest.mark.parametrize(
    ("change", "word"), [({"head_dim": 15}, "head_dim=15 is odd"), ({"rope_theta": 1}, "rope_theta=1")]
)
def test_rope_needs_even_heads_and_a_base_above_one(change: dict, word: str) -> None:
    [problem] = replace(resolve("debug"), **change).problems()
    assert word in problem
    assert not replace(resolve("debug"), **change, positions="learned").problems()


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_valid_model(name: str) -> None:
    assert resolve(name).problems() == []


def test_a_misspelt_preset_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'lama-3.1-8b' does not exist; did you mean 'llama-3.1-8b'\?"):
        resolve("lama-3.1-8b")


def test_every_field_says_what_it_means() -> None:
    for spec in (ModelSpec, RopeScaling):
        assert all(text.endswith(".") for text in descriptions(spec).values())
    assert descriptions(ModelSpec)["d_model"] == "Width of the residual stream."


def test_sizes_and_presets_import_without_torch() -> None:
    code = "import sys, shardloom.model.spec, shardloom.model.presets; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
