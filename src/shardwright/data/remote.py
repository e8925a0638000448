"""Files that are not on the disk, by fsspec: s3://, gs://, https://, memory:// and others."""

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from shardwright.system.errors import DataError
from shardwright.system.remote import file_system


@dataclass(frozen=True)
class RemoteFile:
    """A file named by a URL, with the attributes of `Path` that readers need."""

    url: str
    size_bytes: int

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        return PurePosixPath(self.url).name

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.url).suffix

    def open(self, mode: str) -> Any:
        import fsspec

        return fsspec.open(self.url, mode).open()


File = Path | RemoteFile


def size_bytes(file: File) -> int:
    return file.size_bytes if isinstance(file, RemoteFile) else file.stat().st_size


def remote_files(source: str, glob: str | None) -> Iterator[RemoteFile]:
    """Yield the file at a URL, or the files below it in sorted order; hidden files are left out, and `glob` chooses as
    in a folder. Raises DataError if there is none, and for a place that needs a package or cannot be reached."""
    try:
        system, root = file_system(source)
        entries = {root: system.info(root)} if system.isfile(root) else system.find(root, detail=True)
    except ValueError as error:
        raise DataError(f"{source}: {error}") from None
    except Exception as error:  # each file system raises its own types: no network, no such bucket, no permission
        raise DataError(f"{source}: cannot be listed: {type(error).__name__}: {error}") from error
    if not entries:
        raise DataError(f"{source}: there is no such file, and no files below it")
    if glob is not None and root in entries:
        raise DataError(f"--glob {glob!r} chooses files of a folder, but {source} is a file; leave it out")
    chosen = [path for path in sorted(entries) if path == root or _is_chosen(path[len(root) :].lstrip("/"), glob)]
    if not chosen:
        raise DataError(f"{source}: the folder has no files" + (f" that match --glob {glob!r}" if glob else ""))
    for path in chosen:
        yield RemoteFile(system.unstrip_protocol(path), int(entries[path]["size"] or 0))


def _is_chosen(below: str, glob: str | None) -> bool:
    parts = PurePosixPath(below).parts
    if any(part.startswith(".") for part in parts):
        return False
    return glob is None or fnmatch.fnmatchcase(below if "/" in glob else parts[-1], glob)
