"""Worker processes that are forked from a server process, which has imported PyTorch and run nothing else.

A new interpreter needs seconds to import PyTorch; a fork of the server needs 0.1 s, also when a run restarts its ranks
after a fault. The server is Python's `multiprocessing.forkserver`. It ends with the last process that uses it, and
removes the temporary folders of the process that started it, in case that process was killed.
"""

import atexit
import errno
import fcntl
import functools
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, reduction, resource_tracker, util
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

from shardwright.system.control_groups import brief_waiting
from shardwright.system.errors import FullError, system_limit
from shardwright.system.signals import send_signal

context = multiprocessing.get_context("forkserver")
FEWEST_FILES = 64
"""Fewest file descriptors with which processes are forked. The server fails with a traceback of its own below 25."""
LONGEST_ADDRESS = 107
"""Maximum number of characters in the path of a Unix socket on Linux."""
SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""The environment of processes that are started: without it, Python imports from the current folder, which may be a
stranger's."""
_imported: list[str] = []
_TEMPORARY = "SHARDWRIGHT_TEMPORARY"
"""Environment variable of the server with the temporary folders of the process that starts it."""
_PREFIX = "shardwright-temporary-"
if _of_starter := os.environ.pop(_TEMPORARY, ""):
    # This process is the server. A signal to the whole group of the process that started it, as `timeout` sends it, may
    # not end the server while it imports PyTorch or while ranks finish a step.
    with suppress(PermissionError):  # it already leads a session
        os.setsid()
    for _folder in _of_starter.split(os.pathsep):
        atexit.register(shutil.rmtree, _folder, ignore_errors=True)


def preload(*modules: str) -> None:
    """Set the modules that the server imports before the first fork. Only the first call in a process has an effect."""
    if not _imported:
        _imported.extend([__name__, *modules])
        context.set_forkserver_preload(_imported)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Start the server if needed. Processes started in the block ignore Ctrl-C, which this process handles for all.
    Raises FullError for fewer file descriptors than `FEWEST_FILES`.

    The processes do not run the main script again, as multiprocessing would, so a script needs no `if __name__ ==
    "__main__"`.
    """
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < FEWEST_FILES:
        raise FullError(system_limit(OSError(errno.EMFILE, os.strerror(errno.EMFILE))))
    main = sys.modules["__main__"]
    folders = os.pathsep.join({temporary_folder(), _folder_of_socket()})
    # The server imports from the folders from which this process does, in their order.
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with environment({_TEMPORARY: folders} | brief_waiting() | SAFE_PATH | path):
        resource_tracker.ensure_running()  # it unblocks SIGINT at its end, so it comes first
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            forkserver.ensure_running()
            _end_server_at_exit()
            yield
        finally:
            sys.modules["__main__"] = main
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@functools.cache
def _end_server_at_exit() -> None:
    """Kill the server when this process ends; by itself a server ends only after its imports."""

    def end() -> None:
        if (pid := forkserver._forkserver._forkserver_pid) is not None:  # type: ignore[attr-defined]
            send_signal(pid, signal.SIGKILL)

    util.Finalize(None, end, exitpriority=-99)  # before the folders of `_new_folder` are removed


@contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables for the processes that are started in the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@functools.cache
def temporary_folder() -> str:
    """Return the folder in TMPDIR for the temporary files of this process and its ranks.

    This process removes the folder when it ends. If it is killed, the server removes the folder. If the server is
    killed too, the next process with such a folder removes it.
    """
    return _new_folder(tempfile.gettempdir())


def _folder_of_socket() -> str:
    """Return the folder of the server's socket: `temporary_folder`, or a folder in /tmp if the socket's path would
    exceed 107 characters."""
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    folder: str = config.get("tempdir") or temporary_folder()
    if len(folder) + len("/listener-12345678") > LONGEST_ADDRESS:
        folder = _new_folder("/tmp")
    config["tempdir"] = folder
    return folder


def _new_folder(parent: str) -> str:
    """Remove the folders of ended processes, then create a folder that this process locks."""
    for path in Path(parent).glob(f"{_PREFIX}*"):
        _remove_if_unlocked(path)
    while True:
        folder = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        with suppress(OSError):  # a file system without locks: nothing is removed there either
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.path.isdir(folder):  # another process may have removed it before it was locked
            util.Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=-100)
            return folder
        os.close(descriptor)


def _remove_if_unlocked(path: Path) -> None:
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(descriptor)


def fork(target: Callable[..., None], *args: Any) -> BaseProcess:
    """Run `target(*args)` in a process forked from the server, with SIGINT blocked."""
    with undisturbed():
        process = context.Process(target=target, args=args)
        process.start()
    return process


class Descriptor:
    """A file descriptor as an argument of `fork`; it has another number in the new process."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (reduction.DupFd(self.number),)


def _received(sent: Any) -> Descriptor:
    return Descriptor(sent.detach())
