"""Writes one split as shards: tokens, the index of its documents, and the checksums of all."""

import hashlib
import os
from pathlib import Path

import numpy as np

from shardwright.data.blocks import BlockSums
from shardwright.data.token_manifest import DataSplit, Shard


class _HashedFile:
    """A new file with a checksum, whose bytes are on disk when it is closed."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "xb")  # noqa: SIM115 - closed by the writer that owns it
        self._digest = hashlib.sha256()
        self.sums = BlockSums()
        self.n_bytes = 0

    def write(self, array: np.ndarray) -> None:
        raw = array.tobytes()
        self._file.write(raw)
        self.sums.update(raw)
        self._digest.update(raw)
        self.n_bytes += len(raw)

    def finish(self) -> str:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return self._digest.hexdigest()

    def abandon(self) -> None:
        self._file.close()


class SplitWriter:
    """Takes documents piece by piece and writes them to shards by the rule in `shards`."""

    def __init__(
        self,
        folder: Path,
        name: str,
        dtype: np.dtype,
        separator_id: int,
        shard_tokens: int,
        masked: bool = False,
        begun: DataSplit | None = None,
    ) -> None:
        """`masked`: write a mask of the tokens that are trained on next to the tokens. `begun`: shards that are
        written already, which the new ones follow."""
        self._folder, self._name, self._dtype, self._shard_tokens = folder, name, dtype, shard_tokens
        self._masked = masked
        self._separator = np.array([separator_id], dtype)
        self._shards: list[Shard] = [] if begun is None else list(begun.shards)
        self._bin: _HashedFile | None = None
        self._idx: _HashedFile | None = None
        self._trained: _HashedFile | None = None
        self._inside_document = False
        self._shard_token_count = self._shard_document_count = 0
        self.n_tokens, self.largest_id = sum(shard.tokens for shard in self._shards), 0

    def write(self, tokens: np.ndarray, trained: np.ndarray | bool = True) -> None:
        """Write more tokens of the current document, and which of them are trained on; the first call after
        `end_document` starts a document."""
        mask = np.broadcast_to(np.asarray(trained, np.uint8), tokens.shape)
        while True:
            room = 2 * self._shard_tokens - self._shard_token_count
            if room == 0:
                self._close_shard()
                continue
            self._begin()
            assert self._bin is not None
            self._bin.write(tokens[:room])
            if self._trained is not None:
                self._trained.write(mask[:room])
            if len(tokens):
                self.largest_id = max(self.largest_id, int(tokens[:room].max()))
            self._shard_token_count += len(tokens[:room])
            self.n_tokens += len(tokens[:room])
            tokens, mask = tokens[room:], mask[room:]
            if not len(tokens):
                return

    def end_document(self, trained: bool = True) -> bool:
        """Write the separator, trained on or not. Return whether the shard has reached its size, which ends it."""
        self.write(self._separator, trained)
        self._inside_document = False
        full = self._shard_token_count >= self._shard_tokens
        if full:
            self._close_shard()
        return full

    def close(self) -> None:
        """Finish the last shard; if an error left a document unfinished, only close the files."""
        if self._inside_document:
            for file in (self._bin, self._idx, self._trained):
                if file is not None:
                    file.abandon()
        else:
            self._close_shard()

    def split(self) -> DataSplit:
        """Return the written split, after `close`, which more documents may follow."""
        return DataSplit(
            tokens=sum(shard.tokens for shard in self._shards),
            documents=sum(shard.documents for shard in self._shards),
            shards=tuple(self._shards),
        )

    def _begin(self) -> None:
        if self._bin is None or self._idx is None:
            stem = self._stem()
            self._bin = _HashedFile(self._folder / f"{stem}.bin")
            self._idx = _HashedFile(self._folder / f"{stem}.idx")
            if self._masked:
                self._trained = _HashedFile(self._folder / f"{stem}.trained")
            self._shard_token_count = self._shard_document_count = 0
        if not self._inside_document:
            self._idx.write(np.array([self._shard_token_count], "<u8"))
            self._shard_document_count += 1
            self._inside_document = True

    def _close_shard(self) -> None:
        if self._bin is None or self._idx is None:
            return
        stem, n_bytes = self._stem(), self._bin.n_bytes
        written = [file for file in (self._bin, self._idx, self._trained) if file is not None]
        sums = _HashedFile(self._folder / f"{stem}.sums")
        sums.write(np.frombuffer(b"".join(file.sums.finish() for file in written), "<u8"))
        shard = Shard(
            file=f"{stem}.bin",
            tokens=self._shard_token_count,
            documents=self._shard_document_count,
            bytes=n_bytes,
            sha256=self._bin.finish(),
            index_file=f"{stem}.idx",
            index_sha256=self._idx.finish(),
            trained_file=None if self._trained is None else f"{stem}.trained",
            trained_sha256=None if self._trained is None else self._trained.finish(),
            sums_file=f"{stem}.sums",
            sums_sha256=sums.finish(),
        )
        self._shards.append(shard)
        self._bin = self._idx = self._trained = None
        self._shard_token_count = self._shard_document_count = 0

    def _stem(self) -> str:
        return f"{self._name}-{len(self._shards):05d}"
