"""Proves the rank arithmetic: coordinates invert, groups partition the world, tp is innermost, bad degrees say why."""

import re
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.layout.box import DENSE_AXES, EXPERT_AXES
from shardwright.layout.layout import Layout, accumulation
from shardwright.system.errors import LayoutError

degree = st.integers(1, 4)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    degrees = draw(
        st.fixed_dictionaries(dict.fromkeys(DENSE_AXES, degree)).filter(lambda axes: prod(axes.values()) <= 256)
    )
    fold = degrees["dp_shard"] * degrees["cp"] * degrees["tp"]
    ep = draw(st.sampled_from([d for d in range(1, fold + 1) if fold % d == 0]))
    if degrees["dp_shard"] > 1:
        zero = draw(st.integers(1, 3))
    else:
        zero = 0 if degrees["dp_replicate"] > 1 else draw(st.integers(0, 3))
    return Layout(**degrees, ep=ep, zero=zero)


def test_eight_ranks_of_dp2_and_tp2_and_pp2_stand_where_the_picture_says():
    layout = Layout(pp=2, dp_shard=2, tp=2, zero=1, sequence_parallel=False)
    assert layout.groups("tp") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert layout.groups("dp_shard") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert layout.groups("pp") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert layout.coordinates(6)["pp"] == 1
    assert layout.coordinates(6)["dp_shard"] == 1
    assert layout.coordinates(6)["tp"] == 0


def test_expert_groups_are_neighbours_across_dp_cp_and_tp():
    layout = Layout(dp_shard=2, tp=2, ep=4, zero=1, sequence_parallel=False)
    assert layout.groups("ep") == [(0, 1, 2, 3)]
    assert layout.expert_dp_shard == 1
    assert Layout(dp_shard=4, tp=2, ep=4, zero=1, sequence_parallel=False).groups("expert_dp_shard") == [
        (0, 4),
        (1, 5),
        (2, 6),
        (3, 7),
    ]


@given(layouts())
def test_coordinates_invert(layout: Layout):
    for rank in range(layout.world_size):
        here = layout.coordinates(rank)
        assert layout.rank_at(here) == rank
        assert all(0 <= here[axis] < layout.degree(axis) for axis in (*DENSE_AXES, *EXPERT_AXES))


@given(layouts(), st.data())
def test_groups_of_any_axes_partition_the_world(layout: Layout, data: st.DataObject):
    box = data.draw(st.sampled_from([DENSE_AXES, EXPERT_AXES]))
    axes = data.draw(st.lists(st.sampled_from(box), unique=True))
    groups = layout.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
    for group in groups:
        held = [axis for axis in box if axis not in axes]
        assert len({tuple(layout.coordinates(rank)[axis] for axis in held) for rank in group}) == 1
        assert all(layout.group_of(rank, *axes) == group for rank in group)


@given(layouts())
def test_tp_is_innermost_and_pp_outermost(layout: Layout):
    for group in layout.groups("tp"):
        assert group == tuple(range(group[0], group[0] + layout.tp))
    stage = layout.world_size // layout.pp
    for rank in range(layout.world_size):
        assert layout.coordinates(rank)["pp"] == rank // stage


@given(layouts())
def test_data_ranks_number_the_parts_of_a_batch(layout: Layout):
    seen = {layout.data_rank(rank) for rank in range(layout.world_size)}
    assert seen == set(range(layout.data_ranks))


@given(layouts())
def test_the_two_boxes_hold_the_same_number_of_ranks(layout: Layout):
    expert = layout.pp * layout.dp_replicate * layout.expert_dp_shard * layout.ep
    assert expert == layout.world_size


@pytest.mark.parametrize(
    ("degrees", "said"),
    [
        ({"dp_shard": 0}, "layout.dp_shard=0: 1 or more is needed"),
        ({"zero": 4}, "layout.zero=4: not one of the choices; valid: 0, 1, 2, 3"),
        ({"dp_shard": 2, "zero": 0}, "set zero to 1, 2 or 3, or dp_replicate=2 and dp_shard=1"),
        ({"dp_replicate": 2, "zero": 2}, "set dp_shard=2 and dp_replicate=1, or zero=0"),
        (
            {"dp_shard": 4, "zero": 1, "ep": 3},
            "layout.ep=3 does not divide dp_shard x cp x tp = 4 x 1 x 1 = 4",
        ),
    ],
)
def test_a_layout_that_cannot_exist_says_the_rule_and_the_way_out(degrees: dict, said: str):
    with pytest.raises(LayoutError) as error:
        Layout(**degrees)
    assert said in str(error.value)


