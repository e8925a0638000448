"""Timing of the phases of a step, without synchronizing with the accelerator."""

import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from typing import Protocol

import torch
from torch.profiler import record_function

from shardwright.parallel.pipeline.runner import Mark, in_epoch_s, mark, seconds
from shardwright.system.ranks_at import Phase


class Phases(Protocol):
    """Receives the start and end of each phase of a step: the clock and the hang monitor of a run, the recorder of a
    dry run."""

    def begin(self, phase: Phase, step: int) -> None:
        """A phase of step number `step` (0-based) starts."""

    def end(self, phase: Phase) -> None:
        """The phase ends."""


class NoPhases:
    """Phases without a receiver."""

    def begin(self, phase: Phase, step: int) -> None:
        """Do nothing."""

    def end(self, phase: Phase) -> None:
        """Do nothing."""


class PhaseClock:
    """Splits time into named phases: each `mark` ends the phase that it names and starts the next one.

    On a GPU, a phase is measured between events in the stream, which do not synchronize until `read`.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.own_s: list[float] = []
        """This rank's own seconds in each step since the last `restart`, without waiting for other ranks: the time
        for its data, plus the CPU time of this thread in the forward and backward passes. A waiting thread uses no
        CPU time, and time in which other programs use the core is not counted. Not measured on a GPU."""
        self.restart()

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


class RunPhases:
    """The phases of a run: the clock measures them, `enter` reports the start of each phase to the hang monitor, and a
    trace of torch.profiler shows them by name."""

    def __init__(self, clock: PhaseClock, enter: Callable[[Phase, int], None]) -> None:
        self.clock, self._enter = clock, enter
        self._traced = ExitStack()

    def begin(self, phase: Phase, step: int) -> None:
        """Start a phase. The phase "data" starts a step."""
        self._traced.close()
        self._enter(phase, step)
        self._traced.enter_context(record_function(phase))
        if phase == "data":
            self.clock.begin_step()

    def end(self, phase: Phase) -> None:
        """Assign the time since the end of the previous phase to this one."""
        self._traced.close()
        self.clock.mark(phase)
