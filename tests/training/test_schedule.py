"""Proves the shapes of the learning rate: warm-up, cosine, warm-up-stable-decay, constant."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.config import ScheduleSection
from shardwright.training.schedule import learning_rate

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
