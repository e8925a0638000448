"""What other processes call in test_spread.py; they import this module, and no more than it needs."""

import os
import signal

from shardwright.system.errors import LayoutError


def squared(number: int) -> tuple[int, int]:
    return number**2, os.getpid()


def refused(number: int) -> int:
    raise LayoutError(f"{number} is refused")


def killed(first: int) -> int:
    """The process that calls it is killed, if it is not the first."""
    if os.getpid() != first:
        os.kill(os.getpid(), signal.SIGKILL)
    return first
