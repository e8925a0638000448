"""Files of which nobody sees half, and folders that have one owner."""

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from shardwright.errors import InputError


def write_whole(path: Path, content: bytes) -> None:
    """Write beside `path`, then rename. Raises InputError if the place cannot be written."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_bytes(content)
        os.replace(fresh, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise InputError(f"{path} cannot be written: {error.strerror}; choose another place") from None


@contextlib.contextmanager
def sole_owner(folder: Path) -> Iterator[None]:
    """Own a folder, which is made if need be, for the length of the block; the end of the process gives it up too.

    Raises InputError, naming the process, if another one owns it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise InputError(
                f"{folder} is in use by {file.read().strip() or 'another process'}; wait for it to end, or name "
                f"another folder with --set out=..."
            ) from None
        except OSError:
            pass  # a file system without locks: nothing is lost that was there before
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield
