"""Inserts the point-to-point messages of a schedule between its actions.

The lists are made in rounds. In a round every rank runs its next action, if the result that the action depends on was
computed at least two rounds before (one round before on the same rank). Then the results of the round that another rank
needs are added to the lists of both ranks; messages between the same two ranks form one exchange. So a receive is
started at least one action before the action that needs it, if the rank has another action to run, and the message
overlaps with that action.

The rounds are a topological order of all actions and exchanges, and each rank's list follows it. So there is no cyclic
wait, even if ranks wait for each other at every exchange.
"""

from collections import defaultdict
from typing import Literal, NamedTuple

from shardwright.schedule.actions import Action, Result, Schedule
from shardwright.schedule.validate import deadlock
from shardwright.system.errors import ScheduleError


class StageMessage(NamedTuple):
    """A tensor that `stage` needs from another rank for a micro-batch: its input for F, its output's gradient for B."""

    stage: int
    op: Literal["F", "B"]
    microbatch: int
    sender: int
    receiver: int


class PairExchange(NamedTuple):
    """The messages of one round between two ranks, `low` < `high`, in one direction or in both."""

    low: int
    high: int
    messages: tuple[StageMessage, ...]


def with_messages(schedule: Schedule) -> list[list[Action | PairExchange]]:
    """Return every rank's actions with the exchanges between them.

    Raises ScheduleError for a schedule that deadlocks.
    """
    lists: list[list[Action | PairExchange]] = [[] for _ in schedule.ranks]
    position = [0] * schedule.n_ranks
    made_in: dict[Result, int] = {}
    now = last = 0
    while any(at < len(actions) for at, actions in zip(position, schedule.ranks, strict=True)):
        heads = ((rank, actions[at]) for rank, (at, actions) in enumerate(zip(position, schedule.ranks, strict=True))
                 if at < len(actions))  # fmt: skip
        ready = [(rank, action) for rank, action in heads if _ready(schedule, rank, action, made_in, now)]
        if ready:
            last = now
        elif now > last + 1:
            raise ScheduleError(f"{schedule.name}: {deadlock(schedule)}")
        between: defaultdict[tuple[int, int], list[StageMessage]] = defaultdict(list)
        for rank, action in ready:
            position[rank] += 1
            lists[rank].append(action)
            made_in[action.makes] = now
            if (message := sent_after(schedule, rank, action)) is not None:
                between[min(rank, message.receiver), max(rank, message.receiver)].append(message)
        for (low, high), messages in sorted(between.items()):
            exchange = PairExchange(low, high, tuple(messages))
            lists[low].append(exchange)
            lists[high].append(exchange)
        now += 1
    return lists


def sent_after(schedule: Schedule, rank: int, action: Action) -> StageMessage | None:
    """Return the message that a rank sends after an action; None if no other rank needs its result."""
    if action.op == "W":
        return None
    stage = action.stage + (1 if action.op == "F" else -1)
    receiver = schedule.place.get((stage, action.microbatch), rank)
    if receiver == rank:
        return None
    return StageMessage(stage, "F" if action.op == "F" else "B", action.microbatch, rank, receiver)


def _ready(schedule: Schedule, rank: int, action: Action, made_in: dict[Result, int], now: int) -> bool:
    needed = schedule.waits_for(action)
    if needed is None:
        return True
    stage, _, microbatch = needed
    rounds = 1 if schedule.place.get((stage, microbatch)) == rank else 2
    return needed in made_in and made_in[needed] + rounds <= now
