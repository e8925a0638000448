"""A folder that appears complete or not at all: written beside its place, moved there by one rename."""

import errno
import os
import re
import shutil
import socket
from pathlib import Path
from types import TracebackType

from shardwright.data.shards import MANIFEST, Manifest
from shardwright.errors import DataError
from shardwright.units import format_bytes

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What this process is writing now. Its pid in a folder's name may be that of an earlier process.
_in_use: set[Path] = set()


class Publication:
    """The folder being written for `out`; leaving the `with` block unpublished removes it.

    Raises DataError if `out` may not be replaced, the place cannot be written, or the disk is full.
    """

    def __init__(self, out: Path, *, overwrite: bool) -> None:
        self.out, self._overwrite = Path(os.path.abspath(out)), overwrite
        owner = f"{os.getpid()}-{socket.gethostname()}"
        self.folder = self.out.with_name(f"{self.out.name}.partial-{owner}")
        self._replaced = self.out.with_name(f"{self.out.name}.replaced-{owner}")

    def __enter__(self) -> "Publication":
        if self.folder in _in_use:
            raise DataError(f"{self.out}: this process is already writing it")
        try:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            self._clear_leftovers()
            self._check_out()
            self.folder.mkdir()
        except OSError as error:
            raise DataError(f"{self.out}: cannot be written: {error.strerror}") from error
        _in_use.add(self.folder)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _in_use.discard(self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)
        if isinstance(error, OSError):
            if error.errno in NO_ROOM:
                free = format_bytes(shutil.disk_usage(self.out.parent).free)
                raise DataError(
                    f"{self.out}: no room to write it ({error.strerror}; {free} free now that what was "
                    "written is gone again); free some, or choose another --out. Tokens take half the size "
                    "of most text, all of it with a vocabulary above 65,536"
                ) from error
            raise DataError(f"{self.out}: cannot be written: {error}") from error

    def write(self, name: str, content: bytes) -> None:
        """A file of the folder, on disk when this returns."""
        with open(self.folder / name, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    def publish(self) -> None:
        """Move the folder to `out`; what was there is removed only after that."""
        _sync_folder(self.folder)
        self._check_out()
        replacing = self.out.exists() and any(self.out.iterdir())
        if replacing:
            self.out.rename(self._replaced)
        try:
            self.folder.rename(self.out)
        except OSError:
            if replacing:
                self._replaced.rename(self.out)
            raise
        _sync_folder(self.out.parent)
        if replacing:
            shutil.rmtree(self._replaced)

    def _check_out(self) -> None:
        """`out` may be absent, an empty folder, or, under overwrite, token shards and nothing else."""
        if not os.path.lexists(self.out):
            return
        if not self.out.is_dir() or self.out.is_symlink():
            raise DataError(f"{self.out}: exists and is not a folder; choose another --out")
        present = {entry.name for entry in self.out.iterdir()}
        if not present:
            return
        if not self._overwrite:
            raise DataError(f"{self.out}: exists already; choose another --out, or replace it with --overwrite")
        try:
            manifest = Manifest.read(self.out, check_files=False)
        except DataError as error:
            raise DataError(f"--overwrite replaces only what prepare made: {error}") from None
        shards = [shard for split in manifest.splits.values() for shard in split.shards]
        ours = {MANIFEST, manifest.tokenizer_file, *(s.file for s in shards), *(s.index_file for s in shards)}
        if others := sorted(present - ours):
            raise DataError(
                f"{self.out}: --overwrite would delete files that prepare did not make: "
                f"{', '.join(others[:5])}; move them away first"
            )

    def _clear_leftovers(self) -> None:
        """Remove what dead processes of this machine left; put back what one had moved aside to replace."""
        pattern = re.compile(
            re.escape(self.out.name) + r"\.(partial|replaced)-(\d+)-" + re.escape(socket.gethostname())
        )
        for entry in sorted(self.out.parent.iterdir()):
            match = pattern.fullmatch(entry.name)
            if match is None or _alive(int(match[2])):
                continue
            if match[1] == "replaced" and not self.out.exists():
                entry.rename(self.out)
            else:
                shutil.rmtree(entry, ignore_errors=True)


def _alive(pid: int) -> bool:
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
