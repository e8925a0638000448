"""Proves that the model and the batch which layouts are compared on are small, ragged, always the same, and can be
split in the ways in which the true ones can."""

import itertools
import math
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.config import OptimizerSection, RunConfig, parse
from shardwright.data.samples import IGNORE
from shardwright.layout.layout import Layout
from shardwright.model.lora_sizes import LoraSpec
from shardwright.model.presets import PRESETS, resolve
from shardwright.model.sections import MoESpec
from shardwright.model.spec import ModelSpec
from shardwright.split import stages
from shardwright.split.rules import problems
from shardwright.system.errors import InputError, LayoutError
from shardwright.verification import Case, Verifier, case_of, cut
from shardwright.verification.case import PLAIN_SGD
from shardwright.verification.cut_case import cut_each, cut_layout, cut_spec
from shardwright.verification.matrix import layouts
from shardwright.verification.reference import train_alone
from shardwright.verification.trace import TracedQuantity
from tests.distributed import run_ranks
from tests.marks import rest_prove
from tests.training.worlds import CASE, SPEC


def config(preset: str = "llama-3.1-8b", seq_len: int = 4096, **batch: int) -> RunConfig:
    table = {"seq_len": seq_len, "global_batch": 64} | batch
    return parse({"out": "x", "steps": 1, "data": {"path": "x"}, "model": {"preset": preset}, "batch": table})


def test_an_8b_model_is_cut_to_kilobytes():
    case = cut(case_of(config()), [Layout(dp_shard=2, tp=2, zero=3, sequence_parallel=False)])
    assert case.spec.n_parameters < 50_000
    assert (case.spec.n_heads, case.spec.n_kv_heads, case.seq_len) == (8, 4, 16)
    assert case.spec.vocab_size % 2, "an even vocabulary would hide what is wrong with uneven ones"
    assert case.accumulation(Layout(dp_shard=2, tp=2, zero=3, sequence_parallel=False)) == 2


def _windows(spec: ModelSpec) -> list[int]:
    return [spec.layer_window(layer) for layer in range(spec.n_layers)]


@pytest.mark.parametrize("preset", PRESETS)
def test_every_choice_of_the_model_is_kept(preset: str):
    whole = PRESETS[preset]
    small = cut_spec(whole, 8)
    for choice in (
        "norm",
        "activation",
        "positions",
        "rope_theta",
        "rope_scaling",
        "rope_fraction",
        "qk_norm",
        "qk_norm_whole",
        "qk_norm_heads",
        "norm_position",
        "parallel_branches",
        "norm_offset",
        "norm_bias",
        "embedding_scale",
        "residual_scale",
        "attention_scale",
        "logit_divisor",
        "qkv_bias",
        "o_bias",
        "window_rope_theta",
        "attention_sinks",
        "attention_gate",
        "attention_softcap",
        "logit_softcap",
        "bias",
        "tied_embedding",
    ):
        assert getattr(small, choice) == getattr(whole, choice)
    assert not small.problems()
    assert len(set(map(small.rotates, range(small.n_layers)))) == len(set(map(whole.rotates, range(whole.n_layers))))
    assert {window > 0 for window in _windows(small)} == {window > 0 for window in _windows(whole)}
    assert {*map(small.is_linear, range(small.n_layers))} == {*map(whole.is_linear, range(whole.n_layers))}
    assert (small.n_heads > small.n_kv_heads) == (whole.n_heads > whole.n_kv_heads)


