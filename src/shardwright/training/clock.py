"""Where the time of a step goes, measured without stopping the accelerator."""

from collections import defaultdict

import torch

from shardwright.parallel.pipeline.timeline import Mark, mark, seconds


class Clock:
    """Splits time into named phases: each `mark` ends the phase that it names and begins the next one.

    On a GPU a phase is measured between events in its stream, which cost nothing until `read` waits for them.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.restart()

    def restart(self) -> None:
        """Forget everything; the next phase begins now."""
        self._spans: dict[str, list[tuple[Mark, Mark]]] = defaultdict(list)
        self._last = mark(self.device)

    def mark(self, phase: str) -> None:
        """The time since the last mark belongs to `phase`."""
        now = mark(self.device)
        self._spans[phase].append((self._last, now))
        self._last = now

    def read(self) -> dict[str, float]:
        """Seconds of each phase since the last `restart`; waits for the GPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return {phase: sum(seconds(*span) for span in spans) for phase, spans in self._spans.items()}