def test_degrees_that_do_not_multiply_to_the_world_are_refused():
    with pytest.raises(LayoutError, match=r"needs 4 ranks \(dp_shard 4\), but 3 processes were started"):
        Layout(dp_shard=4, zero=3).check_world(3)


def test_a_batch_is_a_whole_number_of_rounds_or_the_arithmetic_is_shown():
    assert accumulation(24, micro_batch=4, data_ranks=2) == 3
    with pytest.raises(LayoutError, match=r"= 8 \(10 = 8\*1 \+ 2\); nearest: 8 or 16$"):
        accumulation(10, micro_batch=4, data_ranks=2)
    with pytest.raises(LayoutError, match=r"\(3 = 8\*0 \+ 3\); nearest: 8$"):
        accumulation(3, micro_batch=4, data_ranks=2)


def test_usp_cuts_cp_into_a_ring_of_ulysses_groups():
    layout = Layout(cp=4, tp=2, cp_method="usp", ulysses_degree=2, sequence_parallel=False)
    assert (layout.cp_ring, layout.cp_ulysses) == (2, 2)
    assert layout.groups("cp_ulysses") == [(0, 2), (1, 3), (4, 6), (5, 7)], "neighbours deal out heads"
    assert layout.groups("cp_ring") == [(0, 4), (1, 5), (2, 6), (3, 7)]


@pytest.mark.parametrize(
    ("method", "degrees"), [("zigzag", (4, 1)), ("ring", (4, 1)), ("allgather", (4, 1)), ("ulysses", (1, 4))]
)
def test_other_methods_take_all_of_cp(method: str, degrees: tuple[int, int]):
    layout = Layout(cp=4, cp_method=method)
    assert (layout.cp_ring, layout.cp_ulysses) == degrees


@pytest.mark.parametrize(
    ("choices", "complaint"),
    [
        (
            {"cp": 4, "cp_method": "usp", "ulysses_degree": 3},
            "ulysses_degree=3 does not divide cp=4 (4 = 3*1 + 1); valid: 2, 4",
        ),
        (
            {"cp": 4, "cp_method": "usp"},
            "needs layout.ulysses_degree, the part of cp=4 that partitions heads; valid: 2, 4",
        ),
        ({"cp": 4, "ulysses_degree": 2}, "ulysses_degree=2 needs cp_method='usp'; set that, or leave it out"),
        ({"cp_method": "ulyses"}, "cp_method='ulyses': not one of the choices; did you mean 'ulysses'?"),
        ({"recompute": "some"}, "recompute='some': not one of the choices; valid: full, none, selective"),
    ],
)
def test_choices_that_cannot_be_are_refused(choices: dict, complaint: str):
    with pytest.raises(LayoutError, match=re.escape(complaint)):
        Layout(**choices)


@pytest.mark.parametrize(("name", "meant"), [("tpp", "'tp'"), ("vpp", "'virtual_stages'"), ("zero_stage", "'zero'")])
def test_a_name_that_is_no_key_is_refused_with_the_nearest(name: str, meant: str):
    for refused in (lambda: Layout(**{name: 2}), lambda: Layout(tp=2).changed(**{name: 2})):
        with pytest.raises(LayoutError, match=f"layout.{name}: there is no such key; did you mean {meant}"):
            refused()


@pytest.mark.parametrize("value", ["2", 2.5, True, [2], float("nan")])
@pytest.mark.parametrize("key", ["tp", "zero", "virtual_stages", "loss_chunk_tokens"])
def test_a_number_of_a_layout_that_is_no_whole_number_is_refused(key: str, value: object):
    with pytest.raises(LayoutError, match=f"layout.{key}=.*a whole number is needed"):
        Layout(**{key: value})
