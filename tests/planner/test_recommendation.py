"""Which of the layouts that tie with the fastest is recommended: properties of the rule, and of what a search finds."""

from dataclasses import replace
from functools import cache
from math import exp

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from shardwright.cost.hardware import cluster
from shardwright.cost.job import Job
from shardwright.model.presets import PRESETS
from shardwright.planner.choice import PricedLayout
from shardwright.planner.recommendation import MEMORY_ERROR, Rated, choose
from shardwright.planner.search import Plan, search
from shardwright.planner.simplicity import WORTH_A_KEY
from shardwright.system.units import GiB
from tests.marks import rest_prove

LIMIT = 100.0
ROOM = LIMIT / (1 + MEMORY_ERROR)

RATED = st.builds(
    Rated,
    step_s=st.floats(1.0, 1.08),
    error=st.floats(0.0, 0.06),
    peak_bytes=st.floats(80.0, LIMIT),
    axes=st.integers(0, 3),
    settings=st.integers(0, 3),
)
SOME = st.lists(RATED, min_size=1, max_size=8)


def rated(step_s: float, peak_bytes: float = 50.0, axes: int = 0, settings: int = 0, error: float = 0.03) -> Rated:
    return Rated(step_s, error, peak_bytes, axes, settings)


def in_class(every: list[Rated]) -> list[Rated]:
    """Layouts that tie with the fastest and have no more axes."""
    fastest = min(every, key=lambda each: (each.step_s, each.axes))
    return [each for each in every if each.step_s <= fastest.step_s * exp(each.error) and each.axes <= fastest.axes]


@given(SOME)
def test_the_recommended_layout_ties_with_the_fastest_and_is_not_dominated(every: list[Rated]):
    """None of the class is faster, smaller, and as simple; and with more settings none saves what a setting has to."""
    taken = choose(every, LIMIT)
    assert taken in in_class(every)
    for other in in_class(every):
        if other.peak_bytes <= taken.peak_bytes and other.axes <= taken.axes:
            assert other.settings > taken.settings or other.step_s >= taken.step_s
            assert other.step_s >= taken.step_s / (1 + WORTH_A_KEY) * (1 - 1e-12)


@given(SOME, RATED, st.integers(0, 8))
def test_a_slower_larger_layout_that_is_no_simpler_changes_nothing(every: list[Rated], more: Rated, at: int):
    taken = choose(every, LIMIT)
    worse = Rated(
        max(more.step_s, taken.step_s * 1.0001),
        more.error,
        max(more.peak_bytes, taken.peak_bytes * 1.0001),
        max(more.axes, taken.axes),
        max(more.settings, taken.settings),
    )
    assert choose([*every[:at], worse, *every[at:]], LIMIT) == taken


@given(SOME, RATED)
def test_a_layout_outside_the_class_changes_nothing(every: list[Rated], more: Rated):
    fastest = min(every, key=lambda each: (each.step_s, each.axes))
    assume(
        more.step_s > fastest.step_s * exp(more.error) or (more.axes > fastest.axes and more.step_s > fastest.step_s)
    )
    assert choose([*every, more], LIMIT) == choose(every, LIMIT)


@given(SOME)
@example([rated(1.0, 81.0), rated(1.0, 80.0)])
def test_the_order_of_the_candidates_does_not_matter(every: list[Rated]):
    one, other = choose(every[::-1], LIMIT), choose(every, LIMIT)
    assert replace(one, error=0.0) == replace(other, error=0.0)


@given(SOME)
@example([rated(1.0, 81.0, 1, 1), rated(1.0, 81.0, 1), rated(1.0, 80.0, 1)])
def test_of_two_that_were_both_candidates_the_one_that_lost_is_not_taken_when_others_leave(every: list[Rated]):
    """A choice among all stays the choice among any of them that have the fastest, the least peak and the fastest of
    the fewest axes, with which the others are compared."""
    taken, fastest = choose(every, LIMIT), min(every, key=lambda each: (each.step_s, each.axes))
    kept = in_class(every)
    least = min(kept, key=lambda each: each.peak_bytes)
    room = ROOM if least.peak_bytes <= ROOM else least.peak_bytes * (1 + WORTH_A_KEY)
    same = [each for each in kept if each.peak_bytes <= room and each.axes == taken.axes]
    anchor = min(same, key=lambda each: each.step_s)
    for other in every:
        assert choose([fastest, least, anchor, taken, other], LIMIT) == taken


