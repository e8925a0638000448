"""Tokens on object storage, read through a cache on a local disk of bounded size.

A folder of tokens at a URL of fsspec has a mirror: a local folder with the same files. Manifest, tokenizer, indices and
checksums are copied when the folder is opened. Files of tokens and masks are sparse: they have their full size and no
content, and a block is fetched when it is first read. The checksum of a block says whether its content is there, so a
block that was half written, evicted or damaged is fetched again, and no record of the content is kept.

The ranks of a node share a mirror. If the files of tokens and masks occupy more than `data.cache_gib`, a rank makes
holes of the blocks that it fetched first. Mirrors are named by the checksum of the manifest: the same tokens at two
URLs have one. The mirror of a folder that `prepare --publish` adds shards to is named by its publication, and grows.
"""

import ctypes
import hashlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.data.blocks import WAY_OUT, CheckedFile, SumsFile, file_sha256
from shardwright.data.token_manifest import MANIFEST, DataManifest
from shardwright.system.errors import NO_ROOM, DataError
from shardwright.system.files import LONGEST_TEXT, reason, write_whole
from shardwright.system.remote import file_system
from shardwright.system.units import MiB

N_CONNECTIONS = 16
"""Requests of a rank that are in flight at once."""
ATTEMPTS, PAUSE_S = 4, 0.5
"""Tries of a request, and the pause after the first of them, which doubles."""
OTHER_CACHE = "set data.cache to another folder"
_KEEP_SIZE_AND_PUNCH_HOLE = 0x01 | 0x02
_SPARSE = (".bin", ".trained")
_DISK_BLOCK_BYTES = 512
"""The unit of `st_blocks`."""
_MEASURED_EVERY_BYTES = 16 * MiB
"""A rank looks how much the mirror occupies after it has fetched this much."""


