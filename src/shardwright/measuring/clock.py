"""The time of an operation on this rank's device in seconds, as a median of repeats."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

Kind = Literal["wall", "cpu"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class MeasuringClock:
    """`kind`: "wall", or on a CPU that other programs also load, "cpu": CPU-seconds of this process divided by its
    threads, which exclude time that a rank waits for others.

    `budget_s`: time for the repeats of one operation after the first.
    """

    device: torch.device
    kind: Kind = "wall"
    budget_s: float = 0.1
    least: int = 3
    most: int = 25

    def now(self) -> float:
        """Return the time in seconds after all work submitted to the accelerator is complete."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self.kind == "cpu":
            return time.process_time() / torch.get_num_threads()
        return time.perf_counter()

    def seconds(self, operation: Callable[[], object], repeats: int | None = None) -> float:
        """Return the median time of a call. Short operations are called several times between two clock readings.

        `repeats`: number of clock readings. Ranks that communicate must pass the same number, or they would hang.
        """
        operation()
        begin = self.now()
        operation()
        once = max(self.now() - begin, 1e-7)
        if repeats is not None:
            return self._median(operation, 1, repeats)
        calls = max(1, int(1e-3 / once))
        wanted = int(self.budget_s / (once * calls))
        return self._median(operation, calls, min(max(wanted, self.least), self.most))

    def _median(self, operation: Callable[[], object], calls: int, repeats: int) -> float:
        seconds = []
        for _ in range(repeats):
            begin = self.now()
            for _ in range(calls):
                operation()
            seconds.append((self.now() - begin) / calls)
        return statistics.median(seconds)


def worst(values: Sequence[float]) -> float:
    """Return the time of the slowest rank of a group, for which the others wait."""
    return max(values)
