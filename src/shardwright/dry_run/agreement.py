"""Check the calls of several ranks against NCCL's rules; a violation causes a hang or wrong results. No torch.

The calls come from dry runs (`disagreements`) or from NCCL's log (`broken_nccl_rules`). The rules:

- Collectives: the ranks of a communicator issue the same collectives in the same order with the same counts and types.
- Point-to-point: for each pair of ranks of a communicator, the k-th send matches the k-th receive in size and type.
- Order: no ranks wait for each other if every call blocks until its peers have issued their part. NCCL guarantees no
  more, since its calls wait for free channels and buffers. Calls of one launch do not wait for each other.

In each communicator, the ranks with known calls are compared.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import groupby, zip_longest
from typing import Generic, NamedTuple, Protocol, TypeVar

from shardwright.dry_run.record import WAIT, RankRecord, RecordedMessage
from shardwright.system.processes import ranks_in_words

PAIRED = ("send", "receive")
"""The operations between two ranks."""
_MOST_SIDES = 4
"""Maximum number of different calls that a sentence lists."""


class Call(Protocol):
    """A collective, or a message to or from rank `peer` of the world, over the process group of `ranks`. `content`: the
    values that all ranks of a collective must agree on, the operation first."""

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
    @property
    def launch(self) -> int: ...
    @property
    def words(self) -> str: ...


C = TypeVar("C", bound=Call)


class Disagreement(NamedTuple, Generic[C]):
    """A broken rule. `what`: the communicator and the index of the call in it. `sides`: the call of each of `ranks`,
    None for a rank without further calls."""

    what: str
    ranks: tuple[int, ...]
    sides: tuple[C | None, ...]

    @property
    def sentence(self) -> str:
        """Return the rule with the call of each rank; ranks with equal calls are grouped."""
        by_call: dict[object, list[int]] = defaultdict(list)
        words: dict[object, str] = {}
        for rank, side in zip(self.ranks, self.sides, strict=True):
            key = None if side is None else (side.content, side.splits, side.peer)
            by_call[key].append(rank)
            words.setdefault(key, "no call" if side is None else side.words)
        sides = [f"{words[key]} on {ranks_in_words(ranks)}" for key, ranks in by_call.items()]
        more = [f"{len(sides) - _MOST_SIDES} other calls"] if len(sides) > _MOST_SIDES else []
        return f"{self.what}: {'; '.join(sides[:_MOST_SIDES] + more)}"


def disagreements(records: Sequence[RankRecord]) -> list[Disagreement[RecordedMessage]]:
    """Return every rule that the messages of these dry runs break."""
    return broken_nccl_rules({record.rank: record.messages for record in records})


def broken_nccl_rules(calls: Mapping[int, Sequence[C]]) -> list[Disagreement[C]]:
    """Return every rule that the calls of these ranks break. `calls`: calls of each rank in issue order. The order rule
    is checked only if no other rule is broken."""
    result = [*_group_disagreements(calls), *_pair_disagreements(calls)]
    return result or [*_stuck_launches(calls)]


class AgreementCounts(NamedTuple):
    """Numbers of ranks, calls, communicators and sends to one of the ranks that `disagreements` compares."""

    ranks: int
    calls: int
    communicators: int
    matched_sends: int


def checked(records: Sequence[RankRecord]) -> AgreementCounts:
    """Count the calls that `disagreements` compares."""
    ranks = {record.rank for record in records}
    calls = [call for record in records for call in record.messages if call.op != WAIT and len(call.ranks) > 1]
    sends = sum(call.op == "send" and call.peer in ranks for call in calls)
    return AgreementCounts(len(ranks), len(calls), len({call.group for call in calls}), sends)


def _group_disagreements(calls: Mapping[int, Sequence[C]]) -> Iterator[Disagreement[C]]:
    groups: dict[Hashable, dict[int, list[C]]] = defaultdict(dict)
    members: dict[Hashable, tuple[int, ...]] = {}
    for rank, issued in calls.items():
        for call in issued:
            if call.op not in (*PAIRED, WAIT):
                groups[call.group].setdefault(rank, []).append(call)
                members[call.group] = call.ranks
    for group, by_rank in groups.items():
        ranks = members[group]
        recorded = sorted(calls.keys() & set(ranks))
        lists = [by_rank.get(rank, []) for rank in recorded]
        for at in range(max(map(len, lists))):
            sides = tuple(calls_of_rank[at] if at < len(calls_of_rank) else None for calls_of_rank in lists)
            if len({None if side is None else side.content for side in sides}) > 1 or not _splits_match(
                recorded, ranks, sides
            ):
                yield Disagreement(
                    f"collective {at + 1} over {_name(group)} ({ranks_in_words(ranks)})", tuple(recorded), sides
                )
                break


def _name(group: Hashable) -> str:
    """Return the name of a communicator, or the axis of a group of a dry run."""
    return str(group[0] if isinstance(group, tuple) else group)


def _splits_match(members: Sequence[int], ranks: Sequence[int], sides: Sequence[C | None]) -> bool:
    """Return whether each rank's sends in an uneven all-to-all match the receives of the other ranks."""
    uneven = {rank: side.splits for rank, side in zip(members, sides, strict=True) if side is not None and side.splits}
    n = len(ranks)
    for rank, splits in uneven.items():
        for peer, others in uneven.items():
            # (rows from each rank, -1, rows to each rank)
            if splits[n + 1 + ranks.index(peer)] != others[ranks.index(rank)]:
                return False
    return True


