"""When each action of a pipeline really ran on this rank."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shardwright.schedule.actions import Action

Span = tuple[Action, float, float]
"""An action with its start and end, in seconds since the epoch, so that ranks can be laid side by side."""
Mark = float | torch.cuda.Event


class Timeline:
    """The actions of one step. On a GPU their marks are events on its stream, which cost the step nothing."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._marks: list[tuple[Action, Mark, Mark]] = []

    def begin_step(self) -> None:
        """Forget the step before."""
        self._marks.clear()

    @contextmanager
    def action(self, action: Action) -> Iterator[None]:
        """Everything the rank does for an action, without waiting for its input; named in a profile of PyTorch's."""
        start = mark(self.device)
        with torch.profiler.record_function(str(action)):
            yield
        self._marks.append((action, start, mark(self.device)))

    def spans(self) -> list[Span]:
        """The actions since `begin_step`; waits for the device."""
        now = mark(self.device)
        if not isinstance(now, float):
            now.synchronize()
        now_s = time.time()
        return [(action, now_s - seconds(start, now), now_s - seconds(end, now)) for action, start, end in self._marks]


def mark(device: torch.device) -> Mark:
    """This moment, on a GPU that of its stream."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds(start: Any, end: Any) -> float:
    """Between two marks of one device that have passed."""
    return float(end - start) if isinstance(start, float) else float(start.elapsed_time(end)) / 1000
