"""Whether ranks agree on their messages; where they do not, a cluster would hang or compute nonsense. No torch.

Three things are compared, on records of ranks of one world:

- every process group: its ranks issue the same collectives in the same order with the same sizes and types;
- every pair of ranks: each send has its receive, in the same order and of the same size and type;
- the order as a whole: with every collective waiting for all its ranks, and every rank waiting for a message where its
  program does, no ranks wait for one another.

A group of which only some ranks are recorded is compared among those.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import permutations, zip_longest
from typing import NamedTuple

from shardwright.dry_run.record import WAIT, Message, RankRecord

_PAIRED = ("send", "receive")


class Disagreement(NamedTuple):
    """What `ranks` do not agree on: for each its message, or None where it has none or has ended."""

    what: str
    ranks: tuple[int, ...]
    sides: tuple[Message | None, ...]


def disagreements(records: Sequence[RankRecord]) -> list[Disagreement]:
    """Everything that the ranks do not agree on; a deadlock only where there is nothing else."""
    found = [*_of_groups(records), *_of_pairs(records)]
    return found or [*_deadlocks(records)]


def _of_groups(records: Sequence[RankRecord]) -> Iterator[Disagreement]:
    groups: dict[tuple[str, tuple[int, ...]], dict[int, list[Message]]] = defaultdict(dict)
    for record in records:
        for message in record.messages:
            if message.op not in (*_PAIRED, WAIT):
                groups[message.axis, message.ranks].setdefault(record.rank, []).append(message)
    there = {record.rank for record in records}
    for (axis, ranks), by_rank in groups.items():
        members = sorted(there.intersection(ranks))
        lists = [by_rank.get(rank, []) for rank in members]
        for at in range(max(map(len, lists))):
            sides = tuple(each[at] if at < len(each) else None for each in lists)
            if len({None if side is None else side.content for side in sides}) > 1 or not _splits_match(
                members, ranks, sides
            ):
                yield Disagreement(f"collective {at + 1} over {axis}", tuple(members), sides)
                break


def _splits_match(members: Sequence[int], ranks: Sequence[int], sides: Sequence[Message | None]) -> bool:
    """Whether what each rank of an uneven all-to-all sends to another is what that one receives."""
    uneven = {rank: side.splits for rank, side in zip(members, sides, strict=True) if side is not None and side.splits}
    n = len(ranks)
    for here, splits in uneven.items():
        for there, others in uneven.items():
            # (rows from each rank, -1, rows to each rank)
            if splits[n + 1 + ranks.index(there)] != others[ranks.index(here)]:
                return False
    return True


def _of_pairs(records: Sequence[RankRecord]) -> Iterator[Disagreement]:
    by_rank = {record.rank: record.messages for record in records}
    for sender, receiver in permutations(by_rank, 2):
        sends = [each for each in by_rank[sender] if each.op == "send" and each.peer == receiver]
        receives = [each for each in by_rank[receiver] if each.op == "receive" and each.peer == sender]
        for number, (sent, received) in enumerate(zip_longest(sends, receives), 1):
            if sent is None or received is None or sent.content[1:] != received.content[1:]:
                yield Disagreement(
                    f"message {number} from rank {sender} to {receiver}", (sender, receiver), (sent, received)
                )
                break


def _deadlocks(records: Sequence[RankRecord]) -> Iterator[Disagreement]:
    """Run the lists of all ranks together until none can go on."""
    lists = {record.rank: record.messages for record in records}
    at = dict.fromkeys(lists, 0)
    sent: dict[tuple[int, int], int] = defaultdict(int)
    """(sender, receiver) -> messages that the sender has started."""

    def now(rank: int) -> Message | None:
        return lists[rank][at[rank]] if at[rank] < len(lists[rank]) else None

    def can(rank: int) -> bool:
        message = now(rank)
        if message is None:
            return False
        if message.op in _PAIRED:
            return True
        if message.op == WAIT:
            return message.peer not in lists or sent[message.peer, rank] > message.splits[0]
        others = [other for other in message.ranks if other in lists]
        return all((there := now(other)) is not None and there[:3] == message[:3] for other in others)

    moved = True
    while moved:
        moved = False
        for rank in lists:
            while can(rank):
                message = now(rank)
                assert message is not None
                moved = True
                if message.op in _PAIRED or message.op == WAIT:
                    sent[rank, message.peer] += message.op == "send"
                    at[rank] += 1
                else:
                    for other in message.ranks:
                        if other in lists:
                            at[other] += 1
    stuck = tuple(rank for rank in lists if now(rank) is not None)
    if stuck:
        yield Disagreement("deadlock: these ranks wait for one another", stuck, tuple(now(rank) for rank in stuck))