def _pair_disagreements(calls: Mapping[int, Sequence[C]]) -> Iterator[Disagreement[C]]:
    by_line: dict[tuple[str, Hashable, int, int], list[C]] = defaultdict(list)
    """(operation, group, rank, peer) -> its messages."""
    for rank, issued in calls.items():
        for call in issued:
            if call.op in PAIRED:
                by_line[call.op, call.group, rank, call.peer].append(call)
    lines = dict.fromkeys((group, *_ends(op, rank, peer)) for op, group, rank, peer in by_line)
    for group, sender, receiver in lines:
        if not {sender, receiver} <= calls.keys():
            continue
        sends = by_line.get(("send", group, sender, receiver), [])
        receives = by_line.get(("receive", group, receiver, sender), [])
        for number, (sent, received) in enumerate(zip_longest(sends, receives), 1):
            if sent is None or received is None or sent.content[1:] != received.content[1:]:
                what = f"message {number} from rank {sender} to {receiver} over {_name(group)}"
                yield Disagreement(what, (sender, receiver), (sent, received))
                break


def _ends(op: str, rank: int, peer: int) -> tuple[int, int]:
    """Return (sender, receiver) of a message."""
    return (rank, peer) if op == "send" else (peer, rank)


class _Launches(Generic[C]):
    """The remaining launches of a rank. The first launch is in progress; its calls end in any order."""

    def __init__(self, calls: Sequence[C]) -> None:
        # A call that is launched alone has a unique number, its index.
        numbered = groupby(
            enumerate(calls),
            lambda numbered_call: (numbered_call[1].launch, numbered_call[0] if not numbered_call[1].launch else -1),
        )
        self._later = [[call for _, call in launch] for _, launch in numbered]
        self._later.reverse()
        self.under_way: list[C] = self._later.pop() if self._later else []
        self.received: Counter[int] = Counter()
        """Rank -> number of messages received from it."""
        self.n_ended = 0
        """Number of completed calls without waits."""

    def counterpart(self, call: C, rank: int, other: int) -> C | None:
        """Return the first call in progress on this rank, `other`, that matches `call` in progress on `rank`."""
        if call.op not in PAIRED:
            return next(
                (
                    other_call
                    for other_call in self.under_way
                    if other_call.group == call.group and other_call.op not in (*PAIRED, WAIT)
                ),
                None,
            )
        op = PAIRED[1 - PAIRED.index(call.op)]
        return next(
            (
                other_call
                for other_call in self.under_way
                if (other_call.op, other_call.group, other_call.peer) == (op, call.group, rank)
            ),
            None,
        )

    def end(self, call: C) -> None:
        """End a call in progress. After the last call of the launch, start the next launch."""
        self.under_way.remove(call)
        self.received[call.peer] += call.op == "receive"
        self.n_ended += call.op != WAIT
        if not self.under_way and self._later:
            self.under_way = self._later.pop()


def _stuck_launches(calls: Mapping[int, Sequence[C]]) -> Iterator[Disagreement[C]]:
    """Simulate the launches of all ranks; each launch blocks its rank until its calls have met their counterparts."""
    launches = {rank: _Launches(issued) for rank, issued in calls.items()}

    def parts_of(rank: int, call: C) -> dict[int, C] | None:
        """Return the calls that end together with `call`, by rank, or None while one is missing."""
        if call.op == WAIT:
            has_come = call.peer not in launches or launches[rank].received[call.peer] > call.splits[0]
            return {rank: call} if has_come else None
        ranks = (rank, call.peer) if call.op in PAIRED else call.ranks
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
    stuck = {rank: of_rank for rank, of_rank in launches.items() if of_rank.under_way}
    if stuck:
        places = ", ".join(f"rank {rank} at its call {stuck[rank].n_ended + 1}" for rank in list(stuck)[:_MOST_SIDES])
        what = f"deadlock: these ranks wait for each other if every call blocks ({places})"
        yield Disagreement(what, tuple(stuck), tuple(of_rank.under_way[0] for of_rank in stuck.values()))
