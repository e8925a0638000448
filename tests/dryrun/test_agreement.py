"""Proves that ranks which would hang on a cluster are found, with both sides, and that healthy ranks are not."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from shardwright.config import parse
from shardwright.dry_run.agreement import disagreements
from shardwright.dry_run.program import dry_rank
from shardwright.dry_run.record import WAIT, Message, Moment, RankRecord
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


Change = Callable[[list[Message]], list[Message]]


def place(messages: list[Message], op: str, axis: str, number: int = 3) -> int:
    """Where the message of that number of an operation over an axis stands."""
    return [at for at, each in enumerate(messages) if (each.op, each.axis) == (op, axis)][number]


def without(op: str, axis: str) -> Change:
    def change(messages: list[Message]) -> list[Message]:
        at = place(messages, op, axis)
        return messages[:at] + messages[at + 1 :]

    return change


def other(op: str, axis: str, **fields: object) -> Change:
    def change(messages: list[Message]) -> list[Message]:
        at = place(messages, op, axis)
        return messages[:at] + [messages[at]._replace(**fields)] + messages[at + 1 :]  # type: ignore[arg-type]

    return change


def swapped(messages: list[Message]) -> list[Message]:
    """An all-gather over tp and the next reduce-scatter over tp in the other order."""
    here = place(messages, "all-gather", "tp")
    there = next(at for at in range(here, len(messages)) if messages[at].op == "reduce-scatter")
    found = list(messages)
    found[here], found[there] = found[there], found[here]
    return found


def waits_first(messages: list[Message]) -> list[Message]:
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
    assert len({None if side is None else side.content for side in found[0].sides}) > 1 or "deadlock" in where


def messages_of(rank: int, *messages: Message) -> RankRecord:
    nothing = Moment({}, "", "", "")
    return RankRecord(rank, (), nothing, {}, (), messages)


def message(op: str, peer: int = -1, number: int = 0, axis: str = "pp") -> Message:
    splits = (number,) if op == WAIT else ()
    return Message(op, axis, (0, 1), 8, "float32", ((2,),), "0F0", "", splits, peer)


def test_two_ranks_that_wait_for_one_another_are_a_deadlock():
    def rank(here: int, there: int, waits_first: bool) -> RankRecord:
        sent, received, wait = message("send", there), message("receive", there), message(WAIT, there)
        return messages_of(here, received, *((wait, sent) if waits_first else (sent, wait)))

    assert disagreements([rank(0, 1, False), rank(1, 0, True)]) == []
    found = disagreements([rank(0, 1, True), rank(1, 0, True)])
    assert [each.ranks for each in found] == [(0, 1)]
    assert "deadlock" in found[0].what


def test_groups_in_another_order_are_a_deadlock():
    tp, dp = message("all-gather", axis="tp"), message("all-gather", axis="dp_shard")
    found = disagreements([messages_of(0, tp, dp), messages_of(1, dp, tp)])
    assert [each.ranks for each in found] == [(0, 1)]
    assert "deadlock" in found[0].what
