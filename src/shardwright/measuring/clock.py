"""Seconds of an operation on this rank's device, as a median of repeats."""

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
    """`kind`: "wall", or on a CPU that other programs load too, "cpu": CPU-seconds of this process divided by its
    threads. Time in which a rank waits for others then does not count.

    `budget_s`: of the repeats of one operation, beyond the first.
    """

    device: torch.device
    kind: Kind = "wall"
    budget_s: float = 0.1
    least: int = 3
    most: int = 25

    def now(self) -> float:
        """Seconds, with what was given to the accelerator done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self.kind == "cpu":
            return time.process_time() / torch.get_num_threads()
        return time.perf_counter()

    def seconds(self, operation: Callable[[], object], repeats: int | None = None) -> float:
        """The median time of a call. Short operations are called several times between two looks at the clock.

        `repeats`: how many looks; ranks that communicate give the same number, or they would wait for ever.
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
        found = []
        for _ in range(repeats):
            begin = self.now()
            for _ in range(calls):
                operation()
            found.append((self.now() - begin) / calls)
        return statistics.median(found)


def worst(values: Sequence[float]) -> float:
    """Of the ranks of a group, the one that takes longest: the others wait for it."""
    return max(values)