@pytest.mark.parametrize("preset", ["debug-moe", "mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3"])
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_experts_are_few_and_every_choice_of_their_routing_is_kept(preset: str, world_size: int):
    spec = cut_spec(PRESETS[preset], world_size)
    whole, small = PRESETS[preset].moe, spec.moe
    assert whole is not None
    assert small is not None
    assert not spec.problems()
    assert spec.n_parameters < 500_000
    assert spec.n_layers > small.first_dense
    assert small.top_k < small.n_experts <= max(8, whole.n_experts // 16)
    for ep in range(1, world_size + 1):
        assert (small.n_experts % ep == 0) == (whole.n_experts % ep == 0)
        assert (small.d_ffn % ep == 0) == (whole.d_ffn % ep == 0)
    for choice in ("score", "normalise", "weight_scale", "capacity_factor", "bias_rate", "aux_loss", "aux_scope"):
        assert getattr(small, choice) == getattr(whole, choice)
    for part in ("n_shared", "first_dense"):
        assert bool(getattr(small, part)) == bool(getattr(whole, part))
    assert (small.groups_per_token < small.n_groups) == (whole.groups_per_token < whole.n_groups)
    assert (small.n_groups > 1) == (whole.n_groups > 1)


def test_gated_shared_experts_and_the_pattern_of_dense_layers_are_kept():
    moe = MoESpec(n_experts=16, top_k=2, d_ffn=64, n_shared=1, d_shared=192, shared_gate=True, dense_layers=(4, 9))
    for experts in (moe, replace(moe, dense_layers=(), interval=3)):
        small = cut_spec(replace(PRESETS["debug"], n_layers=24, moe=experts), 8)
        assert not small.problems()
        assert small.moe is not None
        assert small.moe.shared_gate
        assert small.moe.d_shared % 8 == 0
        assert list(map(small.has_experts, range(2))) == [False, True]


@given(
    size=st.integers(1, 12),
    groups=st.integers(1, 9),
    top_k=st.integers(1, 12),
    data=st.data(),
)
def test_any_experts_that_can_be_are_cut_to_some_that_can_be(size: int, groups: int, top_k: int, data: st.DataObject):
    per_token = data.draw(st.integers(1, groups))
    top_k = min(top_k, per_token * size)
    moe = MoESpec(
        n_experts=size * groups,
        top_k=top_k,
        d_ffn=64,
        normalise=top_k > 1,
        n_groups=groups,
        groups_per_token=per_token,
    )
    whole = replace(PRESETS["debug"], moe=moe)
    assert not whole.problems()
    small = cut_spec(whole, 8)
    assert not small.problems()
    assert small.moe is not None
    assert small.moe.n_experts <= moe.n_experts
    assert [small.moe.n_experts % ep == 0 for ep in range(1, 9)] == [moe.n_experts % ep == 0 for ep in range(1, 9)]


@pytest.mark.parametrize(
    "preset", ["debug", "smollm2-135m", "llama-3.1-8b", "gpt2", "qwen3-0.6b", "debug-moe", "mixtral-8x7b"]
)
@pytest.mark.parametrize("world_size", rest_prove([2, 3, 4, 6, 8], 3, 4))
def test_the_cut_model_has_the_layouts_of_the_true_one(preset: str, world_size: int):
    seq_len = min(1024, PRESETS[preset].max_seq_len)
    true = layouts(PRESETS[preset], world_size, seq_len)
    case = cut(case_of(config(preset, seq_len)), true)
    assert set(layouts(case.spec, world_size, case.seq_len)) == set(true)


@given(
    heads=st.integers(1, 40),
    kv_heads=st.integers(1, 8),
    d_ffn=st.integers(16, 300),
    seq_len=st.sampled_from([24, 60, 100, 256]),
)
def test_what_is_possible_at_the_true_size_is_possible_at_the_cut_one(
    heads: int, kv_heads: int, d_ffn: int, seq_len: int
):
    values = {"n_heads": heads * kv_heads, "n_kv_heads": kv_heads, "d_ffn": d_ffn, "vocab_size": 512}
    whole = parse(
        {
            "out": "x",
            "steps": 1,
            "data": {"path": "x"},
            "model": values,
            "batch": {"seq_len": seq_len, "global_batch": 8},
        }
    )
    case = cut(case_of(whole), [Layout(dp_replicate=8)])
    for tp, cp, method in itertools.product((1, 2, 4), (1, 2), ("zigzag", "ring", "ulysses")):
        layout = Layout(tp=tp, cp=cp, cp_method=method, sequence_parallel=True)
        found = bool(problems(case.spec, layout, case.seq_len))
        assert found == bool(problems(whole.model.spec(), layout, seq_len)), layout


def test_batches_are_ragged_and_a_function_of_seed_and_step():
    case = Case(SPEC, seq_len=10, global_batch=10, seed=3)
    (tokens, targets, ids), (again, _, _), (other, _, later) = case.batch(0), case.batch(0), case.batch(1)
    assert torch.equal(tokens, again)
    assert not torch.equal(tokens, other)
    assert [*ids.tolist(), *later.tolist()] == list(range(20))
    counted = sorted((targets != IGNORE).sum(1).tolist())
    assert counted[:4] == [0, 0, 1, 1]
    assert counted[-1] == 10
    assert len(set(counted)) >= 4


def test_a_run_without_accumulation_is_compared_with_it_where_the_batch_allows():
    layout = Layout(dp_replicate=4)
    assert cut(case_of(config(micro_batch=16)), [layout]).accumulation(layout) == 2
    assert cut(case_of(config(global_batch=4)), [layout]).accumulation(layout) == 1


@pytest.mark.parametrize(
    ("layout", "n_layers", "accumulation"),
    [
        (Layout(pp=2), 11, 3),
        (Layout(pp=4, dp_shard=2, zero=2), 11, 5),
        (Layout(pp=2, pp_schedule="interleaved-1f1b", virtual_stages=3), 11, 7),
        (Layout(pp=4, pp_schedule="zb-v"), 11, 9),
        (Layout(pp=8, pp_schedule="zb-v"), 17, 17),
        (Layout(pp=4, pp_schedule="dualpipe"), 11, 6),  # half of them enter at each end
    ],
    ids=str,
)
def test_a_pipeline_has_a_layer_10_and_uneven_stages_and_is_filled(layout: Layout, n_layers: int, accumulation: int):
    case = cut(case_of(config()), [layout])
    assert (case.spec.n_layers, case.accumulation(layout)) == (n_layers, accumulation)
    assert not problems(case.spec, layout, case.seq_len)
    counts = {len(layers) for layers in stages.stage_layers(case.spec, layout, case.seq_len)}
    assert len(counts) == 2, "all stages have as many layers"


def test_layers_and_microbatches_that_are_not_there_are_not_made_up():
    layout = Layout(pp=4)
    case = cut(case_of(config("debug", 128, global_batch=3)), [layout])  # a model of 4 layers
    assert (case.spec.n_layers, case.accumulation(layout)) == (4, 3)


def test_without_a_pipeline_nothing_has_become_larger():
    case = cut(case_of(config()), [Layout(dp_shard=2, zero=3)])
    assert (case.spec.n_layers, case.global_batch) == (2, 4)


def test_stages_without_a_layer_are_refused_in_the_same_words_as_at_the_true_size():
    for layout in (Layout(pp=5), Layout(pp=3, pp_schedule="dualpipe-v"), Layout(pp=6, pp_schedule="dualpipe")):
        whole = config("debug", 128)
        case = cut(case_of(whole), [layout, Layout(pp=2)])
        assert list(stages.problems(case.spec, layout)) == list(stages.problems(whole.model.spec(), layout)) != []


def cut_stage_layers(*given: tuple[int, ...]) -> list[tuple[int, ...] | None]:
    """What becomes of `stage_layers` of layouts that are compared, whose model has as many layers as the first says."""
    whole = config(global_batch=64).model_copy(
        update={"model": config().model.model_copy(update={"n_layers": sum(given[0])})}
    )
    layouts = [Layout(pp=len(counts), stage_layers=counts) for counts in given]
    case = cut(case_of(whole), layouts)
    found = [cut_layout(layout, case_of(whole), case).stage_layers for layout in layouts]
    if all(sum(counts) == sum(given[0]) for counts in given):
        assert {sum(counts or ()) for counts in found} == {case.spec.n_layers}
    return found


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ([(8, 8, 8, 8)], [(3, 3, 3, 3)]),
        ([(6, 8, 10, 8)], [(1, 2, 6, 2)]),
        ([(30, 2)], [(10, 1)]),
        ([(3, 1), (1, 3)], [(3, 1), (1, 3)]),  # of four layers there are no eleven
        ([(2, 2), (1, 3)], [(2, 2), (1, 3)]),
        ([(16, 16), (20, 12), (8, 8, 8, 8)], [(6, 6), (11, 1), (3, 3, 3, 3)]),
    ],
)
def test_stage_layers_are_cut_to_few_in_the_same_order(given: list, found: list):
    assert cut_stage_layers(*given) == found


