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

from shardwright.model.presets import PRESETS, resolve
from shardwright.model.saved import differences
from shardwright.model.sections import LatentAttentionSpec, MoESpec, RopeScaling, descriptions
from shardwright.model.spec import ModelSpec
from shardwright.model.transformer import Transformer
from shardwright.system.errors import ConfigError

PUBLISHED_PARAMETERS = {
    "smollm2-135m": 134_515_008,
    "smollm2-1.7b": 1_711_376_384,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "gpt2": 124_439_808,
}


def test_llama_3_1_8b_has_its_published_number_of_parameters() -> None:
    assert resolve("llama-3.1-8b").n_parameters == 8_030_261_248


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_parameter_counts_are_the_published_ones(name: str) -> None:
    assert resolve(name).n_parameters == PUBLISHED_PARAMETERS[name]


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith("gpt") and "oss" not in name])
def test_the_gpt_family_follows_the_formula_of_the_megatron_papers(name: str) -> None:
    spec = resolve(name)
    n_layers, h = spec.n_layers, spec.d_model
    formula = spec.vocab_size * h + spec.max_seq_len * h + n_layers * (12 * h**2 + 13 * h) + 2 * h
    assert spec.n_parameters == formula
    size = name.rpartition("-")[2]
    if size[:-1].replace(".", "").isdigit():
        unit = {"m": 1e6, "b": 1e9, "t": 1e12}[size[-1]]
        assert spec.n_parameters == pytest.approx(float(size[:-1]) * unit, rel=0.03)


@pytest.mark.parametrize("name", PRESETS)
def test_the_built_model_has_the_parameters_the_spec_counts(name: str) -> None:
    spec = resolve(name)
    with torch.device("meta"):
        model = Transformer(spec)
    # The load that a router remembers from the step before is no part of the model as others use it.
    counted = {name: p.numel() for name, p in model.named_parameters() if not name.endswith("router.load")}
    assert sum(counted.values()) == spec.n_parameters


LATENT = LatentAttentionSpec(q_rank=24, kv_rank=20, nope_dim=12, rope_dim=8, v_dim=16)
EXPERTS = MoESpec(n_experts=8, top_k=3, d_ffn=24, n_shared=1, first_dense=1)


def _rows_flops(x: tuple, weight: tuple, *_: object, **__: object) -> int:
    return 2 * x[0] * weight[1] * weight[2]


def _weights_flops(dy: tuple, x: tuple, *_: object, **__: object) -> int:
    return 2 * dy[0] * dy[1] * x[1]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"tied_embedding": True},
        {"qk_norm": True, "head_dim": 24},
        {"activation": "gelu_tanh", "norm": "layernorm", "positions": "learned", "bias": True},
        {"norm": "layernorm", "norm_bias": False, "parallel_branches": True, "qkv_bias": True, "nope_interval": 2},
        {"moe": EXPERTS},
        {"moe": replace(EXPERTS, bias=True, n_shared=1, d_shared=24, shared_gate=True), "norm_position": "both"},
        {"moe": EXPERTS, "activation": "gelu_tanh"},
        {"latent_attention": LATENT, "n_kv_heads": 4},
        {"latent_attention": replace(LATENT, q_rank=0), "n_kv_heads": 4},
    ],
)
def test_training_flops_are_those_counted_in_a_real_forward_and_backward(change: dict) -> None:
    torch.set_num_threads(1)
    spec = replace(resolve("debug"), n_layers=2, **change)
    model, seq_len = Transformer(spec), 32
    tokens_BT = torch.zeros(3, seq_len, dtype=torch.long)
    # The plain kernel is counted as the formula counts; a fused one computes QK^T again in the backward pass.
    ours = {
        torch.ops.shardwright.grouped_matmul: _rows_flops,
        torch.ops.shardwright.grouped_weight_gradient: _weights_flops,
    }
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False, custom_mapping=ours) as counter:
        model(tokens_BT).sum().backward()
    # Weighing and adding up what experts give is written as a product, and so are its two gradients.
    sums = 0 if spec.moe is None else 3 * 2 * spec.n_expert_layers * spec.moe.top_k * spec.d_model
    # Values narrower than keys are filled up with zeros for the kernel.
    zeros = 6 * spec.n_layers * spec.n_heads * (spec.qk_dim - spec.head_dim) * seq_len
    assert counter.get_total_flops() / tokens_BT.numel() == spec.train_flops_per_token(seq_len) + sums + zeros


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
        "high_freq_factor=1 is less than low_freq_factor=4",
        "original_max_seq_len: missing",
        "dropout=1 ",
        "norm_eps=0 ",
        "init_std=-0.1",
    ):
        assert word in text
    assert len(broken.problems()) == 10


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"head_dim": 15}, "head_dim=15 is odd"),
        ({"rope_theta": 1}, "rope_theta=1"),
        ({"rope_fraction": 0.2}, "rotates 3 of head_dim=16 elements, and rope turns pairs"),
        ({"rope_fraction": 0.05}, "rotates 0 of head_dim=16 elements"),
        ({"rope_fraction": 1.5}, "rope_fraction=1.5 is not a fraction of a head"),
    ],
)
def test_rope_needs_even_heads_and_a_base_above_one(change: dict, word: str) -> None:
    [problem] = replace(resolve("debug"), **change).problems()
    assert word in problem
    if "rope_fraction" not in change:
        assert not replace(resolve("debug"), **change, positions="learned").problems()


