"""Stopping all ranks after the same step when a signal asks for it."""

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
import torch.distributed as dist

from shardwright.system.processes import on_signals

SAME_KEYPRESS_S = 2.0


class StopRequest:
    """Whether a signal asked any rank to stop. The ranks all-reduce the answer on the CPU while a step computes, so
    it is known one step later."""

    def __init__(self) -> None:
        self.asked = False
        self._flag = torch.zeros((), dtype=torch.int64)
        self._work: dist.Work | None = None

    def everyone(self) -> bool:
        """Return True, at the same call on every rank, once any rank was asked to stop. Called each step by every
        rank."""
        if self._work is not None:
            self._work.wait()
        answer = bool(self._flag)
        self._flag = torch.tensor(int(self.asked))
        self._work = dist.all_reduce(self._flag, async_op=True)
        return answer

    def settle(self) -> None:
        """Wait for the pending all-reduce, so that the process group can be destroyed."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    @contextmanager
    def listening(self) -> Iterator["StopRequest"]:
        """Handle the signals of `processes.STOPPING` inside the `with` block: the first asks for a stop, a second
        SIGINT raises KeyboardInterrupt at once.

        Under torchrun, one Ctrl-C arrives twice, from the terminal and from torchrun. Both count as one.
        """
        asked_s = math.inf

        def ask(number: int, frame: FrameType | None) -> None:
            nonlocal asked_s
            if number == signal.SIGINT and time.monotonic() > asked_s + SAME_KEYPRESS_S:
                raise KeyboardInterrupt
            asked_s = min(asked_s, time.monotonic())
            self.asked = True

        with on_signals(ask, last=True):
            yield self
