"""Reads the calls that nccl.cpp has written, for `broken_nccl_rules` (dry_run/agreement.py)."""

import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from shardwright.dry_run.agreement import PAIRED, Disagreement, broken_nccl_rules

_LINE = re.compile(
    r"(?P<op>\w+) (?P<group>\w+) (?P<rank>\d+)/(?P<size>\d+) count=(?P<count>\d+) dtype=(?P<dtype>\d+) "
    r"peer=(?P<peer>-?\d+) stream=(?P<stream>\S+) group=(?P<launch>\d+)"
)
_START = "init"
_RENAMED = {"recv": "receive"}
_DTYPES = [
    "int8",
    "uint8",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "fp16",
    "fp32",
    "fp64",
    "bf16",
    "fp8_e4m3",
    "fp8_e5m2",
]


class NcclCall(NamedTuple):
    """A call of NCCL on `group`, the name of a communicator, whose ranks have the numbers `ranks` in the world.

    `launch`: consecutive calls of a rank with the same number are one launch (`ncclGroupStart` and `ncclGroupEnd`),
    whose calls do not wait for each other; 0 for a call that is launched alone.
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
        """The values that all ranks of a collective must agree on; `peer` is the root, if there is one."""
        return self.op, self.n_elements, self.dtype, () if self.op in PAIRED else self.peer

    @property
    def splits(self) -> tuple[int, ...]:
        """Return no splits. NCCL has no uneven collectives; an uneven all-to-all is a launch of sends and receives."""
        return ()

    @property
    def words(self) -> str:
        """Return operation, communicator, number of elements and type as text."""
        root = f", root {self.peer}" if self.op not in PAIRED and self.peer >= 0 else ""
        return f"{self.op} over {self.group} of {self.n_elements} {self.dtype}{root}"


@dataclass(frozen=True)
class NcclLog:
    """The calls of each rank of a run, with the start of each communicator, which blocks a rank like a collective;
    `sizes`: the number of ranks of each communicator; `most_streams`: the largest number of streams on which a rank has
    used the same communicator, which NCCL allows and orders by events."""

    calls: dict[int, list[NcclCall]]
    sizes: dict[str, int]
    most_streams: int

    @property
    def n_communicators(self) -> int:
        """Communicators that were used."""
        return len({call.group for calls in self.calls.values() for call in calls if call.op != _START})

    @property
    def n_calls(self) -> int:
        """Calls of all ranks, without the starts of communicators."""
        return sum(call.op != _START for calls in self.calls.values() for call in calls)

    def broken_rules(self) -> list[Disagreement[NcclCall]]:
        """The rules of NCCL that the calls break. Ranks that start a communicator wait for all of its ranks."""
        result = []
        for group, size in self.sizes.items():
            starts = {rank: call for rank, calls in self.calls.items() for call in calls if call[:2] == (_START, group)}
            if len(starts) < size:
                what = f"communicator {group} of {size} ranks is started by {len(starts)}"
                result.append(Disagreement(what, tuple(starts), tuple(starts.values())))
        return result or broken_nccl_rules(self.calls)


def read_log(folder: Path) -> NcclLog:
    """The logs of all ranks, RANK-PID.log; of a rank with several processes the calls of one after those of another."""
    lines = {
        path: [match for line in path.read_text().splitlines() if (match := _LINE.fullmatch(line))]
        for path in sorted(folder.glob("*.log"))
    }
    members: dict[str, dict[int, int]] = defaultdict(dict)
    """communicator -> number in the communicator -> rank of the world."""
    for path, matches in lines.items():
        for match in matches:
            if match["op"] != "split":
                members[match["group"]][int(match["rank"])] = _rank_of(path)
    calls: dict[int, list[NcclCall]] = defaultdict(list)
    streams: dict[tuple[int, str], set[str]] = defaultdict(set)
    sizes: dict[str, int] = {}
    for path, matches in lines.items():
        rank = _rank_of(path)
        for match in matches:
            if match["op"] == "split":
                continue
            if match["op"] == _START:
                sizes[match["group"]] = int(match["size"])
            ranks, peer = members[match["group"]], int(match["peer"])
            call = NcclCall(
                _RENAMED.get(match["op"], match["op"]),
                match["group"],
                tuple(ranks[number] for number in sorted(ranks)),
                int(match["count"]),
                _DTYPES[int(match["dtype"])],
                ranks[peer] if peer >= 0 else -1,
                0 if match["op"] == _START else int(match["launch"]),
            )
            calls[rank].append(call)
            if match["op"] != _START:
                streams[rank, match["group"]].add(match["stream"])
    return NcclLog(dict(calls), sizes, max(map(len, streams.values()), default=0))


def _rank_of(path: Path) -> int:
    return int(path.stem.partition("-")[0])
