"""Processes of this machine that are forked from a server, a process that has imported PyTorch and run nothing.

A new interpreter needs seconds to import PyTorch; a process that is forked from the server needs 0.1 s, also when a run
starts its ranks again after a fault. The server is Python's own (`multiprocessing.forkserver`). It ends with the last
process that uses it, and removes the folder of the socket that it is asked through, which its starter could not do if
that was killed.
"""

import atexit
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, reduction, resource_tracker, util
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any

from shardwright.openmp import brief_waiting

context = multiprocessing.get_context("forkserver")
LONGEST_ADDRESS = 107
"""Characters of the path of a Unix socket, on Linux."""
_imported: list[str] = []
_TEMPORARY = "SHARDWRIGHT_TEMPORARY"
"""In the environment that the server starts with: the temporary folder of the process that starts it."""
if _of_starter := os.environ.pop(_TEMPORARY, None):
    atexit.register(shutil.rmtree, _of_starter, ignore_errors=True)


def preload(*modules: str) -> None:
    """What the server imports before it forks anything; of several calls in a process the first one counts."""
    if not _imported:
        _imported.extend([__name__, *modules])
        context.set_forkserver_preload(_imported)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Has the server started. The processes started inside ignore Ctrl-C, which this process handles for all, and do
    not run the main script again, as multiprocessing would, so that a script needs no `if __name__ == "__main__"`."""
    main = sys.modules["__main__"]
    resource_tracker.ensure_running()  # which ends by unblocking SIGINT, so it comes first
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    sys.modules["__main__"] = ModuleType("__main__")
    given = {_TEMPORARY: _temporary_folder()} | brief_waiting()
    os.environ.update(given)
    try:
        forkserver.ensure_running()
        yield
    finally:
        for name in given:
            del os.environ[name]
        sys.modules["__main__"] = main
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _temporary_folder() -> str:
    """That of this process, in which the socket of the server will be; one in /tmp where the address of the socket, 107
    characters at most, would be too long in TMPDIR."""
    folder: str = util.get_temp_dir()
    if len(folder) + len("/listener-12345678") <= LONGEST_ADDRESS:
        return folder
    folder = tempfile.mkdtemp(prefix="pymp-", dir="/tmp")
    util.Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=-100)
    multiprocessing.current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]
    return folder


def fork(target: Callable[..., None], *args: Any) -> BaseProcess:
    """Run `target(*args)` in a process that is forked from the server, where SIGINT is blocked."""
    with undisturbed():
        process = context.Process(target=target, args=args)
        process.start()
    return process


class Descriptor:
    """A file descriptor as an argument of `fork`; the process has it under another number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (reduction.DupFd(self.number),)


def _received(sent: Any) -> Descriptor:
    return Descriptor(sent.detach())
