"""Proves where ranks send and receive: a message for each thing that one rank needs of another, which both ends meet in
the same order. That it is free of deadlock with sends that wait: test_validate.py."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.errors import ScheduleError
from shardwright.schedule.actions import Action, Schedule, make
from shardwright.schedule.build import build
from shardwright.schedule.messages import Message, with_messages
from shardwright.schedule.registry import find, names
from tests.schedule.test_build import schedules

FIXED = tuple(name for name in names() if not find(name).searched)
Transfer = tuple[int, str, int]
"""The stage and op that made it, and the microbatch."""


def words(entry: Action | Message) -> str:
    return str(entry) if isinstance(entry, Action) else f"{entry.way}-{entry.stage}{entry.op}{entry.microbatch}"


def transfer(message: Message) -> Transfer:
    """What is carried, said alike at both ends: by who made it."""
    back = 0 if message.way == "send" else 1 if message.op == "F" else -1
    return message.stage - back, message.op, message.microbatch


def test_what_1f1b_of_two_ranks_sends() -> None:
    first, last = (" ".join(map(words, entries)) for entries in with_messages(build("1f1b", 2, 2)))
    assert first == "0F0 send-0F0 0F1 send-0F1 receive-0B0 0B0 receive-0B1 0B1"
    assert last == "receive-1F0 1F0 receive-1F1 1B0 send-1B0 1F1 1B1 send-1B1"


def test_between_stages_of_one_rank_nothing_is_sent() -> None:
    entries = with_messages(build("zb-v", 1, 2))
    assert not [each for each in entries[0] if isinstance(each, Message)]


@pytest.mark.parametrize("name", FIXED)
@given(data=st.data())
def test_two_ranks_meet_the_messages_between_them_in_the_same_order(name: str, data: st.DataObject) -> None:
    schedule = data.draw(schedules(name))
    lists = with_messages(schedule)
    seen = {
        (here, there): [
            (transfer(each), here if each.way == "send" else there)
            for each in entries
            if isinstance(each, Message) and each.peer == there
        ]
        for here, entries in enumerate(lists)
        for there in range(schedule.n_ranks)
    }
    for here, there in seen:
        assert seen[here, there] == seen[there, here]


@pytest.mark.parametrize("name", FIXED)
@given(data=st.data())
def test_every_dependence_between_ranks_is_one_message_after_its_maker_and_before_its_user(
    name: str, data: st.DataObject
) -> None:
    schedule = data.draw(schedules(name))
    lists = with_messages(schedule)
    assert [[e for e in entries if isinstance(e, Action)] for entries in lists] == [list(r) for r in schedule.ranks]
    sent: list[tuple[Transfer, int, int]] = []
    received: list[tuple[Transfer, int, int]] = []
    for rank, entries in enumerate(lists):
        for at, entry in enumerate(entries):
            if not isinstance(entry, Message):
                continue
            ops = ("F",) if entry.op == "F" else ("B", "I")
            its = [Action(entry.stage, op, entry.microbatch) for op in ops]  # type: ignore[arg-type]
            if entry.way == "send":
                sent.append((transfer(entry), rank, entry.peer))
                assert entries[at - 1] in its, "it leaves right after it is made"
            else:
                received.append((transfer(entry), entry.peer, rank))
                assert [e for e in entries[at:] if e in its], "it is there before it is used"
    assert sorted(sent) == sorted(received) == sorted(dependences(schedule))


def dependences(schedule: Schedule) -> list[tuple[Transfer, int, int]]:
    """What is needed from another rank, of whom, by whom."""
    found = []
    for rank, action in schedule.actions():
        if (needed := schedule.needs(action)) is not None and schedule.place[needed] != rank:
            found.append(((needed[0], "F" if action.op == "F" else "B", needed[1]), schedule.place[needed], rank))
    return found


def test_a_schedule_in_which_every_rank_waits_for_another_is_an_error_that_says_where() -> None:
    first = [Action(0, "F", 0), Action(0, "B", 0), Action(0, "F", 1), Action(0, "B", 1)]
    last = [Action(1, "F", 1), Action(1, "B", 1), Action(1, "F", 0), Action(1, "B", 0)]
    with pytest.raises(ScheduleError, match="mine: every rank waits for another: rank 0 at 0B0; rank 1 at 1F1"):
        with_messages(make(2, 2, [first, last], name="mine"))