@given(st.lists(st.integers(1, 9), min_size=2, max_size=6).map(tuple), st.randoms())
def test_any_stage_layers_keep_their_order(counts: tuple[int, ...], random: Random):
    shuffled = list(counts)
    random.shuffle(shuffled)
    for before, after in zip((counts, tuple(shuffled)), cut_stage_layers(counts, tuple(shuffled)), strict=True):
        assert after is not None
        for one, other in itertools.combinations(range(len(before)), 2):
            assert (before[one] < before[other]) == (after[one] < after[other])
            assert (before[one] > before[other]) == (after[one] > after[other])


@pytest.mark.parametrize(("given", "found"), [(4, 2), (3, 1), (1, 1), (9, 9)])
def test_layers_that_recompute_are_cut_to_all_where_all_did_and_to_some_where_some_did(given: int, found: int):
    whole, layout = config("debug", 128), Layout(recompute="full", recompute_layers=given)
    case = cut(case_of(whole), [layout])
    assert (case_of(whole).spec.n_layers, case.spec.n_layers) == (4, 2)
    assert cut_layout(layout, case_of(whole), case).recompute_layers == found


def test_stage_layers_that_are_not_those_of_the_model_are_refused_and_not_mended():
    whole, layout = config("debug", 128), Layout(pp=2, stage_layers=(1, 2))
    case = cut(case_of(whole), [layout])
    same = cut_layout(layout, case_of(whole), case)
    assert same == layout
    with pytest.raises(LayoutError, match=r"are 2 stages of 3 layers.*the model has 4 layers"), Verifier() as verifier:
        verifier.parity(case, same)


