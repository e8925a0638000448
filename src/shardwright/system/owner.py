"""The lock of a folder that one process owns."""

import contextlib
import fcntl
import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from shardwright.system.errors import InputError
from shardwright.system.files import inside, open_regular, read_bytes, runs_here

LOCK = ".lock"
_OWNED_BY = "process "
_OWNER = re.compile(rf"{_OWNED_BY}(\d{{1,9}}) on (\S+)\n")


_ORPHANS_S = 30.0
"""Seconds in which the processes of an owner that was killed have to end."""


def problem_of_owner(folder: Path) -> str | None:
    """Return why a run cannot start in a folder: another process owns it (`sole_owner`). None if no process does, or
    if the owner was killed, since `sole_owner` waits for processes that it started."""
    try:
        with open_regular(folder / LOCK) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return None if _ends(folder) else _used_by(folder)
    except OSError:
        pass  # no folder, or no locks
    return None


def owner_runs(folder: Path) -> bool | None:
    """Return whether the last owner of a folder (`sole_owner`) is still running; None if it is unknown or on another
    machine. The lock itself is not touched, because a run that starts at that moment would find it taken."""
    try:
        owner = _OWNER.fullmatch(_text_of_lock(folder))
    except (OSError, InputError):
        return None
    if owner is None or owner[2] != socket.gethostname():
        return None
    return runs_here(int(owner[1]))


def _text_of_lock(folder: Path) -> str:
    return read_bytes(inside(folder, LOCK)).decode(errors="replace")


def _used_by(folder: Path, another: str = "--set out=...") -> str:
    owner = _text_of_lock(folder).strip()
    return (
        f"{folder} is in use by {owner or 'another process'}; wait for it to end, or name another folder with {another}"
    )


def _ends(folder: Path) -> bool:
    """Return whether the owner of a locked folder was killed, so that only processes that it started have the lock."""
    return owner_runs(folder) is False and not _text_of_lock(folder).startswith(f"{_OWNED_BY}{os.getpid()} on ")


def _locks(file: IO[str]) -> bool:
    """Lock a file unless another process has locked it; return whether it did not."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks: ownership cannot be checked
    return True


@contextlib.contextmanager
def sole_owner(folder: Path, another: str = "--set out=...") -> Iterator[None]:
    """Own a folder during the block and create it if needed. The end of the process also releases it. `another`: the
    option that names another folder, for messages.

    Waits for the processes of an owner that was killed. Raises InputError, with the owner's process, if another process
    owns the folder, and for a `.lock` of another
    program, which is not replaced.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK).open("a+", errors="replace")
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error.strerror}; name another with {another}") from None
    with lock as file:
        until = time.monotonic() + _ORPHANS_S
        while not _locks(file):
            if not _ends(folder) or time.monotonic() > until:
                raise InputError(_used_by(folder, another))
            time.sleep(0.05)
        file.seek(0)
        if (text := file.read(len(_OWNED_BY))) and text != _OWNED_BY:
            raise InputError(
                f"{folder / LOCK} is no lock of Shardwright; move it away, or name another folder with {another}"
            )
        file.truncate(0)
        file.write(f"{_OWNED_BY}{os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield
