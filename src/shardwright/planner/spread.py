"""Call a function for several items at a time, in processes."""

import os
import signal
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.connection import wait
from threading import Thread
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def spread(function: Callable[[Item], Result], items: Iterable[Item], processes: int) -> list[Result]:
    """Return `[function(item) for item in items]`, computed by `processes` processes; an idle one takes the next item.

    Functions, items and results are pickled. If processes cannot be started, or one of them is killed, this process
    calls the function alone. Exceptions of the function are raised here.
    """
    given = list(items)
    if min(processes, len(given)) > 1:
        try:
            return _by_others(function, given, min(processes, len(given)))
        except (BrokenProcessPool, OSError):
            pass
    return [function(item) for item in given]


def _by_others(function: Callable[[Item], Result], items: list[Item], processes: int) -> list[Result]:
    # A fork server, because this process may have threads, such as one that shows progress.
    context, others = get_context("forkserver"), active_children()
    with ProcessPoolExecutor(processes, context, _begin) as executor:
        try:
            return list(executor.map(function, items))
        except BaseException:  # Ctrl-C, too, which does not wait for calls that run
            for each in active_children():
                if each not in others:
                    each.kill()
            raise


def _begin() -> None:
    """Make a worker ignore Ctrl-C, which its parent handles, and end when the parent has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
