"""A background thread of each rank that does its part of a job during training. Its errors are raised on all ranks."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from shardwright.system.errors import CheckpointError
from shardwright.training.checkpoint.state import raise_first

RETRY_AFTER_S = 1.0
"""Delay before the first retry, in seconds; it doubles with each retry."""
_FIRST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 1.0
_ARRIVES_IN_S = 120.0
"""How long rank 0 waits to see another rank's finished part: a network file system may cache a listing for a minute."""
T = TypeVar("T")


class BackgroundThread:
    """Runs one job at a time. In a job, rank 0 may wait for results of the other ranks' threads. All ranks call
    `begin` and `settle` together."""

    def __init__(self, name: str, retries: int) -> None:
        """`retries`: number of retries of `tried`."""
        self.name, self.retries = name, retries
        self.abandoned = threading.Event()
        """Set when the job should end without a result, because a result that rank 0 waits for will not arrive."""
        self.others_ended_s: float | None = None
        """Monotonic time at which `settle` found that the other ranks' threads had ended, else None."""
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None

    @property
    def is_alive(self) -> bool:
        """Return whether this rank has a job in progress."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, job: Callable[[], None], as_error: Callable[[Exception], CheckpointError]) -> None:
        """Start a job; `settle` must have been called for the previous one. An error in the job is converted by
        `as_error` and raised by `settle`."""

        def run() -> None:
            try:
                job()
            except Exception as error:  # no caller can catch errors of a thread
                self._error = as_error(error)

        self.abandoned.clear()
        self._thread = threading.Thread(target=run, name=self.name, daemon=True)
        self._thread.start()

    def settle(self) -> None:
        """Wait until the job in progress, if any, is done. Raises CheckpointError on every rank if it failed on any."""
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
        """Stop the job in progress, because other ranks may be gone or its result is not needed."""
        self.abandoned.set()
        if self._thread is not None:
            self._thread.join(timeout=10)

    def pauses(self, place: object) -> Callable[[], bool]:
        """Return a function that pauses, each time longer, and returns whether to continue to wait for the other ranks'
        files in `place`. It raises CheckpointError if they are not seen long after the other ranks' threads ended."""
        pause_s = _FIRST_PAUSE_S

        def wait() -> bool:
            nonlocal pause_s
            ended_s = self.others_ended_s
            if ended_s is not None and time.monotonic() > ended_s + _ARRIVES_IN_S:
                raise CheckpointError(f"{place}: the files of other ranks are not visible {_ARRIVES_IN_S:.0f} s later")
            if self.abandoned.is_set():
                return False
            self.abandoned.wait(pause_s)  # then the caller looks once more: a rank may have reported an error
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            return True

        return wait

    def tried(self, act: Callable[[], T], failing: type[Exception]) -> T:
        """Return the result of `act`, with retries if it raises `failing`. Raises that error on the last attempt or
        abandonment."""
        for left in reversed(range(self.retries + 1)):
            try:
                return act()
            except failing:
                if not left or self.abandoned.wait(RETRY_AFTER_S * 2 ** (self.retries - left)):
                    raise
        raise AssertionError("tried at least once")
