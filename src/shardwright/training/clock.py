"""Timing of the phases and actions of a step, without synchronizing with the accelerator; the file of a pipeline's
actions in the folder of a run, for `shardwright report`."""

import time
from collections import defaultdict, deque
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.profiler import record_function

from shardwright.config import RunConfig
from shardwright.layout.box import DENSE_AXES
from shardwright.parallel.model import ParallelModel
from shardwright.parallel.observer import Observer, Running, StepPasses, StepPhase
from shardwright.runs.folder import timeline_path
from shardwright.runs.records import PipelineStep, Record
from shardwright.schedule.actions import Action
from shardwright.system.files import write_whole
from shardwright.training.hooks import Hook, TakenStep

Mark = float | torch.cuda.Event
T = TypeVar("T")
KEPT_STEPS = 4
"""Number of logged steps in a file. A report needs one step that all ranks have written. With 256 micro-batches of 3
ops each, a step takes about 25 kB, and a run of a million steps must not fill a disk."""


class PhaseClock(Observer):
    """Splits time into named phases: each `mark` ends the phase that it names and starts the next one.

    On a GPU, a phase is measured between events in the stream, which do not synchronize until `read`. A trace of
    torch.profiler shows the phases by name.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._traced = ExitStack()
        self.own_s: list[float] = []
        """This rank's own seconds in each step since the last `restart`, without waiting for other ranks: the time
        for its data, plus the CPU time of this thread in the forward and backward passes. A waiting thread uses no
        CPU time, and time in which other programs use the core is not counted. Not measured on a GPU."""
        self.restart()

    def begin(self, running: Running) -> None:
        """Start a phase. The phase "data" starts a step."""
        if isinstance(running, StepPhase):
            self._traced.close()
            self._traced.enter_context(record_function(running.phase))
            if running.phase == "data":
                self.begin_step()

    def end(self, running: Running) -> None:
        """Assign the time since the end of the previous phase to this one."""
        if isinstance(running, StepPhase):
            self._traced.close()
            self.mark(running.phase)

    def restart(self) -> None:
        """Discard all measurements; the next phase starts now."""
        self._spans: list[tuple[str, Mark, Mark]] = []
        self._last = mark(self.device)
        self.own_s = []
        self.begin_step()

    def begin_step(self) -> None:
        """Start a step, which starts with data. A rank waits for its own data, not for other ranks."""
        self._began_s = time.perf_counter()
        self._data_s = 0.0
        self._cpu_s = time.thread_time()

    def mark(self, phase: str) -> None:
        """Assign the time since the last mark to `phase`."""
        now = mark(self.device)
        self._spans.append((phase, self._last, now))
        if self.device.type == "cpu":
            cpu_s = time.thread_time()
            if phase == "data":
                self._data_s, self._cpu_s = seconds(self._began_s, now), cpu_s
            elif phase == "forward_backward":
                self.own_s.append(self._data_s + cpu_s - self._cpu_s)
        self._last = now

    def read(self) -> dict[str, float]:
        """Return the seconds of each phase since the last `restart`. Synchronizes with the GPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        total_s: dict[str, float] = defaultdict(float)
        for phase, start, end in self._spans:
            total_s[phase] += seconds(start, end)
        return dict(total_s)

    def spans(self) -> list[tuple[str, float, float]]:
        """Return each phase since the last `restart` with its start and end, in seconds since the epoch. Synchronizes
        with the GPU."""
        return in_epoch_s(self._spans, self.device)


class StepTimeline(Observer):
    """The start and end of the actions of one training step; on a GPU as CUDA events, which do not slow it down."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._start = mark(device)
        self._marks: list[tuple[Action, Mark, Mark]] = []
        self._in_step = False

    def begin(self, running: Running) -> None:
        """Record the start of an action; discard the previous step at the start of the passes."""
        if isinstance(running, Action) and self._in_step:
            self._start = mark(self.device)
        elif isinstance(running, StepPasses):
            self._in_step = True
            self._marks.clear()

    def end(self, running: Running) -> None:
        """Record the end of an action."""
        if isinstance(running, Action) and self._in_step:
            self._marks.append((running, self._start, mark(self.device)))
        elif isinstance(running, StepPasses):
            self._in_step = False

    def spans(self) -> list[tuple[Action, float, float]]:
        """Return each action of the last step with its start and end, in seconds since the epoch, so that timelines of
        several ranks can be combined. Synchronises with the device."""
        return in_epoch_s(self._marks, self.device)


class TimelineFile(Hook):
    """The last logged steps of one rank, as `runs.records.PipelineStep`.

    The file is rewritten for each logged step and renamed, so that a reader sees a complete file. A resumed run starts
    with an empty file: its first logged step replaces the previous process's file.
    """

    def __init__(self, path: Path, rank: int, timeline: StepTimeline) -> None:
        self.path, self.rank, self.timeline = path, rank, timeline
        self._lines: deque[str] = deque(maxlen=KEPT_STEPS)

    def on_log(self, taken: TakenStep, numbers: Record) -> None:
        self.write(taken.step)

    def write(self, step: int) -> None:
        """Add the actions of the last step, number `step`. Synchronizes with the device."""
        spans = self.timeline.spans()
        zero_s = spans[0][1]
        actions = tuple((str(a), round(start - zero_s, 7), round(end - zero_s, 7)) for a, start, end in spans)
        self._lines.append(PipelineStep(step, self.rank, zero_s, actions).line())
        write_whole(self.path, "".join(self._lines).encode(), required=False)


def timeline_file(config: RunConfig, model: ParallelModel, device: torch.device, rank: int) -> TimelineFile | None:
    """Return the file for a rank of the first pipeline, which is at 0 on every axis except `pp`, or None for another
    rank. From now on the timeline observes the model.

    One pipeline is enough to measure the bubble: the others run the same actions on equal amounts of data, and all
    synchronize at the end of a step.
    """
    coordinates = model.layout.coordinates(rank)
    if model.layout.pp == 1 or any(coordinates[axis] for axis in DENSE_AXES if axis != "pp"):
        return None
    timeline = StepTimeline(device)
    model.observers.add(timeline)
    return TimelineFile(timeline_path(Path(config.out), coordinates["pp"]), coordinates["pp"], timeline)


def in_epoch_s(spans: Iterable[tuple[T, Mark, Mark]], device: torch.device) -> list[tuple[T, float, float]]:
    """Return spans between marks of `device` in seconds since the epoch; synchronises with the device."""
    now = mark(device)
    if not isinstance(now, float):
        now.synchronize()
    now_s = time.time()
    return [(what, now_s - seconds(start, now), now_s - seconds(end, now)) for what, start, end in spans]


def mark(device: torch.device) -> Mark:
    """Return the current time; on a GPU an event on the current stream."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds(start: Any, end: Any) -> float:
    """Return the seconds between two completed marks of one device."""
    return float(end - start) if isinstance(start, float) else float(start.elapsed_time(end)) / 1000
