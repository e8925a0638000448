"""Proves that a rank knows which messages it has begun, and which it waits for, while it does."""

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwright.layout.layout import Layout
from shardwright.parallel import apply as applied
from shardwright.parallel.point_to_point import MessageChannel, TensorMessage, begun, start, waited_for
from tests.distributed import run_ranks
from tests.marks import prove
from tests.mutation import Mutation, mutated
from tests.training.worlds import build

THERE, BACK = MessageChannel("cp", 1, 0, 1), MessageChannel("cp", 1, 1, 0)


def waits_for_the_third(
    mutations: tuple[Mutation, ...],
) -> tuple[list[float], Any, list[Any], dict[MessageChannel, int]]:
    """To be run on 2 ranks: rank 0 has sent 2 of 3 messages, of which rank 1 has begun to receive all. Returns what has
    come; on rank 1 what it was waiting for and had begun meanwhile; what is waited for in the end; and what was begun.
    """
    with mutated(*mutations):
        rank, world, seen, ready = dist.get_rank(), dist.group.WORLD, [], threading.Event()
        assert world is not None

        def message(number: int) -> TensorMessage:
            return TensorMessage(
                rank == 0, torch.full((2,), float(number) if rank == 0 else 0.0), 1 - rank, f"number {number}"
            )

        answer = start([TensorMessage(rank == 1, torch.zeros(1), 1 - rank, "back")], world, "cp", tag=1)
        messages = start([message(1), message(2)], world, "cp", tag=1)
        if rank == 1:
            messages += start([message(3)], world, "cp", tag=1)

            def look() -> None:
                waiting = [(each.what, each.line, each.number) for each in waited_for()]
                seen.append((waiting, begun()))
                ready.set()
                dist.send(torch.zeros(1), 0, tag=7)

            threading.Timer(0.5, look).start()
        else:
            dist.recv(torch.zeros(1), 1, tag=7)
            messages += start([message(3)], world, "cp", tag=1)
        found = [float(each.wait()[0]) for each in (*messages, *answer)]
        return found[:3], seen, waited_for(), begun()


def check(mutations: tuple[Mutation, ...] = ()) -> None:
    (_, _, left, there), (found, seen, left_too, here) = run_ranks(waits_for_the_third, 2, mutations)
    assert found == [1.0, 2.0, 3.0]
    assert seen == [([("number 3", THERE, 3)], {BACK: 1, THERE: 3})]
    assert left == left_too == []
    assert there == here == {BACK: 1, THERE: 3}


def test_a_rank_knows_what_it_waits_for_and_what_it_has_begun():
    check()


def connected_at(layout: Layout) -> list[tuple[int, ...]]:
    """The ranks of the groups that `apply` connects on the calling rank."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(applied, "connect", lambda group: found.append(tuple(dist.get_process_group_ranks(group))))
        build(layout, torch.float32)
    return found


def test_a_ring_is_connected_by_all_of_its_ranks_before_its_first_message():
    layout = Layout(cp=4, cp_method="usp", ulysses_degree=2)
    assert run_ranks(connected_at, 4, layout) == [[(0, 2)], [(1, 3)], [(0, 2)], [(1, 3)]]


BUGS = {
    "a message that is waited for is not told": Mutation(
        "shardwright.parallel.point_to_point:PendingMessage.wait", "_waited_for.append(self)", "pass"
    ),
    "messages in both directions are counted together": Mutation(
        "tests.parallel.test_point_to_point:start",
        "MessageChannel(axis, tag, source, target)",
        "MessageChannel(axis, tag, min(source, target), max(source, target))",
    ),
    "a rank has begun the messages alone that it sends": Mutation(
        "tests.parallel.test_point_to_point:start", "_begun[line] += 1", "_begun[line] += line.source == own"
    ),
}


@prove
@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_seen(name: str):
    with pytest.raises(Exception):  # noqa: B017
        check((BUGS[name],))
