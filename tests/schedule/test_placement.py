"""Proves that the ranks which are given stages are those on which the schedules run them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.schedule.actions import down_and_up, from_both_ends, round_and_round, stages_of_rank
from shardwright.schedule.build import build
from shardwright.schedule.registry import find, names
from tests.schedule.test_build import schedules

FIXED = tuple(name for name in names() if not find(name).searched)


def test_the_ways_of_four_ranks() -> None:
    assert find("1f1b").ways(4, 1) == round_and_round(4, 1) == ((0, 1, 2, 3),)
    assert find("interleaved-1f1b").ways(4, 2) == ((0, 1, 2, 3, 0, 1, 2, 3),)
    assert find("zb-v").ways(4, 2) == find("dualpipe-v").ways(4, 2) == ((0, 1, 2, 3, 3, 2, 1, 0),)
    assert find("dualpipe").ways(4, 1) == ((0, 1, 2, 3), (3, 2, 1, 0))


def test_what_the_second_of_four_ranks_holds() -> None:
    assert stages_of_rank(round_and_round(4, 1), 1) == [1]
    assert stages_of_rank(round_and_round(4, 3), 1) == [1, 5, 9]
    assert stages_of_rank(down_and_up(4, 2), 1) == [1, 6]
    assert stages_of_rank(from_both_ends(4, 1), 1) == [1, 2]


@pytest.mark.parametrize("name", names())
@given(data=st.data())
def test_a_rank_holds_the_stages_that_its_schedule_runs_on_it(name: str, data: st.DataObject) -> None:
    schedule = data.draw(schedules(name)) if name != "auto" else build(name, 3, 6)
    ways = find(name).ways(schedule.n_ranks, schedule.n_stages // schedule.n_ranks)
    for rank in range(schedule.n_ranks):
        held = stages_of_rank(ways, rank)
        assert set(held) == set(schedule.stages_of(rank))
        assert sorted(held) == sorted(stage for way in ways for stage in range(len(way)) if way[stage] == rank)
    for microbatch in range(schedule.n_microbatches):
        assert schedule.path_of(microbatch) in ways


def test_those_with_a_split_backward_pass_are_the_ones_that_are_built_for_it() -> None:
    for name in names():
        assert build(name, 4, 8).splits_backward == find(name).splits_backward, name
