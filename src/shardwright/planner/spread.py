"""Calls of a function for several items at a time, in processes."""

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
    """`[function(item) for item in items]`, by that many processes, of which each takes the next item when it is done.

    Functions, items and results are pickled. Where processes cannot be started, or one of them is killed, this process
    calls the function alone. What the function raises is raised here.
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
    """A process that calls the function leaves Ctrl-C to the one that started it, and ends when that is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
