"""The record of one rank's step: its actions in order, its allocated tensors, and its messages. No torch.

A record contains only numbers and names, so that it can be sent to another process, compared and written to a file.

`write_trace` writes records for ui.perfetto.dev, `write_snapshot` for pytorch.org/memory_viz. A dry run knows the order
of operations but not their times, so both viewers show operations as microseconds.
"""

import json
import pickle
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from shardwright.system.files import write_whole

KINDS = (
    "parameters",
    "gathered",
    "gradients",
    "states",
    "activations",
    "communication",
    "temporaries",
)
"""The kinds of memory. `gathered`: unsharded parameters of FSDP in the compute type. `states`: optimizer states.
`activations`: memory that a forward pass keeps for the backward pass. `communication`: buffers of collectives and
messages. `temporaries`: memory that is freed within its action."""

WAIT = "wait"
"""Operation of an entry that is not a message: the rank waits for a message whose receive it has started."""


TO_HOST, TO_DEVICE, LINK = "copy to the host", "copy to the device", "link"
READ, WRITE, DISK = "read", "write", "disk"
"""Copies between the device and host memory, and reads and writes of a disk: operations of messages, and their axes."""


class RecordedMessage(NamedTuple):
    """A collective, a send or receive of a message, or a copy to or from the host or a disk.

    `ranks`: the process group, by number in the world. `axis`: the axes of the layout along which the ranks differ.
    `n_bytes`: size of the largest tensor argument; an all-to-all of equal parts without the rank's own part counts as
    if the part were included. `shapes`: shapes of all tensors. `splits`: rows to and from each rank of an uneven
    all-to-all; for a wait, the number of the message among the messages from `peer`. `peer`: the other rank of a send,
    receive or wait, in the world. `launch`: sends and receives with the same number are one `batch_isend_irecv`; 0 for
    others.
    """

    op: str
    axis: str
    ranks: tuple[int, ...]
    n_bytes: int
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    action: str
    module: str
    splits: tuple[int, ...] = ()
    peer: int = -1
    launch: int = 0

    @property
    def group(self) -> tuple[str, tuple[int, ...]]:
        """The process group: the axis and its ranks."""
        return self.axis, self.ranks

    @property
    def content(self) -> tuple[object, ...]:
        """The values that all ranks of a collective must agree on."""
        return self.op, self.n_bytes, self.dtype, self.shapes if not self.splits else ()

    @property
    def words(self) -> str:
        """Return operation, axis, type, shapes, module and action as text."""
        if self.op == WAIT:
            return f"wait for {self.module} from rank {self.peer} in {self.action}"
        shapes = ", ".join(" x ".join(map(str, shape)) or "scalar" for shape in self.shapes)
        rows = f", rows {self.splits[len(self.ranks) + 1 :]} to each rank" if self.splits else ""
        return (
            f"{self.op} over {self.axis} of {self.dtype} {shapes}{rows}, in {self.module or 'no module'}, {self.action}"
        )


@dataclass(slots=True)
class Allocation:
    """A storage. `sizes`: (time, bytes) at each change of its size, first at its creation; the last is 0 after it is
    freed. `op`, `module`, `action`: its creator. `line`: the innermost line outside of PyTorch; in the backward pass of
    PyTorch's own operations, the line that started the backward pass."""

    op: str
    module: str
    action: str
    shape: tuple[int, ...]
    dtype: str
    sizes: list[tuple[int, int]]
    kind: str = ""
    line: str = ""


class PeakTensor(NamedTuple):
    """A tensor that is alive at the peak."""

    n_bytes: int
    kind: str
    shape: tuple[int, ...]
    dtype: str
    op: str
    module: str
    action: str
    line: str


class Moment(NamedTuple):
    """Live bytes at one moment, by kind. `action` and `module` are running; `op` made the last allocation."""

    kinds: dict[str, int]
    action: str
    module: str
    op: str

    @property
    def n_bytes(self) -> int:
        """Return the sum of all kinds."""
        return sum(self.kinds.values())


