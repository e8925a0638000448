"""Where the time of a step goes, measured without stopping the accelerator."""

import time
from collections import defaultdict

import torch


class Clock:
    """Splits time into named phases: each `mark` ends the phase that it names and begins the next one.

    On a GPU a phase is measured between events in its stream, which cost nothing until `read` waits for them.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.restart()

    def restart(self) -> None:
        """Forget everything; the next phase begins now."""
        self._spans: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = defaultdict(list)
        self._seconds: dict[str, float] = defaultdict(float)
        self._last = self._now()

    def mark(self, phase: str) -> None:
        """The time since the last mark belongs to `phase`."""
        now = self._now()
        if isinstance(now, float) and isinstance(self._last, float):
            self._seconds[phase] += now - self._last
        elif isinstance(now, torch.cuda.Event) and isinstance(self._last, torch.cuda.Event):
            self._spans[phase].append((self._last, now))
        self._last = now

    def read(self) -> dict[str, float]:
        """Seconds of each phase since the last `restart`; waits for the GPU."""
        if self.on_gpu:
            torch.cuda.synchronize()
            for phase, spans in self._spans.items():
                self._seconds[phase] = sum(start.elapsed_time(end) for start, end in spans) / 1000
        return dict(self._seconds)

    def _now(self) -> "float | torch.cuda.Event":
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
