"""Proves that schedules are compared on the same work, and that what cannot be compared is named."""

import pytest

from shardwright.schedule.build import build, compare, count_messages, resident_parameters
from shardwright.schedule.registry import names
from shardwright.schedule.simulate import Times


def test_every_schedule_has_the_same_work():
    found = compare(4, 8, virtual_stages=3, times=Times(1.0, 1.25, 0.5, comm=0.1), in_flight_limit=6)
    assert found.refused == {}
    assert [each.schedule.name for each in found.simulations] == list(names())
    for each in found.simulations:
        assert each.work == pytest.approx([8 * 2.75] * 4)
        assert each.times.comm == 0.1, "a message is as large wherever the layers are cut"


def test_what_cannot_be_built_has_its_reason():
    found = compare(3, 5)
    assert list(found.refused) == ["dualpipe"]
    assert "pp=3 is odd" in found.refused["dualpipe"]
    assert "microbatches=5 is odd" in found.refused["dualpipe"]


def test_times_of_stages_are_for_schedules_with_as_many():
    found = compare(4, 8, times=Times(forward=(1.0, 1.0, 1.0, 1.5)))
    assert {each.schedule.n_stages for each in found.simulations} == {4}
    assert set(found.refused) == {"interleaved-1f1b", "zb-v", "dualpipe-v"}
    assert "4 numbers for 8 stages" in found.refused["zb-v"]


@pytest.mark.parametrize(
    ("name", "messages", "held"),
    [
        ("1f1b", 2 * 3 * 8, 1),
        ("interleaved-1f1b", 2 * 11 * 8, 1),
        ("zb-v", 2 * 6 * 8, 1),
        ("dualpipe", 2 * 3 * 8, 2),
        ("dualpipe-v", 2 * 6 * 8, 1),
    ],
)
def test_messages_and_parameters_are_those_of_the_docs(name: str, messages: int, held: float):
    schedule = build(name, 4, 8, 3 if name == "interleaved-1f1b" else 1)
    assert count_messages(schedule) == messages
    assert resident_parameters(schedule) == held
