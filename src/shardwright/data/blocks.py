"""Checksums of the blocks of a shard's files: written next to the shard, compared when a block is first read.

    train-00000.sums   uint64, little-endian: the xxh3_64 of each BLOCK_BYTES of .bin, then of .idx, then of .trained

A block is small because samples are read in random order: a step that reads 8 KiB of a block reads the whole block once
to check it.
"""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from shardwright.system.errors import DataError
from shardwright.system.files import open_regular, read_bytes, reason
from shardwright.system.units import KiB

BLOCK_BYTES = 64 * KiB
"""The block size of folders that are written now; readers take the manifest's block size."""
SUM_BYTES = 8
WAY_OUT = "copy the file again, or prepare the data again; `shardwright data inspect DIR --verify` reads every file"


def file_sha256(path: Path) -> str:
    """Return the sha256 of a regular file, in hexadecimal digits."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def n_blocks(n_bytes: int, block_bytes: int) -> int:
    """Return the number of blocks in a file; the last one may be short."""
    return -(-n_bytes // block_bytes)


class BlockSums:
    """Computes the checksums of a file's blocks as the file is written."""

    def __init__(self) -> None:
        self._sums: list[int] = []
        self._block, self._room_bytes = xxhash.xxh3_64(), BLOCK_BYTES

    def update(self, raw: bytes) -> None:
        """Add the next bytes of the file."""
        view = memoryview(raw)
        while len(view) >= self._room_bytes:
            self._block.update(view[: self._room_bytes])
            self._sums.append(self._block.intdigest())
            view = view[self._room_bytes :]
            self._block, self._room_bytes = xxhash.xxh3_64(), BLOCK_BYTES
        self._block.update(view)
        self._room_bytes -= len(view)

    def finish(self) -> bytes:
        """Return the checksums of all blocks, as they are written to the `.sums` file."""
        last = [self._block.intdigest()] if self._room_bytes < BLOCK_BYTES else []
        return np.array(self._sums + last, "<u8").tobytes()


class SumsFile:
    """The checksums in a shard's `.sums` file, one for each `block_bytes`, read at the first use."""

    def __init__(self, path: Path, sha256: str, block_bytes: int) -> None:
        self._path, self._sha256, self.block_bytes = path, sha256, block_bytes
        self._sums: np.ndarray | None = None

    def __getitem__(self, block: int) -> int:
        if self._sums is None:
            try:
                content = read_bytes(self._path)
            except OSError as error:
                raise DataError(f"{self._path}: cannot be read: {reason(error)}; {WAY_OUT}") from None
            if hashlib.sha256(content).hexdigest() != self._sha256:
                raise DataError(f"{self._path} is damaged: its sha256 differs from the manifest's; {WAY_OUT}")
            self._sums = np.frombuffer(content, "<u8")
        return int(self._sums[block])


class CheckedFile:
    """A file of a shard as a memory-mapped array of numbers. Each block is compared with its checksum when it is first
    read.

    `sums`: the shard's checksums; this file's start at `first_block`. None in folders of format versions 1 and 2, whose
    files only have the checksum `sha256`. `deleted`: each read raises DataError.
    """

    def __init__(
        self,
        path: Path,
        dtype: str,
        length: int,
        sha256: str,
        sums: SumsFile | None,
        first_block: int = 0,
        deleted: bool = False,
    ) -> None:
        self._deleted = deleted
        self.path, self._sha256, self._sums, self._first_block = path, sha256, sums, first_block
        self._row: Any = np.memmap(path, dtype=dtype, mode="r", shape=(length,)) if length else np.empty(0, dtype)
        self._block_bytes = BLOCK_BYTES if sums is None else sums.block_bytes
        self._unread = np.ones(n_blocks(self._row.nbytes, self._block_bytes), bool)

    def __len__(self) -> int:
        return len(self._row)

    def read(self, start: int, length: int) -> np.ndarray:
        """Return at most `length` numbers from number `start` on, read-only. Raises DataError for a damaged block."""
        self._require_whole_file()
        piece: np.ndarray = self._row[start : start + length]
        if self._sums is not None and len(piece):
            first = start * self._row.itemsize // self._block_bytes
            last = ((start + len(piece)) * self._row.itemsize - 1) // self._block_bytes
            if self._unread[first : last + 1].any():
                self._check_blocks(first, last)
        return piece

    def read_all(self) -> np.ndarray:
        """Return every number of the file, which is checked as a whole at the first call. Raises DataError."""
        if self._sums is None and self._unread.any():
            self._require_whole_file()
            if hashlib.sha256(self._row).hexdigest() != self._sha256:
                raise DataError(f"{self.path} is damaged: its sha256 differs from the manifest's; {WAY_OUT}")
            self._unread[:] = False
        return self.read(0, len(self))

    def _check_blocks(self, first: int, last: int) -> None:
        raw = self._row.view(np.uint8)
        for block in range(first, last + 1):
            begin = block * self._block_bytes
            content = raw[begin : begin + self._block_bytes]
            if self._unread[block] and not self._matches(block, content):
                raise DataError(
                    f"{self.path} is damaged in block {block} (bytes {begin} to {begin + len(content) - 1}): "
                    f"its checksum differs from the written one; {WAY_OUT}"
                )
            self._unread[block] = False

    def _matches(self, block: int, content: Any) -> bool:
        """Return whether a block's bytes have the checksum that was written."""
        assert self._sums is not None
        return xxhash.xxh3_64_intdigest(content) == self._sums[self._first_block + block]

    def _require_whole_file(self) -> None:
        """Raise DataError if the file is shorter than when it was mapped: a read beyond its end would end the process
        by SIGBUS. A file that was deleted can still be read."""
        if self._deleted:
            raise DataError(
                f"{self.path}: its tokens are deleted, because a run with data.keep_gib has trained on them; prepare "
                f"the source again into another folder"
            )
        try:
            size = self.path.stat().st_size
        except OSError:
            return
        if size < self._row.nbytes:
            raise DataError(
                f"{self.path} has {size} bytes, and had {self._row.nbytes} when it was opened: it was cut short since; "
                f"copy it again, or prepare the data again, and continue with --resume"
            )
