"""A rule of one's own that skips steps: a gradient norm above 3 times the median of the last 100 norms."""

from collections import deque
from statistics import median

from torch import Tensor

from shardwright.training.hooks import Hook, HookKind, RunParts, register

LEAST, TIMES = 10, 3.0


class SkipLargeNorms(Hook):
    """Leaves weights and optimizer states of such a step as they were."""

    def __init__(self, run: RunParts) -> None:
        self.log = run.log
        self.norms: deque[float] = deque(maxlen=100)

    def takes_step(self, step: int, norm: Tensor) -> bool:
        value = float(norm)
        takes = len(self.norms) < LEAST or value <= TIMES * median(self.norms)
        self.norms.append(value)
        if not takes:
            self.log.tell("skip", step + 1, f"step {step + 1} skipped: its gradient norm is {value:.3g}")
        return takes


register(HookKind("skip-large-norms", SkipLargeNorms))