@dataclass(frozen=True)
class History:
    """All events of a rank's step in order of time, which is counted in operations. `actions`: (start time, action).
    `message_times`: times of the record's messages. `end`: the last time."""

    allocations: tuple[Allocation, ...]
    actions: tuple[tuple[int, str], ...]
    message_times: tuple[int, ...]
    end: int


@dataclass(frozen=True)
class RankRecord:
    """A step of one rank.

    `curve`: for each action in order, the moment with the most bytes. `peak`: of the whole step. `largest`: the largest
    live tensors at the peak. `flops`: of matmuls and attention, by operation, for all micro-batches. `peak_of_kinds`:
    the peak of each kind, possibly at different moments. `repeats`: number of micro-batches that an action represents,
    if it is not 1. Without a pipeline, one micro-batch represents all between the first and the last. `history`: if
    requested. `host_bytes`: peak of host memory, if it is separate from device memory; no kind includes it.
    """

    rank: int
    curve: tuple[Moment, ...]
    peak: Moment
    peak_of_kinds: dict[str, int]
    largest: tuple[PeakTensor, ...]
    messages: tuple[RecordedMessage, ...]
    flops: dict[str, int] = field(default_factory=dict)
    repeats: dict[str, int] = field(default_factory=dict)
    history: History | None = None
    host_bytes: int = 0

    @property
    def sent(self) -> "dict[tuple[str, str], AxisTraffic]":
        """Return number and bytes of the messages, by axis and operation."""
        return traffic(self.messages, self.repeats)


class AxisTraffic(NamedTuple):
    """Messages of one operation along one axis."""

    calls: int
    n_bytes: int


def traffic(messages: Iterable[RecordedMessage], repeats: Mapping[str, int]) -> dict[tuple[str, str], AxisTraffic]:
    """Return number and bytes of messages, by axis and operation, in order of first occurrence."""
    calls: Counter[tuple[str, str]] = Counter()
    n_bytes: Counter[tuple[str, str]] = Counter()
    for message in messages:
        if message.op != WAIT:
            times = repeats.get(message.action, 1)
            calls[message.axis, message.op] += times
            n_bytes[message.axis, message.op] += times * message.n_bytes
    return {key: AxisTraffic(calls[key], n_bytes[key]) for key in calls}


N_LARGEST = 10


def summed(
    allocations: Sequence[Allocation], actions: Sequence[tuple[int, str]]
) -> tuple[tuple[Moment, ...], Moment, dict[str, int], tuple[PeakTensor, ...]]:
    """Return the curve, the peak, peaks of kinds and largest tensors of a `RankRecord`. `actions`: (start time,
    action)."""
    ordered = sorted(changes(allocations))
    curve: list[Moment] = []
    now = dict.fromkeys(KINDS, 0)
    tops = dict(now)
    peak_at, peak_bytes, place = 0, -1, 0
    last = Allocation("", "", "", (), "", [])
    ends = [*(time for time, _ in actions[1:]), float("inf")]
    for (_, action), end in zip(actions, ends, strict=True):
        best = Moment(dict(now), action, last.module, last.op)
        while place < len(ordered) and ordered[place][0] < end:
            time, number, delta = ordered[place]
            place += 1
            last = allocations[number]
            now[last.kind] += delta
            tops[last.kind] = max(tops[last.kind], now[last.kind])
            if (total := sum(now.values())) > best.n_bytes:
                best = Moment(dict(now), action, last.module, last.op)
            if total > peak_bytes:
                peak_at, peak_bytes = time, total
        curve.append(best)
    return tuple(curve), max(curve, key=lambda moment: moment.n_bytes), tops, tuple(_largest(allocations, peak_at))


def changes(allocations: Sequence[Allocation]) -> Iterator[tuple[int, int, int]]:
    """Yield (time, number of the storage, bytes added), not in order of time."""
    for number, allocation in enumerate(allocations):
        before = 0
        for time, n_bytes in allocation.sizes:
            yield time, number, n_bytes - before
            before = n_bytes


