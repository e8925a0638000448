"""Stopping between steps, on all ranks at the same one, when a signal asks for it."""

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
    """Whether a signal asked any rank to stop. The ranks all-reduce the answer on the CPU while a step computes; it is
    known one step later."""

    def __init__(self) -> None:
        self.asked = False
        self._flag = torch.zeros((), dtype=torch.int64)
        self._work: dist.Work | None = None

    def everyone(self) -> bool:
        """True, on every rank at the same call, once any rank has been asked; every rank calls this each
        step."""
        if self._work is not None:
            self._work.wait()
        answer = bool(self._flag)
        self._flag = torch.tensor(int(self.asked))
        self._work = dist.all_reduce(self._flag, async_op=True)
        return answer

    def settle(self) -> None:
        """Wait for the all-reduce under way, so that the process group can be destroyed."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    @contextmanager
    def listening(self) -> Iterator["StopRequest"]:
        """While inside, the signals of `processes.STOPPING` ask for a stop; a second SIGINT interrupts at once.

        A Ctrl-C under torchrun comes twice, from the terminal and from torchrun: together they count as one.
        """
        asked_s = math.inf

        def ask(number: int, frame: FrameType | None) -> None:
            nonlocal asked_s
            if number == signal.SIGINT and time.monotonic() > asked_s + SAME_KEYPRESS_S:
                raise KeyboardInterrupt
            asked_s = min(asked_s, time.monotonic())
            self.asked = True

        with on_signals(ask):
            yield self