class RemoteFolder:
    """A folder at a URL of fsspec. Requests that fail are repeated; DataError names the file and the last reason."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    @property
    def _system(self) -> tuple[Any, str]:
        try:
            return _process_file_system(self.url, os.getpid())
        except ValueError as error:
            raise DataError(f"{self.url}: {error}") from None

    def read(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        """Return the bytes [start, end) of a file, or the whole file."""
        system, root = self._system
        for attempt in range(ATTEMPTS):
            try:
                content: bytes = system.cat_file(f"{root.rstrip('/')}/{name}", start=start, end=end)
                return content
            except FileNotFoundError:
                raise DataError(f"{self.url}/{name}: there is no such file") from None
            except Exception as error:  # each file system has errors of its own
                if attempt + 1 == ATTEMPTS:
                    why = reason(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
                    raise DataError(f"{self.url}/{name}: cannot be read after {ATTEMPTS} tries: {why}") from None
                time.sleep(PAUSE_S * 2**attempt)
        raise AssertionError("unreachable")


def _parsed(content: bytes, remote: RemoteFolder) -> DataManifest:
    """Return the manifest of the files at a URL. Raises DataError, also for names that lead elsewhere."""
    place = Path("/folder of tokens")  # only for the names of files
    try:
        return DataManifest.parsed(content, place)
    except DataError as error:
        raise DataError(*(problem.replace(str(place), remote.url) for problem in error.problems)) from None


@cache
def _mirror_of_this_process(url: str, folder: Path, limit_bytes: int, process: int) -> "Mirror":
    return Mirror(RemoteFolder(url), folder, limit_bytes)


@cache
def _process_file_system(url: str, process: int) -> tuple[Any, str]:
    """Return the file system of a URL. A forked process has its own, because connections cannot be shared."""
    return file_system(url)


class Mirror:
    """The local folder of the tokens at a URL; see the module's docstring. A process has one for each URL, manifest and
    cache (`Mirror.open`)."""

    def __init__(self, remote: RemoteFolder, folder: Path, limit_bytes: int) -> None:
        self.remote, self.folder, self._limit_bytes = remote, folder, limit_bytes
        self._fetched: deque[tuple[Path, int, int]] = deque()
        self._unmeasured_bytes = 0
        self._lock = threading.Lock()
        self._files: set[str] = set()
        """The files that are there: whole, or sparse."""

    @staticmethod
    def open(url: str, cache_folder: str | None, limit_bytes: int) -> "tuple[Mirror, DataManifest]":
        """Return the mirror of the tokens that are at a URL now, and their manifest, whose files it has. Raises
        DataError."""
        remote = RemoteFolder(url)
        content = remote.read(MANIFEST, 0, LONGEST_TEXT)
        manifest = _parsed(content, remote)
        root = Path(cache_folder) if cache_folder else default_cache()
        folder = root / (manifest.publication or hashlib.sha256(content).hexdigest())[:16]
        mirror = _mirror_of_this_process(remote.url, folder, limit_bytes, os.getpid())
        mirror._take(content, manifest)
        return mirror, manifest

    def refresh(self) -> DataManifest:
        """Return the manifest that is at the URL now, whose files the mirror has. Raises DataError."""
        content = self.remote.read(MANIFEST, 0, LONGEST_TEXT)
        manifest = _parsed(content, self.remote)
        self._take(content, manifest)
        return manifest

    def _take(self, content: bytes, manifest: DataManifest) -> None:
        """Copy or reserve the files of a manifest that are not there, then write the manifest."""
        sums = {name: sha256 for name, sha256 in manifest.sha256_of_files.items() if name not in self._files}
        present = not sums and (self.folder / MANIFEST).is_file()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"{self.folder}: cannot be made: {reason(error)}; {OTHER_CACHE}") from None
        for shard in (shard for split in manifest.splits.values() for shard in split.shards):
            if not (shard.sums_file and shard.sums_sha256):
                raise DataError(
                    f"{self.remote.url}: format version {manifest.format_version} has no checksums of blocks, without "
                    f"which tokens are not read from a URL; prepare the data again, or copy the folder to this machine"
                )
            for name in (shard.file, shard.trained_file):
                if name and sums.pop(name, None):
                    self._reserve(name, manifest.n_bytes_of_files(shard)[name])
        self._check_bound()
        for name, sha256 in sums.items():
            self._copy(name, sha256)
        self._files.update(manifest.sha256_of_files)
        if not present:
            write_whole(self.folder / MANIFEST, content)

    def _copy(self, name: str, sha256: str) -> None:
        """Copy a whole file to the mirror, unless it is there and right. Raises DataError for another checksum."""
        path = self.folder / name
        if path.is_file() and file_sha256(path) == sha256:
            return
        content = self.remote.read(name)
        if hashlib.sha256(content).hexdigest() != sha256:
            raise DataError(f"{self.remote.url}/{name} is damaged: its sha256 differs from the manifest's; {WAY_OUT}")
        write_whole(path, content)

    def _reserve(self, name: str, n_bytes: int) -> None:
        """Make a sparse file of `n_bytes`, unless it is there."""
        try:
            with (self.folder / name).open("ab") as file:
                if os.fstat(file.fileno()).st_size != n_bytes:
                    file.truncate(n_bytes)
        except OSError as error:
            raise DataError(f"{self.folder / name}: cannot be made: {reason(error)}; {OTHER_CACHE}") from None

    def _check_bound(self) -> None:
        """Raise DataError if the tokens do not fit into the bound and blocks cannot be deleted."""
        sparse = _sparse_files(self.folder)
        if sum(path.stat().st_size for path in sparse) > self._limit_bytes:
            make_hole(sparse[0], 0, 1)

    def fetch(self, path: Path, first: int, end: int) -> bytes:
        """Return the bytes [first, end) of a file of tokens from the URL, and keep them in the mirror."""
        content = self.remote.read(path.name, first, end)
        if len(content) != end - first:
            raise DataError(f"{self.remote.url}/{path.name} was cut short: it has no bytes {first} to {end - 1}")
        try:
            with path.open("r+b") as file:
                os.pwrite(file.fileno(), content, first)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise DataError(f"{path}: cannot be written: {reason(error)}; {OTHER_CACHE}") from None
            return content  # without room on the disk, tokens are read from the URL each time
        self._fetched.append((path, first, end - first))
        with self._lock:
            self._unmeasured_bytes += len(content)
            if self._unmeasured_bytes >= min(_MEASURED_EVERY_BYTES, self._limit_bytes // 4):
                self._unmeasured_bytes = 0
                self._evict()
        return content

    def _evict(self) -> None:
        """Make holes of blocks that this rank fetched and, if earlier runs left more, of the files that occupy most."""
        surplus = occupied_bytes(self.folder) - self._limit_bytes
        while surplus > 0 and self._fetched:
            path, first, n_bytes = self._fetched.popleft()
            make_hole(path, first, n_bytes)
            surplus -= n_bytes
        for path in sorted(_sparse_files(self.folder) if surplus > 0 else [], key=_occupied, reverse=True):
            if surplus > 0:
                surplus -= _occupied(path)
                make_hole(path, 0, path.stat().st_size)


class MirroredFile(CheckedFile):
    """A file of tokens or masks in a mirror. Each read compares its blocks with their checksums. Blocks that differ are
    fetched."""

    def __init__(
        self, mirror: Mirror, path: Path, dtype: str, length: int, sums: SumsFile, first_block: int = 0
    ) -> None:
        super().__init__(path, dtype, length, "", sums, first_block)
        self._mirror = mirror

    def read(self, start: int, length: int) -> np.ndarray:
        """Read as `CheckedFile.read`; the result is a copy, because another rank may evict the blocks at any time."""
        item, block = self._row.itemsize, self._block_bytes
        begin, end = start * item, min(start + length, len(self)) * item
        if end <= begin:
            return np.empty(0, self._row.dtype)
        first, last = begin // block, (end - 1) // block
        self._require_whole_file()
        content = bytearray(self._row.view(np.uint8)[first * block : (last + 1) * block].tobytes())
        missing = (number for number in range(first, last + 1) if not self._is_right(content, first, number))
        for low, high in _runs(missing):
            stop = min(high * block, self._row.nbytes)
            content[(low - first) * block : stop - first * block] = self._mirror.fetch(self.path, low * block, stop)
            for number in range(low, high):
                if not self._is_right(content, first, number):
                    raise DataError(
                        f"{self._mirror.remote.url}/{self.path.name} is damaged in block {number} (from byte "
                        f"{number * block} on): its checksum differs from the written one; {WAY_OUT}"
                    )
        inside = memoryview(content)[begin - first * block : end - first * block]
        return np.frombuffer(inside.toreadonly(), self._row.dtype)

    def _is_right(self, content: bytearray, first: int, number: int) -> bool:
        begin = (number - first) * self._block_bytes
        return self._matches(number, memoryview(content)[begin : begin + self._block_bytes])


def _runs(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield (first, last + 1) of each run of consecutive numbers."""
    low = high = -1
    for number in numbers:
        if number != high:
            if high > low:
                yield low, high
            low = number
        high = number + 1
    if high > low:
        yield low, high


