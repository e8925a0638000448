"""Proves where ranks send and receive: a message for each thing that one rank needs of another, which both ends meet in
the same order, so that ranks that wait for one another at every message come to their ends; and early enough that
messages travel while ranks compute."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.schedule.actions import Action, Schedule, make
from shardwright.schedule.build import build
from shardwright.schedule.messages import PairExchange, StageMessage, sent_after, with_messages
from shardwright.schedule.registry import find, names
from shardwright.schedule.simulate import Times, simulate
from shardwright.system.errors import ScheduleError
from tests.schedule.links import Lists, makespan_on_streams, rendezvous
from tests.schedule.test_build import schedules

FIXED = tuple(name for name in names() if not find(name).searched)


def words(entry: Action | PairExchange, rank: int) -> str:
    if isinstance(entry, Action):
        return str(entry)
    ways = (f"{'send' if m.sender == rank else 'receive'}-{m.stage}{m.op}{m.microbatch}" for m in entry.messages)
    return "+".join(ways)


def exchanges(entries: list[Action | PairExchange]) -> list[PairExchange]:
    return [entry for entry in entries if isinstance(entry, PairExchange)]


def test_what_1f1b_of_two_ranks_sends() -> None:
    lists = with_messages(build("1f1b", 2, 3))
    first, last = (" ".join(words(each, rank) for each in entries) for rank, entries in enumerate(lists))
    sent = "0F0 send-1F0 0F1 send-1F1 receive-0B0 0B0 receive-0B1 0F2 send-1F2 0B1 receive-0B2 0B2"
    received = "receive-1F0 receive-1F1 1F0 1B0 send-0B0 1F1 1B1 send-0B1 receive-1F2 1F2 1B2 send-0B2"
    assert (first, last) == (sent, received)


def test_what_two_ranks_send_each_other_in_one_round_is_one_exchange() -> None:
    lists = with_messages(build("dualpipe", 2, 4))
    assert any({message.sender for message in each.messages} == {0, 1} for each in exchanges(lists[0]))


def test_between_stages_of_one_rank_nothing_is_sent() -> None:
    assert not exchanges(with_messages(build("zb-v", 1, 2))[0])


def check(schedule: Schedule) -> None:
    lists = with_messages(schedule)
    assert [[e for e in entries if isinstance(e, Action)] for entries in lists] == [list(r) for r in schedule.ranks]
    for here, entries in enumerate(lists):
        for there in range(here):
            between = [[each for each in exchanges(lists[rank]) if {each.low, each.high} == {here, there}]
                       for rank in (here, there)]  # fmt: skip
            assert between[0] == between[1]
        for at, entry in enumerate(entries):
            if not isinstance(entry, PairExchange):
                continue
            for message in entry.messages:
                past, to_come = entries[:at], entries[at:]
                if message.sender == here:
                    assert [e for e in past if isinstance(e, Action) and sent_after(schedule, here, e) == message]
                else:
                    ops = ("F",) if message.op == "F" else ("B", "I")
                    assert [op for op in ops if (message.stage, op, message.microbatch) in to_come]
    assert not rendezvous(lists)
    sent = [message for entries in lists for each in exchanges(entries) for message in each.messages]
    assert sorted(sent) == sorted(2 * dependences(schedule))


def dependences(schedule: Schedule) -> list[StageMessage]:
    """What is needed from another rank."""
    found = []
    for rank, action in schedule.actions():
        if (needed := schedule.needs(action)) is not None and schedule.place[needed] != rank:
            op = "F" if action.op == "F" else "B"
            found.append(StageMessage(action.stage, op, action.microbatch, schedule.place[needed], rank))
    return found


@pytest.mark.parametrize("name", FIXED)
@given(data=st.data())
@settings(deadline=None)
def test_both_ranks_meet_the_messages_between_them_in_one_order_and_may_wait_at_each_for_the_other(
    name: str, data: st.DataObject
) -> None:
    check(data.draw(schedules(name)))


@pytest.mark.parametrize(("n_ranks", "n_microbatches"), [(2, 1), (2, 6), (3, 5), (4, 8)])
def test_so_they_do_in_schedules_that_were_searched(n_ranks: int, n_microbatches: int) -> None:
    check(build("auto", n_ranks, n_microbatches, times=Times(1.0, 1.3, 0.7)))


def test_ranks_that_receive_right_before_they_need_it_would_wait_in_a_circle() -> None:
    """1F1B needs its sends not to block, or its receives to be early."""
    schedule = build("1f1b", 2, 3)
    late: Lists = []
    for rank, actions in enumerate(schedule.ranks):
        row: list[Action | PairExchange] = []
        for action in actions:
            row += [PairExchange(0, 1, (m,)) for m in dependences(schedule) if m.receiver == rank and m[:3] == (
                action.stage, "F" if action.op == "F" else "B", action.microbatch) and action.op != "W"]  # fmt: skip
            row.append(action)
            message = sent_after(schedule, rank, action)
            row += [PairExchange(0, 1, (message,))] if message else []
        late.append(row)
    assert len(rendezvous(late)) == 2


@pytest.mark.parametrize("comm", [0.05, 0.3])
@pytest.mark.parametrize("name", FIXED)
def test_messages_that_wait_for_those_before_them_delay_a_step_by_few_percent(name: str, comm: float) -> None:
    schedule = build(name, 4, 12, 2 if name == "interleaved-1f1b" else None)
    times = Times(1.0, 1.1, 0.9, comm)
    ideal = simulate(schedule, times).makespan  # where every message travels alone, as soon as it is made
    assert ideal <= makespan_on_streams(schedule, with_messages(schedule), times) < 1.05 * ideal


def test_a_schedule_in_which_every_rank_waits_for_another_is_an_error_that_says_where() -> None:
    first = [Action(0, "F", 0), Action(0, "B", 0), Action(0, "F", 1), Action(0, "B", 1)]
    last = [Action(1, "F", 1), Action(1, "B", 1), Action(1, "F", 0), Action(1, "B", 0)]
    with pytest.raises(ScheduleError, match="mine: ranks wait for one another: rank 0, position 1: 0B0 waits for"):
        with_messages(make(2, 2, [first, last], name="mine"))
