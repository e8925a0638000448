"""Timing of the phases and actions of a step, without synchronizing with the accelerator."""

import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch.profiler import record_function

from shardwright.parallel.observer import Observer, Running, StepPasses, StepPhase
from shardwright.schedule.actions import Action

Mark = float | torch.cuda.Event
T = TypeVar("T")


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
