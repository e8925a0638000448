"""Proves what a layer keeps for its backward pass: the published formulas, and what autograd saves of the built model.

Symbols of the formulas: s tokens of a sequence, b sequences, h d_model, a heads, t tp.
"""

import csv
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from shardwright.cost import activations, ledger, memory
from shardwright.cost.blocks import blocks
from shardwright.cost.job import Candidates, Job
from shardwright.cost.stack import FSDP, FSDP_COMPILED, MEGATRON, MEGATRON_CORE, SHARDWRIGHT
from shardwright.dry_run.program import fused_norms
from shardwright.layout.keys import KEYS, RECOMPUTE_MODULES
from shardwright.layout.layout import Layout
from shardwright.model.device_type import assumed
from shardwright.model.linear_sizes import LinearAttentionSpec
from shardwright.model.presets import resolve
from shardwright.model.sections import LatentAttentionSpec
from shardwright.model.spec import ModelSpec
from shardwright.system.units import GiB
from tests.cost.layouts import GPT, job, one
from tests.model.kept import saved_bytes

DEFAULT_PARTS = KEYS["recompute_modules"].default
CSV = Path(__file__).parents[2] / "src/shardwright/planner/measured/korthikanti_activation_memory.csv"
S, B, H, A = 2048, 4, GPT.d_model, GPT.n_heads
SQUARE = 5 * A * S / H


def last_layer(job: Job, candidates: Candidates) -> activations.LayerActivations:
    """The last layer, which has experts where the model does."""
    return activations.layer(job, candidates, list(blocks(job.model))[-1])


@pytest.mark.parametrize(
    ("tp", "sequence_parallel", "recompute", "expected"),
    [
        (1, False, "none", 34 + SQUARE),
        (8, False, "none", 10 + 24 / 8 + SQUARE / 8),
        (8, True, "none", (34 + SQUARE) / 8),
        (8, False, "selective", 10 + 24 / 8),
        (8, True, "selective", 34 / 8),
        (8, False, "full", 2),
        (8, True, "full", 2 / 8),
    ],
)
def test_a_gpt_layer_keeps_what_table_2_of_korthikanti_says(tp: int, sequence_parallel: bool, recompute: str, expected):
    candidates = one(B, recompute, tp=tp, sequence_parallel=sequence_parallel)
    kept = last_layer(job(GPT, MEGATRON, S), candidates).kept[0]
    assert kept == pytest.approx(expected * S * B * H, rel=1e-12)


def test_weight_gradients_alone_need_32_sbh_as_zero_bubble_counts():
    waiting = last_layer(job(GPT, MEGATRON, S), one(B)).waiting[0]
    assert waiting == pytest.approx(32 * S * B * H, rel=1e-12)


def test_fused_attention_keeps_a_number_for_each_head_and_token_instead_of_the_square():
    stored, fused = (
        last_layer(job(GPT, stack, S), one(B)).kept[0] for stack in (MEGATRON, replace(MEGATRON, flash_attention=True))
    )
    assert fused == pytest.approx(34 * S * B * H + 4 * A * S * B)
    assert stored - fused == pytest.approx((SQUARE * H - 4 * A) * S * B)


def figure(number: int) -> list[dict[str, str]]:
    with CSV.open() as file:
        return [row for row in csv.DictReader(file) if row["kind"].startswith(f"fig{number}")]


# Sequences of a microbatch, pp, stages of a rank (Korthikanti et al., table 3); tp is 8.
RUNS = {"22B": (4, 1, 1), "175B": (1, 8, 3), "530B": (1, 35, 3), "1T": (1, 64, 1)}


