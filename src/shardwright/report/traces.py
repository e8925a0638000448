"""Merges the traces that torch.profiler wrote on each rank into one file of the trace event format.

The file has one process for each rank, whose threads are the rank's threads and streams, on the clock of rank 0's host.
`training/profiling.py` writes the traces.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from shardwright.runs.folder import trace_files
from shardwright.system.errors import InputError
from shardwright.system.files import parse_json, read_bytes, write_whole
from shardwright.system.units import GiB

LONGEST_TRACE = 2 * GiB
"""Largest trace of a rank that is read, in bytes. A step of a large model has some hundred MB."""
LATEST_US = 1e18
"""Largest time of an event, in microseconds."""
_FLOWS = frozenset("stfbne")
"""Kinds of events that belong together by `id`, which each rank counts for itself."""


class TracedRank(BaseModel):
    """The part of a trace that names its rank, and by how much the clock of its host is ahead of rank 0's host."""

    rank: int = Field(ge=0, lt=2**31)
    host: str
    clock_ahead_ns: int = Field(gt=-(2**63), lt=2**63)
    coordinates: dict[str, int] = {}


class ProfilerTrace(BaseModel):
    """The trace of one rank: `ts` of an event is in microseconds after `baseTimeNanoseconds`."""

    shardwright: TracedRank
    baseTimeNanoseconds: int = Field(0, ge=0, lt=2**63)
    traceEvents: list[dict[str, Any]]


def merge_traces(folder: Path, path: Path) -> None:
    """Merge the traces of the newest traced steps of the run in `folder` into `path`.

    Raises InputError if no step was traced, for a damaged trace, and if `path` is not named *.json.
    """
    if path.suffix.lower() != ".json":
        raise InputError(f"--trace {path}: a trace is named *.json")
    files = trace_files(folder)
    if not files:
        raise InputError(
            f"--trace {path}: {folder} has no trace of a step; set profile.first_step for a run, such as "
            f"--set profile.first_step=10"
        )
    traces = [_read(file) for file in files]
    first_ns = min(trace.baseTimeNanoseconds for trace in traces)
    events = [event for trace in traces for event in _events(trace, first_ns)]
    start_us = min((event["ts"] for event in events if "ts" in event), default=0.0)
    for event in events:
        if "ts" in event:
            event["ts"] = round(event["ts"] - start_us, 3)
    write_whole(path, (json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n").encode())


def _read(path: Path) -> ProfilerTrace:
    try:
        return ProfilerTrace.model_validate(parse_json(read_bytes(path, LONGEST_TRACE)))
    except ValidationError as error:
        wrong = error.errors()[0]
        told = f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}"
    except (OSError, ValueError) as error:
        told = str(error)
    raise InputError(f"{path} is not the trace of a rank ({told}); remove it, or trace the steps again")


def _events(trace: ProfilerTrace, first_ns: int) -> Iterator[dict[str, Any]]:
    """Yield the events of a rank with the rank as their process, and its names."""
    about = trace.shardwright
    shift_us = (trace.baseTimeNanoseconds - first_ns - about.clock_ahead_ns) / 1e3
    names: dict[tuple[str, str, str], str] = {}
    threads: dict[tuple[str, str], int] = {}
    for event in trace.traceEvents:
        place = str(event.get("pid")), str(event.get("tid"))
        if event.get("ph") == "M":
            args = event.get("args")
            if isinstance(args, dict) and event.get("name") in ("process_labels", "thread_name"):
                of = place if event["name"] == "thread_name" else (place[0], "")
                names[event["name"], *of] = str(args.get("labels", args.get("name")))
            continue
        time_us, kind = event.get("ts"), event.get("ph")
        if not (isinstance(time_us, int | float) and abs(time_us) < LATEST_US and isinstance(kind, str)):
            continue
        thread = threads.setdefault(place, len(threads))
        moved = event | {"pid": about.rank, "tid": thread, "ts": time_us + shift_us}
        if kind in _FLOWS:
            moved["id"] = f"{about.rank}.{event.get('id')}"
        yield moved
    axes = ", ".join(f"{axis} {at}" for axis, at in about.coordinates.items())
    yield _name("process_name", about.rank, 0, f"rank {about.rank}")
    yield _name("process_labels", about.rank, 0, f"{about.host}{f': {axes}' if axes else ''}", "labels")
    yield _name("process_sort_index", about.rank, 0, about.rank, "sort_index")
    for (process, name_of_thread), number in threads.items():
        device = names.get(("process_labels", process, ""), process)
        name = names.get(("thread_name", process, name_of_thread), f"thread {name_of_thread}")
        yield _name("thread_name", about.rank, number, f"{device}: {name}")
        yield _name("thread_sort_index", about.rank, number, number, "sort_index")


def _name(kind: str, rank: int, thread: int, value: str | int, key: str = "name") -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "args": {key: value}}
