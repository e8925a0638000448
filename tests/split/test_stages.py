"""Proves which layers each pipeline stage has, what is said where they cannot be cut, and what its actions cost."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.layout.layout import Layout
from shardwright.model.spec import ModelSpec
from shardwright.split.stages import problems, schedule_problems, stage_layers, stage_times
from tests.training.worlds import SPEC

EIGHT = replace(SPEC, n_layers=8, vocab_size=64)
LARGE_HEAD = replace(EIGHT, vocab_size=2048)


def counts(spec: ModelSpec, layout: Layout, seq_len: int = 16) -> list[int]:
    return [len(layers) for layers in stage_layers(spec, layout, seq_len)]


def test_layers_are_dealt_out_in_order():
    assert stage_layers(EIGHT, Layout(pp=2, stage_layers=(5, 3)), 16) == (range(5), range(5, 8))


def test_a_small_head_leaves_stages_even_and_a_large_one_takes_the_place_of_layers():
    assert counts(EIGHT, Layout(pp=4)) == [2, 2, 2, 2]
    # The head's 2048 x 24 weights are those of 11 layers of 4,416.
    assert counts(LARGE_HEAD, Layout(pp=4)) == [2, 2, 3, 1]
    assert counts(LARGE_HEAD, Layout(pp=2)) == [7, 1]


def test_a_module_of_multi_token_prediction_is_in_the_last_stage_and_takes_the_place_of_layers():
    spec = replace(EIGHT, mtp_modules=1)
    assert stage_layers(spec, Layout(pp=2, stage_layers=(5, 3)), 16) == (range(5), range(5, 9))
    assert stage_layers(spec, Layout(pp=2), 16) == (range(5), range(5, 9))
    # A layer, the projection and the head again.
    module = spec.layer_matmul_parameters(0) + 2 * spec.d_model**2 + spec.vocab_size * spec.d_model
    without, with_module = (work(each, Layout(), 1)[0] for each in (EIGHT, spec))
    assert with_module - without == pytest.approx(6 * module + 3 * 24 * 2)


def test_layers_left_over_go_to_late_stages_that_hold_fewer_activations_but_not_to_the_head():
    assert counts(replace(EIGHT, n_layers=10), Layout(pp=4)) == [2, 3, 3, 2]


def work(spec: ModelSpec, layout: Layout, seq_len: int) -> list[float]:
    """FLOPs of a token in each stage, all passes together."""
    times = stage_times(spec, layout, seq_len).times_by_stage(layout.n_stages)
    return [sum(times[op][stage] for op in ("F", "I", "W")) for stage in range(layout.n_stages)]  # type: ignore[index]


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (total,)
        return
    for first in range(1, total - parts + 2):
        for rest in compositions(total - first, parts - 1):
            yield first, *rest


@given(st.integers(2, 4), st.integers(0, 6), st.integers(8, 4000), st.integers(1, 64))
def test_no_other_split_has_less_work_in_the_stage_with_most(pp: int, more: int, vocab_size: int, seq_len: int):
    spec = replace(SPEC, n_layers=pp + more, vocab_size=vocab_size)
    found = counts(spec, Layout(pp=pp), seq_len)
    assert sum(found) == spec.n_layers
    assert min(found) >= 1
    splits = [Layout(pp=pp, stage_layers=each) for each in compositions(spec.n_layers, pp)]
    # From the most work down, so that the stages below the first are as even as they can be too.
    best = min(sorted(work(spec, split, seq_len), reverse=True) for split in splits)
    assert sorted(work(spec, Layout(pp=pp), seq_len), reverse=True) == pytest.approx(best, abs=3 * spec.d_model), (
        "but for what the embedding moves"
    )


def test_what_all_stages_compute_is_what_the_model_computes():
    for layout in (Layout(pp=4), Layout(pp=2, stage_layers=(7, 1)), Layout(pp=2, pp_schedule="zb-v")):
        assert sum(work(EIGHT, layout, 16)) == pytest.approx(EIGHT.train_flops_per_token(16, causal=True), rel=1e-12)


def test_weights_cost_as_much_in_each_pass_and_attention_twice_as_much_in_the_backward_pass():
    times = stage_times(EIGHT, Layout(pp=2, stage_layers=(7, 1)), 16).times_by_stage(2)
    layer = 2 * (2 * 24 * 8 * (3 + 1) + 3 * 24 * 40)
    square, head = 2 * 3 * 8 * 16, 2 * 64 * 24
    assert times["F"] == (7 * (layer + square), layer + square + head)
    assert times["I"] == (7 * (layer + 2 * square), layer + 2 * square + head)
    assert times["W"] == (7 * layer, layer + head)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (
            Layout(pp=9),
            "layout.pp=9, layout.pp_schedule='1f1b' make 9 stages, more than the 8 layers (model.n_layers), and each "
            "needs one; valid: layout.pp from 1 to 8 with this schedule",
        ),
        (
            Layout(pp=4, pp_schedule="interleaved-1f1b", virtual_stages=3),
            "layout.pp=4, layout.pp_schedule='interleaved-1f1b', layout.virtual_stages=3 make 12 stages, more than the "
            "8 layers (model.n_layers), and each needs one; valid: layout.pp from 1 to 2 with this schedule",
        ),
        (
            Layout(pp=6, pp_schedule="zb-v"),
            "layout.pp=6, layout.pp_schedule='zb-v' make 12 stages, more than the 8 layers (model.n_layers), and each "
            "needs one; valid: layout.pp from 1 to 4 with this schedule",
        ),
        (
            Layout(pp=10, pp_schedule="dualpipe"),
            "layout.pp=10, layout.pp_schedule='dualpipe' make 10 stages, more than the 8 layers (model.n_layers), and "
            "each needs one; valid: layout.pp from 1 to 8 with this schedule",
        ),
        (
            Layout(pp=2, stage_layers=(4, 5)),
            "layout.stage_layers=[4, 5] are 2 stages of 9 layers; layout.pp=2, layout.pp_schedule='1f1b' make 2 "
            "stages, of at least one each, and the model has 8 layers; valid: [4, 4], or leave it out",
        ),
        (
            Layout(pp=2, stage_layers=(3, 3, 2)),
            "layout.stage_layers=[3, 3, 2] are 3 stages of 8 layers; layout.pp=2, layout.pp_schedule='1f1b' make 2 "
            "stages, of at least one each, and the model has 8 layers; valid: [4, 4], or leave it out",
        ),
        (
            Layout(pp=2, stage_layers=(8, 0)),
            "layout.stage_layers=[8, 0] are 2 stages of 8 layers; layout.pp=2, layout.pp_schedule='1f1b' make 2 "
            "stages, of at least one each, and the model has 8 layers; valid: [4, 4], or leave it out",
        ),
    ],
)
def test_what_cannot_be_cut_is_told_with_its_arithmetic_and_what_can(layout: Layout, words: str):
    assert list(problems(EIGHT, layout)) == [words]


def test_what_can_be_cut_has_no_problem():
    for layout in (Layout(), Layout(pp=8), Layout(pp=4, pp_schedule="dualpipe-v"), Layout(pp=2, stage_layers=(7, 1))):
        assert list(problems(EIGHT, layout)) == []


def test_a_number_of_microbatches_that_a_schedule_does_not_take_is_told_with_where_it_comes_from():
    (problem,) = schedule_problems(Layout(pp=2, pp_schedule="dualpipe"), 3)
    assert problem == (
        "layout.pp_schedule: dualpipe: microbatches=3 is odd, and half of them enter at each end; nearest: 2 or 4 "
        "(microbatches = batch.global_batch / (batch.micro_batch x data ranks) = 3)"
    )
    assert schedule_problems(Layout(pp=2), 3) == schedule_problems(Layout(), 3) == []
