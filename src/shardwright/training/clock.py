"""Where the time of a step goes, measured without stopping the accelerator."""

import time
from collections import defaultdict

import torch

from shardwright.parallel.pipeline.timeline import Mark, mark, seconds


class Clock:
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
