"""A thread of each rank that does its part of a job beside training, and whose errors are raised on all ranks."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from shardwright.system.errors import CheckpointError
from shardwright.training.checkpoint.state import raise_first

RETRY_AFTER_S = 1.0
"""Before something is tried again; twice as long each time."""
T = TypeVar("T")


class BackgroundThread:
    """Does one job at a time, in which rank 0 waits for what the threads of the others have done. All ranks call
    `begin` and `settle` together."""

    def __init__(self, name: str, retries: int) -> None:
        """`retries`: how often `tried` tries again."""
        self.name, self.retries = name, retries
        self.abandoned = threading.Event()
        """Set when the job is to end without a result: what rank 0 waits for will not come."""
        self.others_ended_s: float | None = None
        """On the monotonic clock, when `settle` found that the threads of the other ranks had ended; else None."""
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None

    @property
    def is_alive(self) -> bool:
        """Whether a job is under way on this rank."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, job: Callable[[], None], as_error: Callable[[Exception], CheckpointError]) -> None:
        """Begin a job; the one before has to be settled. What it raises is kept for `settle`, as `as_error` says it."""

        def run() -> None:
            try:
                job()
            except Exception as error:  # a thread has no one to raise it to
                self._error = as_error(error)

        self.abandoned.clear()
        self._thread = threading.Thread(target=run, name=self.name, daemon=True)
        self._thread.start()

    def settle(self) -> None:
        """Wait until the job that is under way, if any, is done. Raises CheckpointError, on every rank, where it failed
        on any."""
        thread, first = self._thread, dist.get_rank() == 0
        if thread is None:
            return
        self._thread = None
        if not first:
            thread.join()
        try:
            raise_first(None if first else self._error)
        except CheckpointError:
            self.abandoned.set()
            raise
        finally:
            self.others_ended_s = time.monotonic()
            thread.join()
            self.others_ended_s = None
            error, self._error = self._error, None
        raise_first(error)

    def abandon(self) -> None:
        """Leave the job that is under way: other ranks may be gone, or its result is of no use."""
        self.abandoned.set()
        if self._thread is not None:
            self._thread.join(timeout=10)

    def tried(self, act: Callable[[], T], failing: type[Exception]) -> T:
        """What `act` returns, tried again where it raises `failing`. Raises that where it does so each time, or the job
        is abandoned."""
        for left in reversed(range(self.retries + 1)):
            try:
                return act()
            except failing:
                if not left or self.abandoned.wait(RETRY_AFTER_S * 2 ** (self.retries - left)):
                    raise
        raise AssertionError("tried at least once")
