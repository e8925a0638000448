"""Whether ranks agree on their messages; where they do not, a cluster would hang or compute nonsense. No torch.

Three rules are checked on the calls of several ranks of one world, either the messages that dry runs record
(`disagreements`) or calls of NCCL (`broken_nccl_rules`):

- every process group: its ranks issue the same collectives in the same order with the same sizes and types;
- every pair of ranks of a group: each send has its receive, in the same order and of the same size and type;
- the order as a whole: no ranks wait for one another. A collective always waits for all its ranks. Messages are
  waited for where the program of a rank does; with NCCL, whose calls may all block, at once.

A group of which only some ranks are recorded is compared among those.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import groupby, permutations, zip_longest
from typing import Generic, NamedTuple, Protocol, TypeVar

from shardwright.dry_run.record import WAIT, Message, RankRecord

_PAIRED = ("send", "receive")


class Call(Protocol):
    """A collective, or a message to or from rank `peer` of the world, over the process group of `ranks`. `content`:
    everything that all ranks of a collective have to agree on, the operation first."""

    @property
    def op(self) -> str: ...
    @property
    def group(self) -> Hashable: ...
    @property
    def ranks(self) -> tuple[int, ...]: ...
    @property
    def peer(self) -> int: ...
    @property
    def content(self) -> tuple[object, ...]: ...
    @property
    def splits(self) -> tuple[int, ...]: ...


class NcclCall(NamedTuple):
    """A call of NCCL on `group`, the name of a communicator, whose ranks have the numbers `ranks` in the world.

    `launch`: calls of a rank that follow each other with the same number are one launch, in which none waits for
    another (`ncclGroupStart` and `ncclGroupEnd`); 0 for a call that is launched alone.
    """

    op: str
    group: str
    ranks: tuple[int, ...]
    n_elements: int
    dtype: str
    peer: int = -1
    launch: int = 0

    @property
    def content(self) -> tuple[object, ...]:
        """What all ranks of a collective have to agree on; `peer` is the root, if it has one."""
        return self.op, self.n_elements, self.dtype, () if self.op in _PAIRED else self.peer

    @property
    def splits(self) -> tuple[int, ...]:
        """NCCL has no uneven collectives; an uneven all-to-all is sends and receives of one launch."""
        return ()


C = TypeVar("C", bound=Call)


class Disagreement(NamedTuple, Generic[C]):
    """What `ranks` do not agree on: for each its call, or None where it has none or has ended."""

    what: str
    ranks: tuple[int, ...]
    sides: tuple[C | None, ...]


def disagreements(records: Sequence[RankRecord]) -> list[Disagreement[Message]]:
    """Everything that the ranks do not agree on; a deadlock only where there is nothing else."""
    messages = {record.rank: record.messages for record in records}
    result = [*_of_groups(messages), *_of_pairs(messages)]
    return result or [*_deadlocks(messages)]


def broken_nccl_rules(calls: Mapping[int, Sequence[NcclCall]]) -> list[Disagreement[NcclCall]]:
    """Every rule of NCCL that the calls of these ranks break, in the order in which each rank issued them; that ranks
    wait for one another only where no other rule is broken."""
    result = [*_of_groups(calls), *_of_pairs(calls)]
    return result or [*_stuck_launches(calls)]


def _of_groups(calls: Mapping[int, Sequence[C]]) -> Iterator[Disagreement[C]]:
    groups: dict[Hashable, dict[int, list[C]]] = defaultdict(dict)
    members: dict[Hashable, tuple[int, ...]] = {}
    for rank, issued in calls.items():
        for call in issued:
            if call.op not in (*_PAIRED, WAIT):
                groups[call.group].setdefault(rank, []).append(call)
                members[call.group] = call.ranks
    for group, by_rank in groups.items():
        ranks = members[group]
        recorded = sorted(calls.keys() & set(ranks))
        lists = [by_rank.get(rank, []) for rank in recorded]
        for at in range(max(map(len, lists))):
            sides = tuple(each[at] if at < len(each) else None for each in lists)
            if len({None if side is None else side.content for side in sides}) > 1 or not _splits_match(
                recorded, ranks, sides
            ):
                yield Disagreement(f"collective {at + 1} over {_name(group)}", tuple(recorded), sides)
                break


def _name(group: Hashable) -> str:
    """A communicator, or the axis of a group of a dry run."""
    return str(group[0] if isinstance(group, tuple) else group)


def _splits_match(members: Sequence[int], ranks: Sequence[int], sides: Sequence[C | None]) -> bool:
    """Whether what each rank of an uneven all-to-all sends to another is what that one receives."""
    uneven = {rank: side.splits for rank, side in zip(members, sides, strict=True) if side is not None and side.splits}
    n = len(ranks)
    for here, splits in uneven.items():
        for there, others in uneven.items():
            # (rows from each rank, -1, rows to each rank)
            if splits[n + 1 + ranks.index(there)] != others[ranks.index(here)]:
                return False
    return True


def _of_pairs(calls: Mapping[int, Sequence[C]]) -> Iterator[Disagreement[C]]:
    by_line: dict[tuple[str, Hashable, int, int], list[C]] = defaultdict(list)
    """(operation, group, rank, peer) -> its messages."""
    for rank, issued in calls.items():
        for call in issued:
            if call.op in _PAIRED:
                by_line[call.op, call.group, rank, call.peer].append(call)
    groups = dict.fromkeys(group for _, group, _, _ in by_line)
    for (sender, receiver), group in ((pair, group) for pair in permutations(calls, 2) for group in groups):
        sends = by_line.get(("send", group, sender, receiver), [])
        receives = by_line.get(("receive", group, receiver, sender), [])
        for number, (sent, received) in enumerate(zip_longest(sends, receives), 1):
            if sent is None or received is None or sent.content[1:] != received.content[1:]:
                yield Disagreement(
                    f"message {number} from rank {sender} to {receiver}", (sender, receiver), (sent, received)
                )
                break


def _deadlocks(calls: Mapping[int, Sequence[Message]]) -> Iterator[Disagreement[Message]]:
    """Run the lists of all ranks together until none can go on."""
    at = dict.fromkeys(calls, 0)
    sent: dict[tuple[int, int], int] = defaultdict(int)
    """(sender, receiver) -> messages that the sender has started."""

    def now(rank: int) -> Message | None:
        return calls[rank][at[rank]] if at[rank] < len(calls[rank]) else None

    def can(rank: int) -> bool:
        message = now(rank)
        if message is None:
            return False
        if message.op in _PAIRED:
            return True
        if message.op == WAIT:
            return message.peer not in calls or sent[message.peer, rank] > message.splits[0]
        others = [other for other in message.ranks if other in calls]
        return all((there := now(other)) is not None and there[:3] == message[:3] for other in others)

    moved = True
    while moved:
        moved = False
        for rank in calls:
            while can(rank):
                message = now(rank)
                assert message is not None
                moved = True
                if message.op in _PAIRED or message.op == WAIT:
                    sent[rank, message.peer] += message.op == "send"
                    at[rank] += 1
                else:
                    for other in message.ranks:
                        if other in calls:
                            at[other] += 1
    stuck = tuple(rank for rank in calls if now(rank) is not None)
    if stuck:
        yield Disagreement("deadlock: these ranks wait for one another", stuck, tuple(now(rank) for rank in stuck))


class _Launches:
    """The launches of a rank, of which the first is under way; its calls end in any order."""

    def __init__(self, calls: Sequence[NcclCall]) -> None:
        # A call that is launched alone has a number of its own, its place.
        numbered = groupby(enumerate(calls), lambda each: (each[1].launch, each[0] if not each[1].launch else -1))
        self._later = [[call for _, call in launch] for _, launch in numbered]
        self._later.reverse()
        self.under_way: list[NcclCall] = self._later.pop() if self._later else []

    def counterpart(self, call: NcclCall, rank: int, other: int) -> NcclCall | None:
        """The first call under way here, on rank `other`, that is a part of `call` of `rank`, which is under way."""
        if call.op not in _PAIRED:
            return next((each for each in self.under_way if each.group == call.group and each.op not in _PAIRED), None)
        op = _PAIRED[1 - _PAIRED.index(call.op)]
        return next(
            (each for each in self.under_way if (each.op, each.group, each.peer) == (op, call.group, rank)), None
        )

    def end(self, call: NcclCall) -> None:
        """A call under way has ended, and with the last one of the launch the next launch begins."""
        self.under_way.remove(call)
        if not self.under_way and self._later:
            self.under_way = self._later.pop()


def _stuck_launches(calls: Mapping[int, Sequence[NcclCall]]) -> Iterator[Disagreement[NcclCall]]:
    """Run the launches of all ranks together, each blocking its rank until its calls have met their counterparts."""
    launches = {rank: _Launches(issued) for rank, issued in calls.items()}

    def parts_of(rank: int, call: NcclCall) -> dict[int, NcclCall] | None:
        """The calls that end together with `call`, by rank; None while one is missing."""
        ranks = (rank, call.peer) if call.op in _PAIRED else call.ranks
        parts = {}
        for other in ranks:
            if other in launches:
                part = call if other == rank else launches[other].counterpart(call, rank, other)
                if part is None:
                    return None
                parts[other] = part
        return parts

    moved = True
    while moved:
        moved = False
        for rank, of_rank in launches.items():
            while ended := next((parts for call in of_rank.under_way if (parts := parts_of(rank, call))), None):
                moved = True
                for other, part in ended.items():
                    launches[other].end(part)
    stuck = {rank: of_rank.under_way[0] for rank, of_rank in launches.items() if of_rank.under_way}
    if stuck:
        what = "deadlock: these ranks wait for one another if every call blocks"
        yield Disagreement(what, tuple(stuck), tuple(stuck.values()))
