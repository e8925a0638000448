"""Proves that ranks which would hang on a cluster are found, with both sides, and that healthy ranks are not."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from benchmarks.gpu.mock.nccl_log import NcclCall

from shardwright.config import parse
from shardwright.dry_run.agreement import broken_nccl_rules, checked, disagreements
from shardwright.dry_run.program import dry_rank
from shardwright.dry_run.record import WAIT, Moment, RankRecord, RecordedMessage
from tests.distributed import run_ranks
from tests.dryrun.worlds import Table, run_file

LAYOUT = {"pp": 2, "dp_shard": 2, "tp": 2, "zero": 2}


def dry(table: Table, rank: int) -> RankRecord:
    return dry_rank(parse(table), rank, gpu=True)


@cache
def world() -> tuple[RankRecord, ...]:
    """The records of all ranks of a layout."""
    table = run_file("dense", LAYOUT, "bf16")
    return tuple(run_ranks(dry, 1, table, rank)[0] for rank in range(8))


Change = Callable[[list[RecordedMessage]], list[RecordedMessage]]


def place(messages: list[RecordedMessage], op: str, axis: str, number: int = 3) -> int:
    """Where the message of that number of an operation over an axis stands."""
    return [at for at, each in enumerate(messages) if (each.op, each.axis) == (op, axis)][number]


def without(op: str, axis: str) -> Change:
    def change(messages: list[RecordedMessage]) -> list[RecordedMessage]:
        at = place(messages, op, axis)
        return messages[:at] + messages[at + 1 :]

    return change


def other(op: str, axis: str, **fields: object) -> Change:
    def change(messages: list[RecordedMessage]) -> list[RecordedMessage]:
        at = place(messages, op, axis)
        return messages[:at] + [messages[at]._replace(**fields)] + messages[at + 1 :]  # type: ignore[arg-type]

    return change


def swapped(messages: list[RecordedMessage]) -> list[RecordedMessage]:
    """An all-gather over tp and the next reduce-scatter over tp in the other order."""
    here = place(messages, "all-gather", "tp")
    there = next(at for at in range(here, len(messages)) if messages[at].op == "reduce-scatter")
    found = list(messages)
    found[here], found[there] = found[there], found[here]
    return found


def in_another_order(messages: list[RecordedMessage]) -> list[RecordedMessage]:
    """A reduce-scatter over dp_shard before the collective over tp that comes before it."""
    there = place(messages, "reduce-scatter", "dp_shard", 0)
    here = next(at for at in reversed(range(there)) if messages[at].axis == "tp")
    found = list(messages)
    found.insert(here, found.pop(there))
    return found


def waits_first(messages: list[RecordedMessage]) -> list[RecordedMessage]:
    """The rank waits for a gradient before it has sent what that is computed from."""
    send = place(messages, "send", "pp", 0)
    wait = next(at for at in range(send, len(messages)) if messages[at].op == WAIT)
    found = list(messages)
    found.insert(send, found.pop(wait))
    return found


FAULTS: dict[str, tuple[int, Change, str]] = {
    "skipped all-gather of activations": (1, without("all-gather", "tp"), "over tp"),
    "skipped reduce-scatter of gradients": (2, without("reduce-scatter", "dp_shard"), "over dp_shard"),
    "swapped order": (3, swapped, "over tp"),
    "other shape": (0, other("all-gather", "tp", shapes=((1, 2), (2, 2))), "over tp"),
    "other size": (6, other("reduce-scatter", "dp_shard", n_bytes=64), "over dp_shard"),
    "other type": (4, other("all-gather", "tp", dtype="float32"), "over tp"),
    "send without receive": (4, without("receive", "pp"), "from rank 0 to 4"),
    "receive without send": (1, without("send", "pp"), "from rank 1 to 5"),
    "message of another type": (6, other("send", "pp", dtype="float32"), "from rank 6 to 2"),
    "schedule that deadlocks": (0, waits_first, "deadlock"),
}


@pytest.mark.prove
def test_healthy_ranks_agree():
    assert disagreements(world()) == []


@pytest.mark.prove
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_one_rank_is_found_with_both_sides(name: str):
    rank, change, where = FAULTS[name]
    records = list(world())
    records[rank] = replace(records[rank], messages=tuple(change(list(records[rank].messages))))
    found = disagreements(records)
    assert found
    assert where in found[0].what
    assert rank in found[0].ranks
    assert len(found[0].sides) == len(found[0].ranks) >= 2
    assert f"rank {rank}" in found[0].sentence or "deadlock" in where
    assert len({None if side is None else side.content for side in found[0].sides}) > 1 or "deadlock" in where


@pytest.mark.prove
def test_two_communicators_in_another_order_are_a_deadlock_where_the_order_closes_a_cycle():
    records = list(world())
    for rank in (5, 6):
        records[rank] = replace(records[rank], messages=tuple(in_another_order(list(records[rank].messages))))
        broken = disagreements(records)
        # Rank 5 alone delays rank 4. With rank 6, 4 waits for 5, 5 for 7, 7 for 6, and 6 for 4.
        assert [(4 in each.ranks, "deadlock" in each.what) for each in broken] == [(True, True)] * (rank == 6)


SCHEDULES = {
    "1f1b": {"pp": 4},
    "interleaved": {"pp": 2, "pp_schedule": "interleaved-1f1b", "virtual_stages": 2, "tp": 2},
    "zb-v": {"pp": 2, "pp_schedule": "zb-v", "virtual_stages": 2},
    "dualpipe": {"pp": 2, "pp_schedule": "dualpipe"},
    "ring": {"cp": 4, "cp_method": "ring"},
    "ring in a pipeline": {"cp": 2, "pp": 2, "cp_method": "ring", "dp_shard": 2, "zero": 3},
}


@cache
def ranks_of(name: str) -> tuple[RankRecord, ...]:
    config = parse(table := run_file("dense", SCHEDULES[name], "bf16"))
    return tuple(run_ranks(dry, 1, table, rank)[0] for rank in range(config.layout.layout().world_size))


@pytest.mark.prove
@pytest.mark.parametrize("name", SCHEDULES)
def test_no_rank_of_a_pipeline_or_ring_waits_in_a_cycle_if_every_call_blocks(name: str):
    records = ranks_of(name)
    assert disagreements(records) == []
    sends = sum(message.op == "send" for record in records for message in record.messages)
    assert checked(records).matched_sends == sends > 0


@pytest.mark.prove
def test_a_ring_whose_ranks_send_before_they_receive_is_a_deadlock_without_joint_launches():
    alone = [
        replace(record, messages=tuple(message._replace(launch=0) for message in record.messages))
        for record in ranks_of("ring")
    ]
    (found,) = disagreements(alone)
    assert found.ranks == (0, 1, 2, 3)
    assert "deadlock" in found.what


def test_a_disagreement_is_one_sentence_with_communicator_call_and_ranks():
    gather = message("all-gather", axis="tp")
    wide = gather._replace(dtype="float64")
    (found,) = disagreements([messages_of(0, gather, gather), messages_of(1, gather, wide)])
    assert found.sentence == (
        "collective 2 over tp (ranks 0, 1): all-gather over tp of float32 2, in no module, 0F0 on rank 0; "
        "all-gather over tp of float64 2, in no module, 0F0 on rank 1"
    )
    (found,) = disagreements([messages_of(0, message("send", 1)), messages_of(1)])
    assert found.sentence.startswith("message 1 from rank 0 to 1 over pp: send over pp of float32 2")
    assert found.sentence.endswith("no call on rank 1")


def messages_of(rank: int, *messages: RecordedMessage) -> RankRecord:
    nothing = Moment({}, "", "", "")
    return RankRecord(rank, (), nothing, {}, (), messages)


def message(op: str, peer: int = -1, number: int = 0, axis: str = "pp", launch: int = 0) -> RecordedMessage:
    splits = (number,) if op == WAIT else ()
    return RecordedMessage(op, axis, (0, 1), 8, "float32", ((2,),), "0F0", "", splits, peer, launch)


def test_two_ranks_that_wait_for_one_another_are_a_deadlock():
    def rank(here: int, there: int, waits_first: bool) -> RankRecord:
        together = 0 if waits_first else 1
        sent, received = message("send", there, launch=together), message("receive", there, launch=together)
        wait = message(WAIT, there)
        return messages_of(here, received, *((wait, sent) if waits_first else (sent, wait)))

    assert disagreements([rank(0, 1, False), rank(1, 0, True)]) == []
    found = disagreements([rank(0, 1, True), rank(1, 0, True)])
    assert [each.ranks for each in found] == [(0, 1)]
    assert "deadlock" in found[0].what


def test_a_wait_before_the_receive_is_a_deadlock():
    wait, received = message(WAIT, 1), message("receive", 1)
    other = messages_of(1, message("send", 0))
    assert disagreements([messages_of(0, received, wait), other]) == []
    assert [each.ranks for each in disagreements([messages_of(0, wait, received), other])] == [(0, 1)]


def test_groups_in_another_order_are_a_deadlock():
    tp, dp = message("all-gather", axis="tp"), message("all-gather", axis="dp_shard")
    found = disagreements([messages_of(0, tp, dp), messages_of(1, dp, tp)])
    assert [each.ranks for each in found] == [(0, 1)]
    assert "deadlock" in found[0].what


def nccl(op: str, group: str = "01", ranks: tuple[int, ...] = (0, 1), **fields: Any) -> NcclCall:
    return NcclCall(op, group, ranks, **{"n_elements": 4, "dtype": "bf16", **fields})


def test_nccl_collectives_that_differ_on_one_rank_break_a_rule():
    gather, reduce = nccl("all_gather"), nccl("reduce_scatter")
    assert broken_nccl_rules({0: [gather, reduce], 1: [gather, reduce]}) == []
    for other in (
        [reduce, gather],
        [gather],
        [gather, reduce._replace(n_elements=8)],
        [gather, reduce._replace(dtype="fp32")],
        [gather, reduce._replace(peer=1)],
    ):
        (broken,) = broken_nccl_rules({0: [gather, reduce], 1: other})
        assert broken.ranks == (0, 1)
        assert "over 01" in broken.what


def test_nccl_messages_of_another_communicator_or_size_break_a_rule():
    send, receive = nccl("send", peer=1), nccl("receive", peer=0)
    assert broken_nccl_rules({0: [send], 1: [receive]}) == []
    for other in (receive._replace(group="also 01"), receive._replace(n_elements=8), receive._replace(dtype="fp32")):
        broken = broken_nccl_rules({0: [send], 1: [other]})
        assert {each.what.partition(" over ")[0] for each in broken} == {"message 1 from rank 0 to 1"}


def test_nccl_messages_in_both_directions_wait_for_one_another_unless_they_are_one_launch():
    def rank(peer: int, launch: int) -> list[NcclCall]:
        return [nccl("send", peer=peer, launch=launch), nccl("receive", peer=peer, launch=launch)]

    assert broken_nccl_rules({0: rank(1, 7), 1: rank(0, 3)}) == []
    broken = broken_nccl_rules({0: rank(1, 0), 1: rank(0, 0)})
    assert [each.ranks for each in broken] == [(0, 1)]
    assert "if every call blocks" in broken[0].what


def test_a_ring_of_nccl_messages_is_a_deadlock_and_one_rank_in_the_other_order_resolves_it():
    world = (0, 1, 2)

    def rank(here: int) -> list[NcclCall]:
        after, before = (here + 1) % 3, (here - 1) % 3
        return [nccl("send", "ring", world, peer=after), nccl("receive", "ring", world, peer=before)]

    (broken,) = broken_nccl_rules({here: rank(here) for here in world})
    assert broken.ranks == world
    assert broken_nccl_rules({0: rank(0)[::-1], 1: rank(1), 2: rank(2)}) == []


def test_two_nccl_communicators_in_another_order_on_one_rank_are_a_deadlock():
    tp, dp = nccl("all_gather", "tp"), nccl("all_gather", "dp")
    assert broken_nccl_rules({0: [tp, dp], 1: [tp, dp]}) == []
    (broken,) = broken_nccl_rules({0: [tp, dp], 1: [dp, tp]})
    assert broken.sides == (tp, dp)


def test_calls_to_ranks_without_a_log_are_not_waited_for():
    calls = [nccl("all_gather", "four", (0, 1, 2, 3)), nccl("send", "four", (0, 1, 2, 3), peer=3)]
    assert broken_nccl_rules({0: calls, 1: calls[:1]}) == []