def _largest(allocations: Sequence[Allocation], time: int) -> Iterator[PeakTensor]:
    alive = []
    for allocation in allocations:
        n_bytes = next((size for at, size in reversed(allocation.sizes) if at <= time), 0)
        if n_bytes:
            alive.append(
                PeakTensor(
                    n_bytes,
                    allocation.kind,
                    allocation.shape,
                    allocation.dtype,
                    allocation.op,
                    allocation.module,
                    allocation.action,
                    allocation.line,
                )
            )
    yield from sorted(alive, key=lambda block: -block.n_bytes)[:N_LARGEST]


_ACTIONS, _MESSAGES = 1, 2
"""The rows of a rank: its actions, and its collectives and messages."""


def write_trace(records: Sequence[RankRecord], path: Path) -> None:
    """Write the trace of ranks with a history: for each rank its actions, messages, and live bytes by kind.

    The format is Chrome's JSON of trace events. Raises InputError for a path that cannot be written.
    """
    events = [event for record in records for event in _events(record)]
    write_whole(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode())


def _events(record: RankRecord) -> Iterator[dict[str, Any]]:
    history = _history(record)
    process = {"pid": record.rank}
    yield process | {"ph": "M", "name": "process_name", "args": {"name": f"rank {record.rank}"}}
    for row, name in ((_ACTIONS, "actions"), (_MESSAGES, "collectives and messages")):
        yield process | {"ph": "M", "name": "thread_name", "tid": row, "args": {"name": name}}
    ends = [*(time for time, _ in history.actions[1:]), history.end + 1]
    for (time, action), end in zip(history.actions, ends, strict=True):
        yield process | {"ph": "X", "tid": _ACTIONS, "name": action, "ts": time, "dur": end - time}
    for time, message in zip(history.message_times, record.messages, strict=True):
        if message.op != WAIT:
            name = f"{message.op} ({message.axis})"
            what = {
                "axis": message.axis,
                "ranks of the group": len(message.ranks),
                "bytes": message.n_bytes,
                "type": message.dtype,
                "module": message.module,
                "action": message.action,
            }
            yield process | {"ph": "X", "tid": _MESSAGES, "name": name, "ts": time, "dur": 1, "args": what}
    now = Counter(dict.fromkeys(KINDS, 0))
    for time, number, delta in sorted(changes(history.allocations)):
        now[history.allocations[number].kind] += delta
        yield process | {"ph": "C", "name": "bytes", "ts": time, "args": dict(now)}


def write_snapshot(records: Sequence[RankRecord], path: Path) -> None:
    """Write the memory of ranks with a history as `torch.cuda.memory._dump_snapshot` does, with a rank as a device:
    every allocation with its kind, module, operation and line.

    Addresses are made up: tensors that are alive at the same time have different addresses. Raises InputError for a
    path that cannot be written.
    """
    traces = [list(_trace_entries(record)) for record in records]
    write_whole(path, pickle.dumps({"segments": [], "device_traces": traces, "allocator_settings": {}}))


def _trace_entries(record: RankRecord) -> Iterator[dict[str, Any]]:
    history = _history(record)
    resident: dict[int, tuple[int, int]] = {}
    """Address and bytes of each storage."""
    free = 1 << 32
    for time, number, delta in sorted(changes(history.allocations)):
        made = history.allocations[number]
        file, _, line = made.line.rpartition(":")
        frames = [
            {"name": f"{made.kind}: {made.op or 'before the step'}", "filename": file, "line": int(line or 0)},
            {"name": made.module or "outside of the model", "filename": f"action {made.action or '-'}", "line": 0},
        ]
        entry = {"stream": 0, "time_us": time, "frames": frames}
        address, size = resident.pop(number, (0, 0))
        if size:
            for action in ("free_requested", "free_completed"):
                yield entry | {"action": action, "addr": address, "size": size}
        if size + delta:
            resident[number] = free, size + delta
            yield entry | {"action": "alloc", "addr": free, "size": size + delta}
            free += size + delta


def _history(record: RankRecord) -> History:
    assert record.history is not None, "the record was made without its history"
    return record.history