@given(SOME)
def test_a_setting_that_changes_neither_time_nor_memory_is_left_out(every: list[Rated]):
    plain = [replace(each, settings=0) for each in every]
    assert choose([*every, *plain], LIMIT).settings == 0


@given(SOME, st.sampled_from([1.0, 0.12]))
def test_with_less_headroom_than_the_error_of_the_memory_one_that_needs_less_wins(every: list[Rated], spread: float):
    """Also where all are near the limit."""
    every = [replace(each, peak_bytes=LIMIT - spread * (LIMIT - each.peak_bytes)) for each in every]
    taken = choose(every, LIMIT)
    if taken.peak_bytes > ROOM:
        assert all(other.peak_bytes * (1 + WORTH_A_KEY) >= taken.peak_bytes * (1 - 1e-12) for other in in_class(every))


def test_headroom_comes_before_axes_and_axes_before_time():
    fastest = rated(1.00, peak_bytes=97.0, axes=3)
    tight, fewer, slower = rated(1.02, 99.5, axes=1), rated(1.01, 96.0, axes=2), rated(1.02, 60.0, axes=2)
    assert choose([fastest, tight, fewer, slower], LIMIT) == fewer
    assert choose([fastest, tight], LIMIT) == fastest
    assert choose([fastest, replace(tight, peak_bytes=90.0), fewer, slower], LIMIT).axes == 1
    assert choose([fastest, rated(1.04, 60.0)], LIMIT) == fastest, "no tie"


def test_where_all_are_near_the_limit_one_that_needs_less_wins_if_it_saves_a_hundredth_of_the_memory():
    fastest = rated(1.00, peak_bytes=99.9)
    assert choose([fastest, rated(1.01, peak_bytes=98.5)], LIMIT).peak_bytes == 98.5
    assert choose([fastest, rated(1.01, peak_bytes=99.1)], LIMIT) == fastest


def test_a_slower_layout_with_more_axes_is_not_recommended_for_its_headroom():
    plain = rated(1.00, peak_bytes=99.0)
    assert choose([plain, rated(1.02, peak_bytes=60.0, axes=2)], LIMIT) == plain


@cache
def planned(preset: str, on: str, memory_gib: float, global_batch: int) -> Plan:
    asked = cluster(on)
    asked = replace(asked, accelerator=replace(asked.accelerator, memory_bytes=memory_gib * GiB))
    spec = replace(PRESETS[preset], n_layers=6, d_model=512)
    return search(Job(model=spec, cluster=asked, global_batch=global_batch, seq_len=256))


@pytest.mark.parametrize(
    ("preset", "on", "memory_gib", "global_batch"),
    rest_prove(
        [
            ("debug", "h100:4/2", 0.5, 16),
            ("debug", "h100:8", 0.3, 32),
            ("debug-moe", "h100:4/2", 0.5, 8),
            ("debug-moe", "h100:8/4", 0.4, 16),
        ],
        ("debug", "h100:4/2", 0.5, 16),
    ),
)
def test_no_layout_of_the_whole_search_dominates_the_recommended_one(
    preset: str, on: str, memory_gib: float, global_batch: int
):
    found = planned(preset, on, memory_gib, global_batch)
    taken, fastest = found.recommended, found.best[0]
    assert taken is not None
    mine = Rated.compare(taken, fastest)
    near = np.flatnonzero(found.pool.bound_s <= taken.step_s / (1 + WORTH_A_KEY))
    for number, step_s in zip(near.tolist(), found.pool.times_s(near.tolist()), strict=True):
        if step_s < taken.step_s / (1 + WORTH_A_KEY) and found.pool.peak_bytes[number] <= taken.peak_bytes:
            other = Rated.compare(PricedLayout.from_choice(found.job, found.pool.choice(number)), fastest)
            assert other.axes > mine.axes, found.pool.choice(number)