def test_a_rotated_fraction_goes_with_rotated_positions() -> None:
    [problem] = replace(resolve("debug"), rope_fraction=0.5, positions="learned").problems()
    assert "rope_fraction goes with positions='rope'" in problem


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"top_k": 9}, "moe.top_k=9 is more than moe.n_experts=8; valid: 1 to 8"),
        ({"top_k": 0}, "moe.top_k=0 is not positive; valid: 1 or more"),
        ({"top_k": 1}, "moe.top_k=1 with moe.normalise=true makes every weight 1"),
        ({"n_groups": 3}, "moe.n_groups=3 does not divide moe.n_experts=8 (8 = 3*2 + 2); valid: 1, 2, 4, 8"),
        ({"n_groups": 2, "groups_per_token": 3}, "moe.groups_per_token=3 is more than moe.n_groups=2; valid: 1 to 2"),
        (
            {"n_groups": 4, "groups_per_token": 1},
            "moe.groups_per_token=1 leaves a token 1 x 2 = 2 experts, fewer than moe.top_k=3; valid: 2 to 4",
        ),
        ({"first_dense": 4}, "moe.first_dense=4 leaves none of n_layers=4 layers with experts; valid: 0 to 3"),
        (
            {"capacity_factor": -1.0},
            "moe.capacity_factor=-1 is negative, and a capacity below one token drops everything; valid: 0 (off)",
        ),
        (
            {"capacity_factor": 0.01},
            "moe.capacity_factor=0.01 gives an expert room for 0.96 tokens of the longest sequence (0.01 * 256 * 3",
        ),
        ({"aux_loss": -0.1}, "moe.aux_loss=-0.1 is negative; valid: 0 (off) or more"),
        ({"score": "relu"}, "moe.score='relu' is not known; valid: softmax, sigmoid"),
        ({"weight_scale": 0.0}, "moe.weight_scale=0 is not positive"),
    ],
    ids=str,
)
def test_experts_that_do_not_fit_are_named_with_their_arithmetic(change: dict, said: str) -> None:
    [problem] = replace(resolve("debug"), moe=replace(EXPERTS, **change)).problems()
    assert said in problem


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"n_kv_heads": 2}, "n_kv_heads=2 with latent_attention, which makes keys and values for every query head"),
        ({"head_dim": 12}, "head_dim=12 is not latent_attention.v_dim=16; valid: 16"),
        ({"positions": "learned"}, "latent_attention needs positions='rope'; positions is 'learned'"),
        ({"qk_norm": True}, "qk_norm=true goes with plain attention"),
        ({"bias": True}, "bias=true goes with plain attention and networks"),
        ({"latent_attention": replace(LATENT, rope_dim=7)}, "latent_attention.rope_dim=7 is odd"),
        ({"latent_attention": replace(LATENT, kv_rank=0)}, "latent_attention.kv_rank=0 is not positive"),
        ({"latent_attention": replace(LATENT, rope_dim=2)}, "v_dim=16 is more than nope_dim + rope_dim = 14"),
    ],
    ids=str,
)
def test_latent_attention_that_does_not_fit_is_named(change: dict, said: str) -> None:
    [problem] = replace(resolve("debug"), **{"latent_attention": LATENT, "n_kv_heads": 4} | change).problems()
    assert said in problem


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_valid_model(name: str) -> None:
    assert resolve(name).problems() == []


def test_a_misspelt_preset_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'lama-3.1-8b' does not exist; did you mean 'llama-3.1-8b'\?"):
        resolve("lama-3.1-8b")


def test_every_field_says_what_it_means() -> None:
    for spec in (ModelSpec, RopeScaling, MoESpec, LatentAttentionSpec):
        assert all(text.endswith(".") for text in descriptions(spec).values())
    assert descriptions(ModelSpec)["d_model"] == "Width of the residual stream."


def test_sizes_and_presets_import_without_torch() -> None:
    code = "import sys, shardwright.model.spec, shardwright.model.presets; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"nope_interval": 2}, {"nope_layers": (3, 1)}),
        ({"window": 64, "global_interval": 2}, {"window": 64, "global_layers": (1, 3)}),
        ({"window": 64, "first_window": 1}, {"window": 64, "global_layers": (0,)}),
    ],
)
def test_an_interval_and_a_list_of_the_same_layers_are_one_model(one: dict, other: dict) -> None:
    spec = replace(PRESETS["debug"], n_layers=4)
    by_interval, by_list = replace(spec, **one), replace(spec, **other)
    assert not [*differences(by_interval, by_list), *differences(by_list, by_interval)]
    assert [key for key, *_ in differences(by_interval, spec) if key.endswith("_layers")]
    assert not [key for key, *_ in differences(spec, replace(spec, n_layers=8)) if key.endswith("e_layers")]
