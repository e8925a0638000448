"""Writes timelines in the trace event format, which https://ui.perfetto.dev and chrome://tracing open.

A pipeline is a process, a rank a thread in it, an action a complete event (`X`) with its stage and micro-batch, a
message a flow (`s` to `f`), and the activation memory of a rank a counter (`C`) of two series, in flight and waiting.
Source: "Trace Event Format", docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shardwright.schedule.draw import OP_WORDS, ScheduleTimeline
from shardwright.system.files import write_whole

US_PER_UNIT = {"s": 1e6, "ms": 1e3, "us": 1.0}
US_PER_OTHER_UNIT = 1e3


def write_trace(timelines: Sequence[ScheduleTimeline], path: str | Path) -> None:
    """Write timelines to a trace file, which is replaced if it exists.

    Times are in microseconds; a unit without a name is shown as a millisecond. Raises InputError if the file cannot be
    written.
    """
    events = [event for process, timeline in enumerate(timelines) for event in _events(timeline, process)]
    write_whole(Path(path), (json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n").encode("utf-8"))


def _events(timeline: ScheduleTimeline, process: int) -> Iterator[dict[str, Any]]:
    us = US_PER_UNIT.get(timeline.unit, US_PER_OTHER_UNIT)
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": timeline.title}}
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}}
    for rank, spans in enumerate(timeline.spans):
        at = {"pid": process, "tid": rank}
        yield {"ph": "M", "name": "thread_name", **at, "args": {"name": f"rank {rank}"}}
        yield {"ph": "M", "name": "thread_sort_index", **at, "args": {"sort_index": rank}}
        for action, start, end in spans:
            yield {
                "ph": "X",
                "name": str(action),
                "cat": OP_WORDS[action.op],
                **at,
                "ts": start * us,
                "dur": (end - start) * us,
                "args": {"stage": action.stage, "microbatch": action.microbatch},
            }
        for time, in_flight, waiting in timeline.curve(rank):
            series = {"in flight": in_flight, "waiting for W": waiting}
            yield {"ph": "C", "name": f"memory, rank {rank}", **at, "ts": time * us, "args": series}
    yield from _flows(timeline, process, us)


def _flows(timeline: ScheduleTimeline, process: int, us: float) -> Iterator[dict[str, Any]]:
    """Yield a flow from every action to the action on another rank that needs its result.

    A flow starts in the middle of a box: at its end the viewer could attribute it to the next action.
    """
    made = {
        (action.stage, "F" if action.op == "F" else "B", action.microbatch): (rank, action, start, end)
        for rank, spans in enumerate(timeline.spans)
        for action, start, end in spans
        if action.op != "W"
    }
    number = 0
    for (stage, way, microbatch), (rank, _, start, _) in made.items():
        needed = made.get((stage + (-1 if way == "F" else 1), way, microbatch))
        if needed is None or needed[0] == rank:
            continue
        sender, sent, sent_start, sent_end = needed
        number += 1
        name = f"{'output' if way == 'F' else 'gradient'} of {sent}"
        both: dict[str, Any] = {"name": name, "cat": "message", "id": f"{process}.{number}", "pid": process}
        yield {"ph": "s", **both, "tid": sender, "ts": (sent_start + sent_end) / 2 * us}
        yield {"ph": "f", "bp": "e", **both, "tid": rank, "ts": start * us}
