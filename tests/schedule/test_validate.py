"""A schedule from anywhere is told what keeps it from being run, and where."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.schedule.actions import Action, Op, Schedule, make
from shardwright.schedule.registry import find, names
from shardwright.schedule.simulate import Times, simulate
from shardwright.schedule.validate import deadlock, problems
from shardwright.system.errors import ScheduleError
from tests.schedule.test_build import schedules

FIXED = tuple(name for name in names() if not find(name).searched)


def parsed(*ranks: str, n_stages: int = 2, n_microbatches: int = 2) -> Schedule:
    """A schedule of rows like `0F0 0B0`, with one digit for stage and microbatch."""
    lists = [[Action(int(cell[0]), as_op(cell[1]), int(cell[2])) for cell in rank.split()] for rank in ranks]
    return make(n_stages, n_microbatches, lists, name="mine")


def as_op(letter: str) -> Op:
    return letter  # type: ignore[return-value]


def test_a_good_schedule_has_no_problems() -> None:
    assert problems(parsed("0F0 0F1 0B0 0I1 0W1", "1F0 1B0 1F1 1B1")) == []


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (
            ("0F0 0F1 0I0 0B1", "1F0 1B0 1F1 1B1"),
            ["stage 0: I without W, for microbatch 0"],
        ),
        (
            ("0F0 0F1 0B0 0B1", "1F1 1B1"),
            ["stage 1: no F, for microbatch 0", "stage 1: no backward pass, neither B nor I and W, for microbatch 0"],
        ),
        (
            ("0F0 0F1 0B0 0B1 0W0", "1F0 1B0 1F1 1B1"),
            ["stage 0: W without I, for microbatch 0", "stage 0: B as well as I or W, which are its two parts, "
             "for microbatch 0"],
        ),
        (
            ("0F0 0F1 0F0 0B0 0B1", "1F0 1B0 1F1 1B1"),
            ["rank 0, position 2: 0F0 comes a second time; first: rank 0, position 0"],
        ),
        (
            ("0F0 0F1 0B0 0B1", "1F0 1B0 1I1 1F1 1W1"),
            ["rank 1, position 2: 1I1 comes before its forward 1F1, at position 3"],
        ),
        (
            ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1W1 1I1"),
            ["rank 1, position 3: 1W1 comes before its input gradient 1I1, at position 4"],
        ),
        (
            ("0F0 0F1 0B0", "1F0 1B0 1F1 1B1 0B1"),
            ["rank 1, position 4: 0B1 is on another rank than its forward 0F1 (rank 0, position 1), which keeps the "
             "activations"],
        ),
        (
            ("0F0 0F1 0B0 0B1", "1F0 1B0 2F1 1B1 1F7"),
            ["rank 1, position 2: 2F1 is of stage 2; valid: 0 to 1",
             "rank 1, position 4: 1F7 is of microbatch 7; valid: 0 to 1"],
        ),
        (
            ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1X1"),
            ["rank 1, position 3: 1X1 has op 'X'; valid: F, B, I, W"],
        ),
        (
            ("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"),
            ["ranks wait for one another: rank 0, position 1: 0B0 waits for 1B0, at rank 1, position 3; "
             "rank 1, position 0: 1F1 waits for 0F1, at rank 0, position 2"],
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_place(ranks: tuple[str, ...], expected: list[str]) -> None:
    assert problems(parsed(*ranks)) == expected


def test_what_a_stage_lacks_for_many_microbatches_is_one_line() -> None:
    found = problems(parsed("0F0 0F1 0F2 0F3 0F4 0F6", n_stages=1, n_microbatches=6))
    assert found == ["rank 0, position 5: 0F6 is of microbatch 6; valid: 0 to 5"]
    found = problems(parsed("0F0 0F1 0F2 0F3 0F4 0F6 0B5", n_stages=1, n_microbatches=7))
    assert found == [
        "stage 0: no backward pass, neither B nor I and W, for microbatches 0 to 4, 6",
        "stage 0: no F, for microbatch 5",
    ]


def test_a_stage_or_microbatch_far_too_high_is_told_without_going_through_all_below() -> None:
    [found] = problems(make(10**12, 1, [[Action(10**12 - 1, "F", 0), Action(10**12 - 1, "B", 0)]]))
    assert "have 2 actions, but 1000000000000 stages x 1 microbatches need 2000000000000 or more" in found


def test_deadlock_of_an_incomplete_schedule_names_what_nobody_does() -> None:
    stuck = deadlock(parsed("0F0 0B0", "1F0", n_microbatches=1))
    assert stuck == "ranks wait for ever: rank 0, position 1: 0B0 waits for 1I0, which no rank does"


@pytest.mark.parametrize("name", FIXED)
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_an_action_too_few_or_too_many_is_always_found(name: str, data: st.DataObject) -> None:
    schedule = data.draw(schedules(name))
    rank = data.draw(st.integers(0, schedule.n_ranks - 1))
    actions = list(schedule.ranks[rank])
    position = data.draw(st.integers(0, len(actions) - 1))
    lists = [list(each) for each in schedule.ranks]
    lists[rank] = actions[:position] + actions[position + 1 :]
    assert problems(make(schedule.n_stages, schedule.n_microbatches, lists, name=name))
    lists[rank] = actions[:position] + [actions[position]] + actions[position:]
    assert any("a second time" in each for each in problems(
        make(schedule.n_stages, schedule.n_microbatches, lists, name=name)))  # fmt: skip


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_schedule_out_of_order_is_found_exactly_when_it_cannot_be_run(data: st.DataObject) -> None:
    """A few actions of some ranks change places; it can be run when it simulates and a rank keeps the order F, I, W of
    each of its stages and microbatches."""
    schedule = data.draw(schedules(data.draw(st.sampled_from(FIXED))))
    dice = random.Random(data.draw(st.integers(0, 10_000)))
    lists = [list(actions) for actions in schedule.ranks]
    for _ in range(data.draw(st.integers(1, 3))):
        actions = dice.choice(lists)
        position = dice.randrange(len(actions))
        actions.insert(dice.randrange(max(0, position - 3), position + 4), actions.pop(position))
    shuffled = make(schedule.n_stages, schedule.n_microbatches, lists)
    in_order = all(
        sorted(each, key="FBIW".index) == each
        for actions in lists
        for stage, _, microbatch in actions
        if (each := [op for s, op, i in actions if (s, i) == (stage, microbatch)])
    )
    try:
        simulate(shuffled, Times())
        runs = in_order
    except ScheduleError:
        runs = False
    assert (problems(shuffled) == []) == runs
