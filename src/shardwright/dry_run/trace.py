"""A dry run for viewers: a trace for ui.perfetto.dev, and a memory snapshot for pytorch.org/memory_viz.

A dry run knows the order of operations but not their times, so both viewers show operations as microseconds. No torch.
"""

import json
import pickle
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shardwright.dry_run.record import KINDS, WAIT, History, RankRecord, changes
from shardwright.system.files import write_whole

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
    here = {"pid": record.rank}
    yield here | {"ph": "M", "name": "process_name", "args": {"name": f"rank {record.rank}"}}
    for row, name in ((_ACTIONS, "actions"), (_MESSAGES, "collectives and messages")):
        yield here | {"ph": "M", "name": "thread_name", "tid": row, "args": {"name": name}}
    ends = [*(time for time, _ in history.actions[1:]), history.end + 1]
    for (time, action), end in zip(history.actions, ends, strict=True):
        yield here | {"ph": "X", "tid": _ACTIONS, "name": action, "ts": time, "dur": end - time}
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
            yield here | {"ph": "X", "tid": _MESSAGES, "name": name, "ts": time, "dur": 1, "args": what}
    now = Counter(dict.fromkeys(KINDS, 0))
    for time, number, delta in sorted(changes(history.allocations)):
        now[history.allocations[number].kind] += delta
        yield here | {"ph": "C", "name": "bytes", "ts": time, "args": dict(now)}


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
    held: dict[int, tuple[int, int]] = {}
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
        address, size = held.pop(number, (0, 0))
        if size:
            for action in ("free_requested", "free_completed"):
                yield entry | {"action": action, "addr": address, "size": size}
        if size + delta:
            held[number] = free, size + delta
            yield entry | {"action": "alloc", "addr": free, "size": size + delta}
            free += size + delta


def _history(record: RankRecord) -> History:
    assert record.history is not None, "the record was made without its history"
    return record.history