@pytest.mark.parametrize("row", figure(1), ids=lambda row: f"{row['model']} {row['kind']} {row['mode']}")
def test_memory_is_that_of_figure_1_of_korthikanti(row: dict[str, str]):
    micro_batch, pp, virtual = RUNS[row["model"]]
    schedule = "interleaved-1f1b" if virtual > 1 else "1f1b"
    lean = row["mode"] == "seqsel"
    spec = replace(resolve(f"gpt-{row['model'].lower()}"), dropout=0.1)
    layers = (spec.n_layers // (pp * virtual),) * pp * virtual if pp > 1 else None
    candidates = one(
        micro_batch,
        "selective" if lean else "none",
        tp=8,
        pp=pp,
        pp_schedule=schedule,
        virtual_stages=virtual,
        stage_layers=layers,
        sequence_parallel=lean,
    )
    kinds = memory.estimate_memory(job(spec, MEGATRON, S, 32 * pp * micro_batch), candidates).kinds
    if row["kind"] == "fig1_activations_GiB":
        # Without what dropout after the embedding keeps, of as many microbatches as there are ranks.
        masks = pp * S * micro_batch * spec.d_model / (8 if lean else 1)
        found = kinds["activations"][0, 0] - masks
    else:
        # The figure counts layers alone, as a rank in the middle of a pipeline has them, and 18 bytes a parameter.
        on_rank = {kind: values[0, pp // 2] for kind, values in kinds.items()}
        found = sum(on_rank[kind] for kind in ("weights", "master", "optimizer")) * 18 / 14
    assert found / GiB == pytest.approx(float(row["value"]), rel=0.02)


@pytest.mark.parametrize("row", figure(7), ids=lambda row: f"{row['model']} {row['mode']}")
def test_shares_are_those_of_figure_7_of_korthikanti(row: dict[str, str]):
    mode = row["mode"]
    spec = replace(resolve(f"gpt-{row['model'].lower()}"), dropout=0.1)
    recompute = "selective" if "selective" in mode else "full" if mode == "full" else "none"
    candidates = one(RUNS[row["model"]][0], recompute, tp=8, sequence_parallel="SP" in mode)
    baseline = one(RUNS[row["model"]][0], "none", tp=8)
    found, whole = (last_layer(job(spec, MEGATRON, S), each).kept[0] for each in (candidates, baseline))
    assert 100 * found / whole == pytest.approx(float(row["value"]), rel=0.02)


def test_torchtitan_keeps_every_second_product_and_attention():
    spec = resolve("llama-3.1-8b")
    q, kv, f = 4096, 1024, 14336
    read = last_layer(job(spec, FSDP_COMPILED, 8192), one(2, "selective", dp_shard=8, zero=3)).kept[0]
    listed = last_layer(job(spec, FSDP, 8192), one(2, "selective", dp_shard=8, zero=3)).kept[0]
    assert read == 2 * 8192 * 2 * (4096 + q + kv + q + f), "the block's input, q, v, attention, gate"
    assert listed - read == 2 * 8192 * 2 * 4096, "what down gives, which no one reads"


def test_experts_keep_rows_for_every_choice_of_a_token():
    spec = resolve("deepseek-v3")
    layer = last_layer(job(spec, MEGATRON_CORE), one(dp_shard=8, zero=1, ep=8))
    assert layer.experts[0] == 4096 * 8 * 7168 * 2
    assert layer.kept[0] > layer.experts[0] + 4096 * 8 * 3 * 2048 * 2


def debug(**changes: object) -> ModelSpec:
    return replace(resolve("debug"), **{"norm": "layernorm"} | changes)  # type: ignore[arg-type]


def offset(**changes: object) -> ModelSpec:
    return debug(**{"norm": "rmsnorm", "norm_offset": True, "norm_position": "both"} | changes)


def with_experts(**changes: object) -> ModelSpec:
    spec = replace(resolve("debug-moe"), norm="layernorm")
    assert spec.moe is not None
    return replace(spec, moe=replace(spec.moe, **changes))  # type: ignore[arg-type]


SMALL = {
    "llama": debug(),
    "gpt": debug(n_kv_heads=4, activation="gelu_tanh", positions="learned", bias=True),
    "norms of heads": debug(norm_bias=False, qk_norm=True, qk_norm_heads=True),
    "parallel branches": debug(norm_bias=False, parallel_branches=True),
    "mixture": replace(resolve("debug-moe"), norm="layernorm"),
    "gated shared experts": with_experts(n_shared=1, shared_gate=True),
    "biased experts": replace(with_experts(bias=True, d_ffn=128), activation="swiglu_clamped"),
    "linear": debug(
        linear_attention=LinearAttentionSpec(n_k_heads=2, n_v_heads=4, k_dim=12, v_dim=16, full_interval=0),
    ),
    "gated attention": debug(attention_gate=True),
    "norms with an offset": offset(),
    "norms of heads with an offset": offset(norm_position="after", qk_norm=True),
    "latent": debug(
        n_kv_heads=4,
        latent_attention=LatentAttentionSpec(kv_rank=32, q_rank=48, nope_dim=16, rope_dim=8, v_dim=16),
    ),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", SMALL)
def test_a_layer_keeps_what_autograd_saves(name: str, precision: str):
    spec = SMALL[name]
    found = saved_by_last_layer(spec, precision)
    formula = last_layer(job(spec, SHARDWRIGHT, 64, 2, precision), one(2)).kept[0]
    # Means, variances, indices and counts are not in the formula.
    assert formula == pytest.approx(found, rel=0.02)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "parts", [*((part,) for part in RECOMPUTE_MODULES), DEFAULT_PARTS, RECOMPUTE_MODULES], ids="+".join
)
@pytest.mark.parametrize("name", SMALL)
def test_a_layer_keeps_less_by_what_autograd_saves_less(name: str, parts: tuple[str, ...], precision: str):
    spec = SMALL[name]
    layouts = Layout(), Layout(recompute="selective", recompute_modules=parts)
    every, some = (saved_by_last_layer(spec, precision, each) for each in ((), parts))
    the_job = job(spec, SHARDWRIGHT, 64, 2, precision)
    kept, less = (last_layer(the_job, Candidates.from_layout(each, 2)).kept[0] for each in layouts)
    # A mean and a deviation of a token and norm, which are not in the formula.
    statistics = 128 * 4 * 6 if "norms" in parts else 0
    statistics += 128 * 8 * (spec.n_heads + spec.n_kv_heads) if spec.qk_norm and "rope" in parts else 0
    assert kept - less == pytest.approx(every - some, abs=statistics)


def saved_by_last_layer(spec: ModelSpec, precision: str, parts: tuple[str, ...] = ()) -> int:
    """Bytes that autograd saves of the last layer; in fp32 with keys and values for all heads, as on a GPU. A norm
    with an offset saves as on a GPU."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    with assumed("cuda") if precision == "fp32" or spec.norm_offset else nullcontext(), fused_norms():
        few, many = (saved_bytes(replace(spec, n_layers=n), dtype, parts) for n in (2, 3))
    return many - few


def test_scores_with_a_soft_cap_are_in_memory_where_no_kernel_caps_them():
    """gemma2-2b: 8 heads; every second layer has a window of 4096 tokens. A kernel of a GPU caps the scores of 16 bits,
    except in the steps of a ring."""
    spec, seq_len = resolve("gemma2-2b"), 8192
    for block in blocks(spec):
        working, kept = [], []
        for in_kernel in (False, True):
            with ledger.record() as entries:
                of_stack = job(spec, replace(SHARDWRIGHT, scores_in_kernel=in_kernel), seq_len)
                kept.append(activations.layer(of_stack, one(2, tp=2, cp=2), block).kept[0])
            working += [entry.value for entry in entries if entry.what == "working of attention"]
        assert working[0] - working[1] == 3 * 4 * 512 * (seq_len / 2) * 8 / 2
        assert kept[0] == kept[1]
        for precision, in_memory_bytes in ("bf16", []), ("fp32", [3 * 4 * 512 * seq_len * 8 / 2]):
            with ledger.record() as entries:
                of_type = replace(job(spec, SHARDWRIGHT, seq_len), precision=precision)
                activations.layer(of_type, one(2, tp=2), replace(block, window=0))
            assert [entry.value for entry in entries if entry.what == "scores in rows"] == in_memory_bytes
    usp = Layout(cp=4, cp_method="usp", ulysses_degree=2)
    both = replace(one(), shared=usp).take(np.zeros(3, dtype=int))
    both = replace(both, cp=np.array([4, 2, 4]))  # rings of 2, 1 and 2 ranks
    assert job(spec, SHARDWRIGHT, seq_len).scores_in_memory(both, 0).tolist() == [1, 0, 1]
    windowed = next(block for block in blocks(spec) if block.window)
    with ledger.record() as entries:
        activations.layer(job(spec, SHARDWRIGHT, 8 * seq_len), one(cp=2), windowed)
    (scores,) = (entry.value for entry in entries if entry.what == "scores in rows")
    assert scores == 3 * 4 * 512 * (4096 - 1 + 512) * 8
