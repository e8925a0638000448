"""Proves that a layout of many ranks is reduced to few with every axis and choice it has, and that this is said."""

from itertools import combinations

import pytest

from shardwright.layout.box import DENSE_AXES
from shardwright.layout.keys import KEYS
from shardwright.layout.layout import Layout
from shardwright.model.presets import PRESETS
from shardwright.split.rules import problems
from shardwright.system.errors import LayoutError
from shardwright.verification import Case
from shardwright.verification.reduce import reduced

DEGREES = {*DENSE_AXES, "ep", "ulysses_degree", "stage_layers"}


def used(layout: Layout) -> set[str]:
    return {axis for axis in (*DENSE_AXES, "ep") if layout.degree(axis) > 1}


@pytest.mark.parametrize(
    ("preset", "layout", "axes"),
    [
        ("llama-3.1-70b", Layout(tp=8, pp=4, dp_shard=16, zero=1, pp_schedule="zb-h1"), {"tp": 2, "pp": 4}),
        ("llama-3.1-405b", Layout(tp=8, pp=16, dp_shard=128), {"tp": 2, "pp": 2, "dp_shard": 2}),
        ("llama-3.1-8b", Layout(dp_replicate=96), {"dp_replicate": 2}),
        ("llama-3.1-8b", Layout(dp_shard=81, tp=2), {"dp_shard": 3, "tp": 2}),
        ("deepseek-v3", Layout(pp=16, dp_shard=64, ep=64, pp_schedule="dualpipe-v", zero=1), {"ep": 2, "pp": 2}),
        ("llama-3.1-8b", Layout(cp=16, cp_method="usp", ulysses_degree=4, dp_shard=16), {"cp": 4, "dp_shard": 2}),
        ("llama-3.1-8b", Layout(pp=4, dp_replicate=32, stage_layers=(6, 8, 10, 8)), {"pp": 4}),
    ],
    ids=str,
)
def test_each_axis_has_fewer_ranks_and_each_choice_is_kept(preset: str, layout: Layout, axes: dict[str, int]):
    case = Case(PRESETS[preset], 8192, 2592)
    ((small, few),), why = reduced(case, layout, 16)
    assert few.world_size <= 16
    assert used(few) == used(layout)
    assert {axis: few.degree(axis) for axis in axes} == axes
    assert {name: getattr(few, name) for name in KEYS if name not in DEGREES} == {
        name: getattr(layout, name) for name in KEYS if name not in DEGREES
    }
    assert not problems(small.spec, few, small.seq_len)
    assert small.shares(few)
    assert f"{layout.world_size} ranks and this machine holds 16" in why
    for axis in DENSE_AXES:
        changed = few.degree(axis) != layout.degree(axis)
        assert (f"{axis} {layout.degree(axis)} to {few.degree(axis)}" in why) == changed


def test_of_too_many_axes_any_two_meet_in_one_layout():
    layout = Layout(tp=2, dp_shard=16, dp_replicate=2, cp=4, pp=4, ep=8, zero=2)
    pairs, why = reduced(Case(PRESETS["qwen3-30b-a3b"], 8192, 2048), layout, 16)
    assert all(few.world_size <= 16 for _, few in pairs)
    met = {two for _, few in pairs for two in combinations(sorted(used(few)), 2)}
    assert met == set(combinations(sorted(used(layout)), 2))
    assert "5 layouts, each without one axis" in why


def test_kv_heads_that_are_replicated_still_are():
    ((small, few),), _ = reduced(Case(PRESETS["llama-3.1-70b"], 8192, 64), Layout(tp=16, dp_shard=8), 16)
    assert few.tp > small.spec.n_kv_heads


def test_stages_keep_the_order_of_their_layers():
    layout = Layout(pp=8, dp_shard=8, stage_layers=(3, 4, 4, 4, 4, 4, 4, 5))
    ((small, few),), _ = reduced(Case(PRESETS["llama-3.1-8b"], 8192, 64), layout, 8)
    assert few.stage_layers is not None
    assert few.stage_layers[0] < few.stage_layers[-1]
    assert sum(few.stage_layers) == small.spec.n_layers


def test_a_layout_that_the_true_model_cannot_have_is_refused():
    with pytest.raises(LayoutError, match="tp=7 does not divide 32 query heads"):
        reduced(Case(PRESETS["llama-3.1-8b"], 8192, 64), Layout(tp=7, dp_shard=16), 16)


def test_a_machine_that_holds_too_few_says_so():
    layout = Layout(tp=2, dp_shard=16, cp=4, pp=4)
    with pytest.raises(LayoutError, match="16 with the fewest of each axis; this machine holds 4"):
        reduced(Case(PRESETS["llama-3.1-8b"], 8192, 64), layout, 4)
