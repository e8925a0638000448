"""Proves that the ranks which are given stages are those on which the schedules run them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.schedule.build import NAMES, build
from shardwright.schedule.placement import SPLIT_BACKWARD, held_by, paths, way_of
from tests.schedule.test_build import schedules

FIXED = tuple(name for name in NAMES if name != "auto")


def test_the_ways_of_four_ranks() -> None:
    assert paths("1f1b", 4, 1) == ((0, 1, 2, 3),)
    assert paths("interleaved-1f1b", 4, 2) == ((0, 1, 2, 3, 0, 1, 2, 3),)
    assert paths("zb-v", 4, 1) == paths("dualpipe-v", 4, 2) == ((0, 1, 2, 3, 3, 2, 1, 0),)
    assert paths("dualpipe", 4, 1) == ((0, 1, 2, 3), (3, 2, 1, 0))


def test_what_the_second_of_four_ranks_holds() -> None:
    assert held_by("zb-h1", 4, 1, 1) == [(0, 1)]
    assert held_by("interleaved-1f1b", 4, 3, 1) == [(0, 1), (0, 5), (0, 9)]
    assert held_by("zb-v", 4, 1, 1) == [(0, 1), (0, 6)]
    assert held_by("dualpipe", 4, 1, 1) == [(0, 1), (1, 2)]


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_a_rank_holds_the_stages_that_its_schedule_runs_on_it(name: str, data: st.DataObject) -> None:
    schedule = data.draw(schedules(name)) if name != "auto" else build(name, 3, 6)
    virtual = schedule.n_stages // schedule.n_ranks if name == "interleaved-1f1b" else 1
    ways = paths(name, schedule.n_ranks, virtual)
    for rank in range(schedule.n_ranks):
        held = held_by(name, schedule.n_ranks, virtual, rank)
        assert {stage for _, stage in held} == set(schedule.stages_of(rank))
        assert all(ways[way][stage] == rank for way, stage in held)
    for microbatch in range(schedule.n_microbatches):
        way = ways[way_of(schedule, ways, microbatch)]
        assert list(way) == [schedule.place[stage, microbatch] for stage in range(schedule.n_stages)]


def test_those_with_a_split_backward_pass_are_the_ones_that_are_built_for_it() -> None:
    assert {name for name in NAMES if build(name, 4, 8).splits_backward} == set(SPLIT_BACKWARD)
