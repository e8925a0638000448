"""Proves the shapes of the learning rate: warm-up, cosine, warm-up-stable-decay, constant."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.config import ScheduleSection
from shardwright.training.optimizer import learning_rate

PEAK = 2.0


def rates(steps: int, **section: object) -> list[float]:
    schedule = ScheduleSection(**section)  # type: ignore[arg-type]
    return [learning_rate(step, steps, PEAK, schedule) for step in range(steps)]


def test_a_cosine_rises_falls_and_ends_at_its_final_fraction():
    found = rates(11, shape="cosine", warmup_steps=2, final_fraction=0.1)
    assert found[:3] == [1.0, 2.0, 2.0]
    assert found[6] == pytest.approx(PEAK * (0.1 + 0.9 * 0.5))
    assert found[-1] == pytest.approx(0.2)


def test_wsd_is_flat_and_then_falls_in_a_line():
    found = rates(10, shape="wsd", warmup_steps=2, decay_steps=4, final_fraction=0.0)
    assert found == pytest.approx([1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 1.5, 1.0, 0.5, 0.0])


def test_constant_is_constant():
    assert rates(4, shape="constant") == [PEAK] * 4


@given(
    st.sampled_from(["cosine", "wsd", "constant"]),
    st.integers(1, 60),
    st.integers(0, 30),
    st.integers(0, 30),
    st.floats(0, 1),
)
def test_no_rate_is_above_the_peak_or_below_zero_and_it_never_rises_after_the_warm_up(
    shape: str, steps: int, warmup: int, decay: int, final: float
):
    warmup = min(warmup, steps)
    decay = min(decay, steps - warmup) if shape == "wsd" else 0
    found = rates(steps, shape=shape, warmup_steps=warmup, decay_steps=decay, final_fraction=final)
    assert all(0 <= rate <= PEAK for rate in found)
    assert found[:warmup] == sorted(found[:warmup])
    assert found[warmup:] == sorted(found[warmup:], reverse=True)


@pytest.mark.parametrize("shape", ["cosine", "wsd"])
def test_by_tokens_a_rate_is_that_of_the_share_of_the_tokens(shape: str):
    """A run of 4 steps of one unit and 8 of three has the rates of a run of 28 steps of one unit."""
    tokens = [min(step, 4) + 3 * max(0, step - 4) for step in range(13)]
    schedule = ScheduleSection(shape=shape, warmup_steps=4, decay_steps=3 if shape == "wsd" else 0)
    found = [learning_rate(step, 12, PEAK, schedule, lambda step: tokens[step]) for step in range(12)]
    last = tokens[11] + 1  # the last step begins where the run of one unit has its last step
    in_units = ScheduleSection(shape=shape, warmup_steps=4, decay_steps=9 if shape == "wsd" else 0)
    expected = [learning_rate(tokens[step], last, PEAK, in_units) for step in range(12)]
    assert found == pytest.approx(expected)
