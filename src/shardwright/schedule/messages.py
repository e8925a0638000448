"""Where ranks send and receive: a schedule with its messages between its actions.

The lists are made in rounds. In a round every rank takes its next action, if what the action needs was made two rounds
ago or before (one round ago on the same rank); then the results of the round that another rank needs are put into the
lists of both ranks, those between the same two ranks together, as one exchange. So a receive stands at least one action
before the action that needs it wherever the rank has something else to do, and the message travels meanwhile.

Rounds are an order of all actions and exchanges in which everything comes after what it needs, and each rank's list
keeps to it. Ranks that wait at every exchange for the other end therefore never wait in a circle.
"""

from collections import defaultdict
from typing import Literal, NamedTuple

from shardwright.errors import ScheduleError
from shardwright.schedule.actions import Action, Result, Schedule
from shardwright.schedule.validate import deadlock


class Message(NamedTuple):
    """What `stage` needs from another rank for a micro-batch: its input for F, the gradient of its output for B."""

    stage: int
    op: Literal["F", "B"]
    microbatch: int
    sender: int
    receiver: int


class Exchange(NamedTuple):
    """The messages of one round between two ranks, `low` < `high`, in one direction or in both."""

    low: int
    high: int
    messages: tuple[Message, ...]


def with_messages(schedule: Schedule) -> list[list[Action | Exchange]]:
    """Every rank's actions with the exchanges between them.

    Raises ScheduleError where no action can come next: something is needed before it is made.
    """
    lists: list[list[Action | Exchange]] = [[] for _ in schedule.ranks]
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
        between: defaultdict[tuple[int, int], list[Message]] = defaultdict(list)
        for rank, action in ready:
            position[rank] += 1
            lists[rank].append(action)
            made_in[action.makes] = now
            if (message := sent_after(schedule, rank, action)) is not None:
                between[min(rank, message.receiver), max(rank, message.receiver)].append(message)
        for (low, high), messages in sorted(between.items()):
            exchange = Exchange(low, high, tuple(messages))
            lists[low].append(exchange)
            lists[high].append(exchange)
        now += 1
    return lists


def sent_after(schedule: Schedule, rank: int, action: Action) -> Message | None:
    """What a rank sends when it has run an action; None where no other rank needs its result."""
    if action.op == "W":
        return None
    stage = action.stage + (1 if action.op == "F" else -1)
    receiver = schedule.place.get((stage, action.microbatch), rank)
    if receiver == rank:
        return None
    return Message(stage, "F" if action.op == "F" else "B", action.microbatch, rank, receiver)


def _ready(schedule: Schedule, rank: int, action: Action, made_in: dict[Result, int], now: int) -> bool:
    needed = schedule.waits_for(action)
    if needed is None:
        return True
    stage, _, microbatch = needed
    rounds = 1 if schedule.place.get((stage, microbatch)) == rank else 2
    return needed in made_in and made_in[needed] + rounds <= now
