"""When each action of a pipeline really ran on this rank."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shardloom.schedule.actions import Action

Span = tuple[Action, float, float]
"""An action with its start and end, in seconds since the epoch, so that ranks can be laid side by side."""


class Timeline:
    """The actions of one step. On a GPU their marks are events on its stream, which cost the step nothing."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._marks: list[tuple[Action, float | torch.cuda.Event, float | torch.cuda.Event]] = []

    def begin_step(self) -> None:
        """Forget the step before."""
        self._marks.clear()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # so that the first event is at a time that is known
        self._zero, self._zero_s = self._mark(), time.time()

    @contextmanager
    def action(self, action: Action) -> Iterator[None]:
        """Everything the rank does for an action, without waiting for its input."""
        start = self._mark()
        yield
        self._marks.append((action, start, self._mark()))

    def spans(self) -> list[Span]:
        """The actions since `begin_step`; waits for the device."""
        return [(action, self._second(start), self._second(end)) for action, start, end in self._marks]

    def _mark(self) -> float | torch.cuda.Event:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _second(self, mark: float | torch.cuda.Event) -> float:
        if isinstance(mark, float):
            return self._zero_s + mark - self._zero  # type: ignore[operator]
        mark.synchronize()
        return self._zero_s + self._zero.elapsed_time(mark) / 1000  # type: ignore[union-attr]
