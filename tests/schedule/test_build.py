"""The schedules are what their papers draw, run for any number of microbatches, and hold what they promise to hold."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.schedule.actions import Schedule, stages_of_rank
from shardwright.schedule.build import build, problems
from shardwright.schedule.registry import find, names
from shardwright.schedule.simulate import KEPT_FOR_WEIGHT, Times, simulate
from shardwright.schedule.validate import problems as wrong
from shardwright.system.errors import ScheduleError

FIXED = tuple(name for name in names() if not find(name).searched)


def rows(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, actions)) for actions in schedule.ranks]


def test_1f1b_of_two_ranks_is_a_forward_ahead_on_the_first() -> None:
    assert rows(build("1f1b", 2, 3)) == ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]


def test_afab_runs_every_forward_first() -> None:
    assert rows(build("afab", 2, 2)) == ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]


def test_interleaved_takes_a_round_of_microbatches_through_one_stage_after_another() -> None:
    """Megatron, arXiv 2104.04473, figure 4: here 2 ranks, 2 stages each, 4 microbatches."""
    assert rows(build("interleaved-1f1b", 2, 4, 2)) == [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ]


def test_zb_h1_puts_off_on_the_last_rank_as_many_weight_gradients_as_the_first_runs_ahead() -> None:
    assert rows(build("zb-h1", 3, 4)) == [
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
        "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3",
        "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3",
    ]


def test_zb_h2_runs_twice_as_far_ahead_and_counts_from_a_ranks_own_start() -> None:
    schedule = build("zb-h2", 2, 3)
    assert schedule.staggered
    assert rows(schedule) == ["0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2", "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2"]


def test_zb_v_of_two_ranks() -> None:
    """The V-shaped schedule of Qi et al.: rank 0 has the first and the last stage."""
    assert rows(build("zb-v", 2, 3)) == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2",
        "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2",
    ]


def test_dualpipe_feeds_the_halves_of_the_batch_from_both_ends() -> None:
    """Rank 0 has stage 0 for microbatches 0 and 1 and stage 1 for 2 and 3; rank 1 has it the other way round."""
    assert rows(build("dualpipe", 2, 4)) == [
        "0F0 1F2 0F1 1B2 1F3 0B0 1B3 0I1 0W1",
        "0F2 1F0 0F3 1B0 1F1 0B2 1B1 0I3 0W3",
    ]


@pytest.mark.parametrize("name", FIXED)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_every_builder_makes_a_schedule_that_validates_at_any_size_it_accepts(name: str, data: st.DataObject) -> None:
    schedule = data.draw(schedules(name))
    assert wrong(schedule) == []
    ways = find(name).ways(schedule.n_ranks, schedule.n_stages // schedule.n_ranks)
    for microbatch in range(schedule.n_microbatches):
        way = ways[2 * microbatch // schedule.n_microbatches if len(ways) == 2 else 0]
        assert [schedule.place[stage, microbatch] for stage in range(schedule.n_stages)] == list(way)
    for rank in range(schedule.n_ranks):
        assert set(stages_of_rank(ways, rank)) == set(schedule.stages_of(rank))


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_activations_in_flight_are_within_what_the_papers_say(data: st.DataObject) -> None:
    """In stages x microbatches; zb-v and dualpipe-v stages are half of a rank's share."""
    name = data.draw(st.sampled_from(FIXED))
    schedule = data.draw(schedules(name))
    p, m = schedule.n_ranks, schedule.n_microbatches
    times = data.draw(anytimes(schedule.n_stages))
    simulation = simulate(schedule, times)
    peak = simulation.peak_in_flight
    if name == "1f1b":
        assert peak == tuple(min(m, p - rank) for rank in range(p))
    elif name == "interleaved-1f1b":
        round_, v = max(-(-m // max(1, m // p)), 1), schedule.n_stages // p
        assert max(peak) <= min(v * m, (v - 1) * round_ + 2 * p - 1)
    else:
        bounds = {"afab": m, "zb-h1": p, "zb-h2": 2 * p - 1, "zb-v": 2 * p, "dualpipe": p + 1, "dualpipe-v": 2 * p + 1}
        assert max(simulation.peak_memory(1.0)) <= bounds[name], "whatever W needs"
    assert name != "afab" or peak == (m,) * p


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (("1f1", 4, 8), "schedule '1f1' is not known; did you mean '1f1b'?"),
        (("1f1b", 0, 8), "1f1b: pp=0: valid: 1 or more"),
        (("1f1b", 4, 0), "1f1b: microbatches=0: valid: 1 or more"),
        (
            ("zb-h1", 4, 8, 2),
            "zb-h1: virtual_stages=2, but a rank holds 1 with this schedule; valid: 1, or another schedule: ",
        ),
        (
            ("zb-v", 4, 8, 3),
            "zb-v: virtual_stages=3, but a rank holds 2 with this schedule; valid: 2, or another schedule: ",
        ),
        (("interleaved-1f1b", 4, 8, 1), "interleaved-1f1b: virtual_stages=1 would be plain 1f1b; valid: 2 or more"),
        (("dualpipe", 5, 8), "dualpipe: pp=5 is odd, and its ranks are paired from both ends; nearest: 4 or 6"),
        (("dualpipe", 4, 1), "dualpipe: microbatches=1 is odd, and half of them enter at each end; nearest: 2"),
    ],
)
def test_what_cannot_be_built_is_an_error_with_the_valid_choices(asked: tuple, words: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        build(*asked)
    assert words in str(caught.value)
    assert caught.value.problems == problems(*asked)


def test_every_problem_is_told_at_once() -> None:
    assert len(problems("dualpipe", 3, 5, 2)) == 3


def test_schedules_take_their_number_of_stages_by_default_or_by_name() -> None:
    assert build("zb-v", 2, 4).ranks == build("zb-v", 2, 4, 2).ranks
    assert build("zb-v", 2, 4).ranks == build("zb-v", 2, 4, 1).ranks
    assert build("interleaved-1f1b", 2, 4).ranks == build("interleaved-1f1b", 2, 4, 2).ranks


def test_auto_is_searched_for_the_times_and_keeps_to_its_limit() -> None:
    times = Times(3, 2, 1, 0.5)
    for limit in (None, 4):
        for share in (KEPT_FOR_WEIGHT, 1.0):
            schedule = build("auto", 4, 8, times=times, in_flight_limit=limit, kept_for_weight=share)
            assert wrong(schedule) == []
            assert max(simulate(schedule, times).peak_memory(share)) <= (limit or 8)


def test_a_limit_of_activations_has_to_leave_room_for_one() -> None:
    with pytest.raises(ScheduleError, match="in_flight_limit=0 microbatches in flight on a rank: valid: 1 or more"):
        build("auto", 2, 4, in_flight_limit=0)


@st.composite
def schedules(draw: st.DrawFn, name: str) -> Schedule:
    """A schedule of that name, of up to 8 ranks and 20 microbatches."""
    paired = 2 if name == "dualpipe" else 1
    n_ranks = paired * draw(st.integers(1, 8 // paired))
    n_microbatches = paired * draw(st.integers(1, 20 // paired))
    return build(name, n_ranks, n_microbatches, draw(st.integers(2, 4)) if name == "interleaved-1f1b" else None)


@st.composite
def anytimes(draw: st.DrawFn, n_stages: int) -> Times:
    """Times of uneven stages."""
    each = st.tuples(*[st.integers(0, 9).map(float)] * n_stages)
    return Times(draw(each), draw(each), draw(each), draw(st.integers(0, 5)))