def test_an_unknown_dtype_names_the_nearest():
    with pytest.raises(InputError, match="did you mean 'bfloat16'"):
        Case(SPEC, seq_len=10, global_batch=2, dtype="bf16")


def test_gradients_are_clipped_to_just_below_their_norm_to_more_and_to_far_less(tmp_path: Path):
    (trace,) = run_ranks(train_alone, 1, Case(SPEC, seq_len=10, global_batch=4), tmp_path)
    for training in (PLAIN_SGD, "adamw"):
        norms = [trace.scalars[TracedQuantity("grad norm", training, step)] for step in (1, 2, 3)]
        shares = [limit / norm for limit, norm in zip(trace.clip_norms[training], norms, strict=True)]
        assert shares == pytest.approx([0.7, 2.0, 0.1])
    # With SGD the limits are a thousand times larger, and smaller, than in runs.
    assert trace.clip_norms[PLAIN_SGD][0] > 1000
    assert trace.clip_norms[PLAIN_SGD][2] < 0.001


def test_a_run_without_clipping_is_verified_without(tmp_path: Path):
    case = Case(SPEC, seq_len=10, global_batch=4, optimizer=OptimizerSection(clip_norm=0.0))
    (trace,) = run_ranks(train_alone, 1, case, tmp_path)
    assert set(trace.clip_norms[PLAIN_SGD] + trace.clip_norms["adamw"]) == {math.inf}


def test_rates_are_those_of_the_schedule_shortened():
    whole = parse(
        {
            "out": "x",
            "steps": 1000,
            "data": {"path": "x"},
            "model": {"preset": "debug"},
            "batch": {"seq_len": 32, "global_batch": 8},
            "optimizer": {"lr": 1.0},
            "lr_schedule": {"shape": "wsd", "warmup_steps": 200, "decay_steps": 300, "final_fraction": 0.0},
        }
    )
    assert case_of(whole, steps=10, lr_schedule=True).rates == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 2 / 3, 1 / 3, 0])
    assert case_of(whole, steps=10).rates == ()


def test_a_matrix_has_many_layers_only_where_there_are_stages():
    pairs = cut_each(case_of(config()), [Layout(dp_replicate=2), Layout(pp=2), Layout(tp=2)])
    assert [case.spec.n_layers for case, _ in pairs] == [2, 11, 2]


def test_a_module_without_a_target_in_the_evaluated_batch_is_equal_on_both_sides(verifier: Verifier):
    spec = replace(CASE.spec, n_layers=1, mtp_modules=1)
    short = replace(CASE, spec=spec, seq_len=4, global_batch=1, micro_batch=1, steps=1)

    def n_targets_of_the_module(case: Case) -> int:
        counts_T = case.batch(case.steps)[1][0] != IGNORE
        return int((counts_T[:-1] & counts_T[1:]).sum())

    cases = (replace(short, seed=seed) for seed in range(50))
    case = next(each for each in cases if not n_targets_of_the_module(each))
    report = verifier.parity(case, Layout())
    assert report.equal, report.worst
    assert 0.0 in {row.error for row in report.rows if row.quantity.kind == "mtp evaluation"}


@pytest.mark.parametrize("rslora", [False, True])
def test_adapters_have_a_lower_rank_with_the_same_scale(rslora: bool):
    lora = LoraSpec(rank=64, alpha=32.0, rslora=rslora)
    small = cut_spec(replace(resolve("llama-3.1-8b"), lora=lora), 2)
    assert small.lora is not None
    assert small.lora.rank == 3
    assert small.lora.scale == pytest.approx(lora.scale)
    assert small.lora_problems() == []
