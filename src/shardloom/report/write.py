"""A file that appears whole or not at all."""

import contextlib
import os
from pathlib import Path

from shardloom.errors import InputError


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
        raise InputError(f"{path} cannot be written: {error.strerror}; name another file") from None