def occupied_bytes(folder: Path) -> int:
    """Return the bytes of disk that files of tokens and masks occupy in a mirror, without their holes."""
    return sum(map(_occupied, _sparse_files(folder)))


def _sparse_files(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.suffix in _SPARSE]


def _occupied(path: Path) -> int:
    return path.stat().st_blocks * _DISK_BLOCK_BYTES


def make_hole(path: Path, first: int, n_bytes: int) -> None:
    """Give the disk blocks of a range of a file back, which then reads as zeros; see fallocate(2). Raises DataError if
    the file system cannot."""
    function = ctypes.CDLL(None, use_errno=True).fallocate64
    function.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    try:
        with path.open("r+b") as file:
            failed = function(file.fileno(), _KEEP_SIZE_AND_PUNCH_HOLE, first, n_bytes)
    except OSError as error:
        raise DataError(f"{path}: cannot be opened: {reason(error)}; {OTHER_CACHE}") from None
    if failed:
        why = os.strerror(ctypes.get_errno())
        what = "the file system cannot delete a part of a file, as a full cache needs"
        raise DataError(f"{path}: {what}: {why}; {OTHER_CACHE}")


def warm(reads: Iterable[Callable[[], object]]) -> None:
    """Call reads of tokens, `N_CONNECTIONS` at once, so that their blocks are in the mirror. Raises the first error."""
    with ThreadPoolExecutor(N_CONNECTIONS) as pool:
        for result in [pool.submit(read) for read in reads]:
            result.result()


def default_cache() -> Path:
    """Return the folder of mirrors without `data.cache`: in XDG_CACHE_HOME, by default ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardwright" / "tokens"
