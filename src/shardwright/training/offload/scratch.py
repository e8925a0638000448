"""A temporary file of a process, and a check of the disk space that the ranks of a machine need."""

import contextlib
import errno
import os
import socket
import tempfile
from collections import defaultdict
from mmap import mmap
from pathlib import Path
from typing import Any, Protocol

from shardwright.parallel.objects import gathered
from shardwright.system.errors import InputError, WorkerError
from shardwright.system.units import format_bytes

BLOCK = 4096
"""Alignment in bytes of the offset, length and address of a request that bypasses the page cache."""
_DIRECT = getattr(os, "O_DIRECT", 0)  # Linux only


class OffloadFile(Protocol):
    """Bytes that are read and written by offset. `direct`: bypass the page cache, for multiples of BLOCK."""

    def read(self, at: int, into: memoryview, direct: bool = False) -> None:
        """Read bytes from offset `at`."""

    def write(self, at: int, data: memoryview, direct: bool = False) -> None:
        """Write bytes from offset `at`."""


def scratch_file(folder: Path, n_bytes: int) -> OffloadFile:
    """Return a file of this rank if there is room for the files of all ranks; a collective, which every rank calls."""
    require_room(folder, n_bytes)
    return ScratchFile(folder, n_bytes)


class ScratchFile:
    """`n_bytes` zero bytes on a disk, allocated on creation.

    The file has no name: no other process can delete or change it, several runs may use one folder, and the space is
    freed when this process ends for any reason. Raises InputError if it cannot be created in `folder`, and WorkerError
    if a request fails later.
    """

    def __init__(self, folder: Path, n_bytes: int) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(dir=folder, prefix=".states-")
            self._file = os.fdopen(descriptor, "r+b", buffering=0)
            try:
                self._direct = _opened_direct(name)
            finally:
                os.unlink(name)
            if n_bytes:
                _take_room(descriptor, n_bytes)
        except OSError as error:
            raise InputError(
                f"offload_path={str(folder)!r}: a file of {format_bytes(n_bytes)} cannot be made there: "
                f"{error.strerror}; name a folder with that room on a local disk that can be written"
            ) from None

    def read(self, at: int, into: memoryview, direct: bool = False) -> None:
        """Read as `OffloadFile.read`."""
        self._all(os.preadv, at, into, direct, "read")

    def write(self, at: int, data: memoryview, direct: bool = False) -> None:
        """Write as `OffloadFile.write`."""
        self._all(os.pwritev, at, data, direct, "written")

    def _all(self, request: Any, at: int, data: memoryview, direct: bool, done: str) -> None:
        file = self._direct if direct and self._direct is not None else self._file
        try:
            while data:
                n_bytes = request(file.fileno(), [data], at)
                if not n_bytes:
                    raise OSError(errno.EIO, f"the file ends at byte {at}")
                at, data = at + n_bytes, data[n_bytes:]
        except OSError as error:
            raise WorkerError(
                f"optimizer states on the disk, offload_path={str(self.folder)!r}, cannot be {done}: {error.strerror}; "
                f"published checkpoints are whole: continue from the last one with --resume, once the disk works"
            ) from None


def _opened_direct(name: str) -> Any:
    """Return the file opened to bypass the page cache, or None if the system or the file system does not support it."""
    with contextlib.suppress(OSError):
        if _DIRECT:
            file = os.fdopen(os.open(name, os.O_RDWR | _DIRECT), "r+b", buffering=0)
            os.preadv(file.fileno(), [mmap(-1, BLOCK)], 0)
            return file
    return None


def _take_room(descriptor: int, n_bytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, n_bytes)
    else:
        os.truncate(descriptor, n_bytes)


def require_room(folder: Path, n_bytes: int) -> None:
    """Raise InputError, on every rank, unless all ranks of each machine together have room for their `n_bytes` in
    `folder`. A collective; every rank calls it."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.exists(path))
    volume = os.statvfs(existing)
    local = (socket.gethostname(), existing.stat().st_dev, n_bytes, volume.f_bavail * volume.f_frsize)
    disks = defaultdict(list)
    for host, device, needed, free in gathered(local, tuple[str, int, int, int]):
        disks[host, device].append((needed, free))
    problems = []
    for (host, _), ranks in disks.items():
        needed, free = sum(need for need, _ in ranks), min(room for _, room in ranks)
        if needed > free:
            problems.append(
                f"offload_path={str(folder)!r}: the optimizer states of {len(ranks)} ranks on {host} take "
                f"{' + '.join(format_bytes(need) for need, _ in ranks[:4])}{' + ...' if len(ranks) > 4 else ''} = "
                f"{format_bytes(needed)}, and {format_bytes(free)} are free there; free "
                f"{format_bytes(needed - free)} more, name a folder on a larger disk, or shard them over more ranks "
                f"(layout.zero, dp_shard)"
            )
    if problems:
        raise InputError(*problems)
