"""Where the time of a step goes, measured without stopping the accelerator."""

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Protocol

import torch

from shardwright.parallel.pipeline.timeline import Mark, mark, seconds
from shardwright.system.ranks_at import Phase


class Phases(Protocol):
    """Is told when a phase of a step begins and ends: the clock and the hang monitor of a run, the recorder of a dry
    run."""

    def begin(self, phase: Phase, step: int) -> None:
        """A phase of step number `step` (0-based) begins."""

    def end(self, phase: Phase) -> None:
        """That phase ends."""


class NoPhases:
    """Phases that nobody listens to."""

    def begin(self, phase: Phase, step: int) -> None:
        """Do nothing."""

    def end(self, phase: Phase) -> None:
        """Do nothing."""


class PhaseClock:
    """Splits time into named phases: each `mark` ends the phase that it names and begins the next one.

    On a GPU a phase is measured between events in its stream, which cost nothing until `read` waits for them.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.own_s: list[float] = []
        """Of each step since the last `restart`, the seconds that this rank took for itself, without waiting for other
        ranks: for its data, and the CPU time of this thread in the forward and backward passes. A thread that waits
        takes no CPU time, and none is counted while other programs have the core. Not measured on a GPU."""
        self.restart()

    def restart(self) -> None:
        """Forget everything; the next phase begins now."""
        self._spans: dict[str, list[tuple[Mark, Mark]]] = defaultdict(list)
        self._last = mark(self.device)
        self.own_s = []
        self.begin_step()

    def begin_step(self) -> None:
        """A step begins, with the data that this rank waits for, and for no other rank."""
        self._began_s = time.perf_counter()
        self._data_s = 0.0
        self._cpu_s = time.thread_time()

    def mark(self, phase: str) -> None:
        """The time since the last mark belongs to `phase`."""
        now = mark(self.device)
        self._spans[phase].append((self._last, now))
        if self.device.type == "cpu":
            cpu_s = time.thread_time()
            if phase == "data":
                self._data_s, self._cpu_s = seconds(self._began_s, now), cpu_s
            elif phase == "forward_backward":
                self.own_s.append(self._data_s + cpu_s - self._cpu_s)
        self._last = now

    def read(self) -> dict[str, float]:
        """Seconds of each phase since the last `restart`; waits for the GPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return {phase: sum(seconds(*span) for span in spans) for phase, spans in self._spans.items()}


class RunPhases:
    """The phases of a run: its clock takes their times, and `enter` tells its hang monitor which one begins."""

    def __init__(self, clock: PhaseClock, enter: Callable[[Phase, int], None]) -> None:
        self.clock, self._enter = clock, enter

    def begin(self, phase: Phase, step: int) -> None:
        """A step begins with its data."""
        self._enter(phase, step)
        if phase == "data":
            self.clock.begin_step()

    def end(self, phase: Phase) -> None:
        """The time since the last phase ended belongs to this one."""
        self.clock.mark(phase)
