"""Where ranks send and receive: a schedule with its messages between its actions.

A message is sent right after the action that makes it. It is put into the lists of sender and receiver at the same
moment of one common order, so that two ranks see the messages between them in the same order, whichever way they go:
links that match messages by order (gloo) match the right ones, and links that carry one at a time (NCCL) never have
both ends waiting to send.
"""

from typing import Literal, NamedTuple

from shardwright.errors import ScheduleError
from shardwright.schedule.actions import Action, Schedule


class Message(NamedTuple):
    """One end of a transfer: `send` the result of (stage, microbatch), or `receive` what it needs, from or to a
    `peer` rank; `F` the output of a forward pass, `B` the gradient of an input."""

    way: Literal["send", "receive"]
    stage: int
    op: Literal["F", "B"]
    microbatch: int
    peer: int


def with_messages(schedule: Schedule) -> list[list[Action | Message]]:
    """Every rank's actions with the messages between them.

    Raises ScheduleError where no action can come next: something is needed before it is made.
    """
    lists: list[list[Action | Message]] = [[] for _ in schedule.ranks]
    done: set[tuple[int, str, int]] = set()
    at = [0] * schedule.n_ranks
    while any(position < len(actions) for position, actions in zip(at, schedule.ranks, strict=True)):
        before = sum(at)
        for rank, actions in enumerate(schedule.ranks):
            if at[rank] == len(actions) or not _ready(schedule, actions[at[rank]], done):
                continue
            action = actions[at[rank]]
            at[rank] += 1
            lists[rank].append(action)
            done.add((action.stage, "F" if action.op == "F" else "B" if action.sends_back else "W", action.microbatch))
            _send(schedule, rank, action, lists)
        if sum(at) == before:
            stuck = "; ".join(
                f"rank {rank} at {actions[at[rank]]}"
                for rank, actions in enumerate(schedule.ranks)
                if at[rank] < len(actions)
            )
            raise ScheduleError(f"{schedule.name}: every rank waits for another: {stuck}")
    return lists


def _ready(schedule: Schedule, action: Action, done: set[tuple[int, str, int]]) -> bool:
    needed = schedule.needs(action)
    return needed is None or (needed[0], "F" if action.op == "F" else "B", needed[1]) in done


def _send(schedule: Schedule, rank: int, action: Action, lists: list[list[Action | Message]]) -> None:
    """Put the result of an action into the lists of both ends, if another rank needs it."""
    if action.op == "W":
        return
    to = action.stage + (1 if action.op == "F" else -1)
    if not 0 <= to < schedule.n_stages:
        return
    peer = schedule.place[to, action.microbatch]
    if peer != rank:
        op: Literal["F", "B"] = "F" if action.op == "F" else "B"
        lists[rank].append(Message("send", action.stage, op, action.microbatch, peer))
        lists[peer].append(Message("receive", to, op, action.microbatch, rank))
