"""Records when each action of a pipeline ran on this rank."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shardwright.schedule.actions import Action

Span = tuple[Action, float, float]
"""An action with its start and end, in seconds since the epoch, so that timelines of several ranks can be combined."""
Mark = float | torch.cuda.Event


class StepTimeline:
    """The start and end of the actions of one step; on a GPU as CUDA events, which do not slow the step down."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._marks: list[tuple[Action, Mark, Mark]] = []

    def begin_step(self) -> None:
        """Discard the previous step."""
        self._marks.clear()

    @contextmanager
    def action(self, action: Action) -> Iterator[None]:
        """Record an action in a context, without the wait for its input; a PyTorch profile shows it by name."""
        start = mark(self.device)
        with torch.profiler.record_function(str(action)):
            yield
        self._marks.append((action, start, mark(self.device)))

    def spans(self) -> list[Span]:
        """Return the actions since `begin_step`; synchronises with the device."""
        now = mark(self.device)
        if not isinstance(now, float):
            now.synchronize()
        now_s = time.time()
        return [(action, now_s - seconds(start, now), now_s - seconds(end, now)) for action, start, end in self._marks]


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
