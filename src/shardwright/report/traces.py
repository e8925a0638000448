"""Merges the traces that torch.profiler wrote on each rank into one file of the trace event format.

The file has one process for each rank, whose threads are the rank's threads and streams, on the clock of rank 0's host.
`training/profiling.py` writes the traces.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, Field, ValidationError

from shardwright.runs.folder import trace_files
from shardwright.system.errors import InputError
from shardwright.system.files import parse_json, read_bytes, suffix_problem, write_whole
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
    if (problem := suffix_problem(path, ".json")) is not None:
        raise InputError(f"--trace {problem}")
    files = trace_files(folder)
    if not files:
        raise InputError(
            f"--trace {path}: {folder} has no trace of a step; set profile.first_step for a run, such as "
            f"--set profile.first_step=10"
        )
    starts = [_start(file) for file in files]
    first_ns = min(start.base_ns for start in starts)
    start_us = min(
        (start.first_us + start.shift_us(first_ns) for start in starts if start.first_us is not None), default=0.0
    )
    write_whole(path, _merged(files, [start.shift_us(first_ns) for start in starts], start_us))


class _TraceStart(NamedTuple):
    """The base of a trace's times, the lead of its host's clock, and the time of its first event, None without one."""

    base_ns: int
    clock_ahead_ns: int
    first_us: float | None

    def shift_us(self, first_ns: int) -> float:
        """Return the difference between the times in the trace and times after `first_ns` on rank 0's host."""
        return (self.base_ns - first_ns - self.clock_ahead_ns) / 1e3


def _start(path: Path) -> _TraceStart:
    trace = _read(path)
    first_us = min((event["ts"] for event in trace.traceEvents if _has_time(event)), default=None)
    return _TraceStart(trace.baseTimeNanoseconds, trace.shardwright.clock_ahead_ns, first_us)


def _merged(files: Sequence[Path], shifts_us: Sequence[float], start_us: float) -> Iterator[bytes]:
    """Yield the parts of the merged file. One trace at a time is in memory: it has some hundred MB for each rank."""
    separator = b'{"displayTimeUnit": "ms", "traceEvents": [\n'
    for file, shift_us in zip(files, shifts_us, strict=True):
        for event in _events(_read(file), shift_us, start_us):
            yield separator + json.dumps(event).encode()
            separator = b",\n"
    yield b"\n]}\n"


def _read(path: Path) -> ProfilerTrace:
    try:
        return ProfilerTrace.model_validate(parse_json(read_bytes(path, LONGEST_TRACE)))
    except ValidationError as error:
        first = error.errors()[0]
        problem = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    except (OSError, ValueError) as error:
        problem = str(error)
    raise InputError(f"{path} is not the trace of a rank ({problem}); remove it, or trace the steps again")


def _has_time(event: dict[str, Any]) -> bool:
    """Return whether an event has a time and a kind. Names of processes and threads (kind M) have no time."""
    time_us, kind = event.get("ts"), event.get("ph")
    return isinstance(time_us, int | float) and abs(time_us) < LATEST_US and isinstance(kind, str) and kind != "M"


def _events(trace: ProfilerTrace, shift_us: float, start_us: float) -> Iterator[dict[str, Any]]:
    """Yield the events of a rank with the rank as their process and their times after `start_us`, and its names."""
    about = trace.shardwright
    names: dict[tuple[str, str, str], str] = {}
    threads: dict[tuple[str, str], int] = {}
    for event in trace.traceEvents:
        place = str(event.get("pid")), str(event.get("tid"))
        if event.get("ph") == "M":
            args = event.get("args")
            if isinstance(args, dict) and event.get("name") in ("process_labels", "thread_name"):
                key = place if event["name"] == "thread_name" else (place[0], "")
                names[event["name"], *key] = str(args.get("labels", args.get("name")))
            continue
        if not _has_time(event):
            continue
        thread = threads.setdefault(place, len(threads))
        moved = event | {"pid": about.rank, "tid": thread, "ts": round(event["ts"] + shift_us - start_us, 3)}
        if event["ph"] in _FLOWS:
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
