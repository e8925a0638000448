"""A folder of tokens on disk: its manifest, and each split as one long memory-mapped array of tokens.

    manifest.json            written last; a file that it does not list does not count
    tokenizer.json           the tokenizer that made the ids
    train-00000.bin          token ids, little-endian uint16, or uint32 for a vocabulary above 65,536
    train-00000.idx          uint64: the first token of each document that starts in this shard
    train-00000.trained      for conversations: a byte for each token, 1 if it is trained on
    train-00000.sums         checksums of the blocks of these files (`blocks`)
    chat_template.jinja      for conversations: the template that rendered the messages
    validation-00000.bin ...

Every document ends with one separator. A shard is closed at the first document end at or after `shard_tokens`, and in
any case at 2 x `shard_tokens`: so a document of at most `shard_tokens` is in one shard, and only a longer one may
continue in the next.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from shardwright.config.mixture import sources_of
from shardwright.config.sections import DataSection, TokenCache
from shardwright.data.blocks import CheckedFile, SumsFile, file_sha256, n_blocks
from shardwright.data.mirror import Mirror, MirroredFile, warm
from shardwright.data.token_manifest import INDEX_BYTES, MANIFEST, DataManifest, Shard
from shardwright.system.errors import DataError, nearest
from shardwright.system.remote import REMOTE
from shardwright.system.units import MiB

INDEX_CHECKED_AT_START_BYTES = 256 * MiB
"""Indices of up to this size in total are checked when a split is opened, larger ones when they are first used."""
DEFAULT_CACHE = TokenCache()


class TokenSplit:
    """All shards of a split as one array of `n_tokens` ids and `n_documents` documents, read by memory map."""

    def __init__(
        self, folder: Path, name: str, manifest: DataManifest, mirror: Mirror | None = None, first_only: bool = False
    ) -> None:
        """`mirror`: of tokens that are not on this disk. `first_only`: take the first shard only."""
        self.folder, self.name, self.manifest, self._mirror = folder, name, manifest, mirror
        self.mirrored = mirror is not None
        self.separator_id = manifest.separator_id
        self.n_tokens = self.n_documents = 0
        self._tokens: list[CheckedFile] = []
        self._indices: list[CheckedFile] = []
        self._trained: list[CheckedFile | None] = []
        self._token_ends: list[int] = []
        self._document_ends: list[int] = []
        self.first_only = first_only
        self._append(manifest.splits[name].shards[: 1 if first_only else None])

    def _append(self, shards: Sequence[Shard]) -> None:
        for shard in shards:
            tokens, index, trained = _open_files(self.folder, shard, self.manifest, self._mirror)
            self._tokens.append(tokens)
            self._indices.append(index)
            self._trained.append(trained)
            self._token_ends.append(self.n_tokens + shard.tokens)
            self._document_ends.append(self.n_documents + shard.documents)
            # Last, because another thread may read the split.
            self.n_tokens, self.n_documents = self._token_ends[-1], self._document_ends[-1]

    @property
    def called(self) -> str:
        """The split in a sentence."""
        if self.first_only:
            return f"the first shard of the {self.name} split, which data.order='shards' evaluates,"
        return f"the {self.name} split"

    @property
    def token_ends(self) -> list[int]:
        """The number of tokens up to the end of each shard."""
        return list(self._token_ends)

    def grow(self) -> bool:
        """Read the manifest again and append the shards that were published since. Return whether there are any, or
        the split has become complete. Raises DataError if the folder has other tokens now."""
        if self.manifest.unfinished is None:
            return False
        manifest = self._mirror.refresh() if self._mirror else DataManifest.read(self.folder, check_files=False)
        before, now = self.manifest, manifest.splits.get(self.name)
        n = len(self._tokens)
        if now is None or before.publication != manifest.publication or not _same_shards(now.shards, self._shards):
            raise DataError(f"{self.folder}: it was replaced while this process reads it; start the run again")
        if len(now.shards) == n and manifest.unfinished is not None:
            return False
        self.manifest = manifest
        self._append(now.shards[n:])
        return True

    @property
    def _shards(self) -> tuple[Shard, ...]:
        return self.manifest.splits[self.name].shards[: len(self._tokens)]

    def tokens(self, start: int, length: int) -> np.ndarray:
        """Return ids [length] from token `start` of the split on, across shards; uint16 or uint32, read-only."""
        return self._row(self._tokens, start, length)

    def fetch(self, spans: Iterable[tuple[int, int]]) -> None:
        """Read spans (first token, length) of a mirrored split, many at once, which makes later reads local."""
        reads = [self.tokens, self.trained] if self.masked else [self.tokens]
        warm([partial(read, *span) for span in spans for read in reads])

    @property
    def masked(self) -> bool:
        """Return whether these are conversations, with some tokens that are not trained on."""
        return any(file is not None for file in self._trained)

    def trained(self, start: int, length: int) -> np.ndarray:
        """Return which of the tokens [length] from token `start` of the split on are trained on; bool."""
        if not self.masked:
            return np.ones(length, bool)
        return self._row([file for file in self._trained if file is not None], start, length).astype(bool)

    def check_index(self) -> None:
        """Raise DataError if an index is damaged, which is skipped if all indices together are too large to check
        quickly, or if the first document does not end with the separator of the manifest."""
        if self.n_documents * INDEX_BYTES <= INDEX_CHECKED_AT_START_BYTES:
            for index in self._indices:
                index.read_all()
        starts = [0, *self._document_ends]
        kept = next((starts[i] for i, shard in enumerate(self._shards) if shard.documents and not shard.deleted), None)
        if (
            kept is not None
            and (last := int(self.tokens(self.document_start(kept + 1) - 1, 1)[0])) != self.separator_id
        ):
            raise DataError(
                f"{self.folder}: {MANIFEST} contradicts the tokens: separator_id={self.separator_id}, and a document "
                f"of {self.name} ends with token {last}; copy the manifest again, or prepare the data again"
            )

    def _row(self, files: list[CheckedFile], start: int, length: int) -> np.ndarray:
        if start < 0 or length < 0 or start + length > self.n_tokens:
            raise IndexError(f"tokens {start} to {start + length} of a split of {self.n_tokens}")
        pieces: list[np.ndarray] = []
        while length or not pieces:
            shard = min(bisect_right(self._token_ends, start), len(files) - 1)
            if shard < 0:
                return np.empty(0, f"<u{self.manifest.itemsize}")
            piece = files[shard].read(start - self._shard_start(shard), length)
            pieces.append(piece)
            start, length = start + len(piece), length - len(piece)
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def document(self, i: int) -> np.ndarray:
        """Return the ids of document i, its separator last."""
        start, end = self.document_start(i), self.document_start(i + 1)
        return self.tokens(start, end - start)

    def document_start(self, i: int) -> int:
        """Return the first token of document i in the split; n_tokens for i = n_documents."""
        if not 0 <= i <= self.n_documents:
            raise IndexError(f"document {i} of a split of {self.n_documents}")
        if i == self.n_documents:
            return self.n_tokens
        shard = bisect_right(self._document_ends, i)
        first = self._document_ends[shard] - len(self._indices[shard])
        return self._shard_start(shard) + int(self._indices[shard].read_all()[i - first])

    def document_starts(self, start: int, length: int) -> np.ndarray:
        """Return the starts of documents among `length` tokens from token `start` on, counted from `start`; int64."""
        starts = [np.empty(0, np.int64)]
        for shard in range(bisect_right(self._token_ends, start), len(self._tokens)):
            first = self._shard_start(shard) - start
            if first >= length:
                break
            index = self._indices[shard].read_all()
            low, high = np.searchsorted(index, np.array([max(0, -first), max(0, length - first)], index.dtype))
            starts.append(index[low:high].astype(np.int64) + first)
        return np.concatenate(starts)

    def document_at(self, token: int) -> int:
        """Return the number of the document of a token of the split."""
        shard = bisect_right(self._token_ends, token)
        index = self._indices[shard].read_all()
        offset = np.array(token - self._shard_start(shard), index.dtype)
        return self._document_ends[shard] - len(index) + int(np.searchsorted(index, offset, side="right")) - 1

    def document_lengths(self) -> np.ndarray:
        """Return the length of every document with its separator; int64 [n_documents], 8 bytes of memory each."""
        starts = [index.read_all().astype(np.int64) + self._shard_start(i) for i, index in enumerate(self._indices)]
        return np.diff(np.concatenate([*starts, np.array([self.n_tokens])]))

    def shard_at(self, token: int) -> int:
        """Return the number of the shard of a token of the split."""
        return bisect_right(self._token_ends, token)

    @property
    def n_deleted(self) -> int:
        """The number of shards whose tokens are deleted."""
        return sum(shard.deleted for shard in self._shards)

    def place(self, token: int) -> tuple[Path, int]:
        """Return the file of a token of the split, and the number of the token in it."""
        shard = bisect_right(self._token_ends, token)
        return self._tokens[shard].path, token - self._shard_start(shard)

    def where(self, token: int) -> str:
        """Return the location of a token of the split for messages: `FILE, token N of it`."""
        file, offset = self.place(token)
        return f"{file}, token {offset} of it"

    def _shard_start(self, shard: int) -> int:
        return self._token_ends[shard] - len(self._tokens[shard])


def _same_shards(now: Sequence[Shard], before: Sequence[Shard]) -> bool:
    """Return whether the first shards of a listing are the first shards of an earlier listing."""
    return len(now) >= len(before) and all(one.same_tokens(other) for one, other in zip(now, before, strict=False))


def data_folder(path: str | Path, cache: TokenCache = DEFAULT_CACHE) -> Path:
    """Return the local folder of a folder of tokens: itself, or the mirror of a URL, with its small files. Raises
    DataError."""
    return mirror[0].folder if (mirror := _mirror(path, cache)) else Path(path)


def source_folders(data: DataSection) -> dict[str, Path]:
    """Return the local folder of each source of a run by its path in the run file, as `data_folder` does."""
    return {source.path: data_folder(source.path, data.token_cache) for source in sources_of(data)}


def tokenizer_folder(data: DataSection) -> Path:
    """Return the data folder with the tokenizer of a run, which is the same for all its sources. Raises DataError."""
    return data_folder(sources_of(data)[0].path, data.token_cache)


def _mirror(path: str | Path, cache: TokenCache) -> tuple[Mirror, DataManifest] | None:
    return Mirror.open(str(path), *cache) if REMOTE in str(path) else None


def open_split(
    directory: str | Path, name: str, cache: TokenCache = DEFAULT_CACHE, *, first_only: bool = False
) -> TokenSplit:
    """Return the split `name` ("train", "validation") of a folder of tokens, which may be at a URL, or its first
    shard; raises as DataManifest.read does."""
    mirror, manifest = _mirror(directory, cache) or (None, None)
    folder = mirror.folder if mirror else Path(directory)
    manifest = manifest or DataManifest.read(folder)
    if name not in manifest.splits:
        hint = nearest(name, manifest.splits) if manifest.splits else "it has none; prepare the data again"
        raise DataError(f"{directory}: no split {name!r}; {hint}")
    split = TokenSplit(folder, name, manifest, mirror, first_only)
    split.check_index()
    return split


def open_split_of_run(path: str, name: str, data: DataSection) -> TokenSplit:
    """Return the split `name` of a source as a run with these `data` reads it. With data.order="shards", validation is
    its first shard, which stays the same while shards are added. Raises as DataManifest.read does."""
    return open_split(path, name, data.token_cache, first_only=data.order == "shards" and name == "validation")


def _open_files(
    folder: Path, shard: Shard, manifest: DataManifest, mirror: Mirror | None
) -> tuple[CheckedFile, CheckedFile, CheckedFile | None]:
    """Return the tokens, the index and, for conversations, the mask of a shard."""
    size, sums = manifest.block_bytes, None
    if shard.sums_file and shard.sums_sha256:
        sums = SumsFile(folder / shard.sums_file, shard.sums_sha256, size)
    index_block = n_blocks(shard.bytes, size)
    trained_block = index_block + n_blocks(shard.documents * INDEX_BYTES, size)
    index = folder / shard.index_file

    def opened(name: str, dtype: str, sha256: str, first_block: int) -> CheckedFile:
        if mirror is not None and sums is not None:
            return MirroredFile(mirror, folder / name, dtype, shard.tokens, sums, first_block)
        return CheckedFile(folder / name, dtype, shard.tokens, sha256, sums, first_block, shard.deleted)

    return (
        opened(shard.file, f"<u{manifest.itemsize}", shard.sha256, 0),
        CheckedFile(index, "<u8", shard.documents, shard.index_sha256, sums, index_block),
        opened(shard.trained_file, "u1", shard.trained_sha256 or "", trained_block) if shard.trained_file else None,
    )


def verify_checksums(directory: str | Path, progress: Callable[[str], None] | None = None) -> list[str]:
    """Read every file and compare its sha256 with the manifest's; return the problems, if any.

    `progress` is called with the name of each file. Raises DataError only if the manifest cannot be read.
    """
    folder = Path(directory)
    manifest = DataManifest.read(folder, check_files=False)
    problems = manifest.missing_files(folder)
    shards = [shard for split in manifest.splits.values() for shard in split.shards if shard.deleted]
    deleted = {name for shard in shards for name in shard.content}
    for name, sha256 in manifest.sha256_of_files.items():
        if name in deleted or any(problem.startswith(f"{name} ") for problem in problems):
            continue
        if progress is not None:
            progress(name)
        actual = file_sha256(folder / name)
        if actual != sha256:
            problems.append(f"{name} has the checksum {actual[:12]}..., the manifest says {sha256[:12]}...: damaged")
    return problems
