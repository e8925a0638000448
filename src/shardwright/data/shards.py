"""A folder of tokens on disk: its manifest, and a split of it as one long memory-mapped row of tokens.

    manifest.json            written last; what is not in it does not count
    tokenizer.json           the tokenizer that made the ids
    train-00000.bin          token ids, little-endian uint16, or uint32 for a vocabulary above 65,536
    train-00000.idx          uint64: where each document that begins in this shard begins, in tokens
    train-00000.trained      of conversations: a byte for each token, 1 if it is trained on
    chat_template.jinja      of conversations: the template that wrote the messages
    validation-00000.bin ...

Every document ends with one separator. A shard is closed at the first document end at or after
`shard_tokens`, and in any case at 2 x `shard_tokens`: so a document of at most `shard_tokens` is in one
shard, and only a longer one may continue in the next.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from shardwright.data.chat import TEMPLATE
from shardwright.errors import DataError, near_path, nearest
from shardwright.files import inside, open_regular, parse_json, read_bytes

FORMAT = "shardwright.tokens"
FORMAT_VERSION = 2
"""Version 2 has masks of conversations; a folder without them is still written as version 1."""
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
INDEX_BYTES = 8
PREPARE = "shardwright data prepare SRC --out DIR"


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Shard(_Record):
    """The files of one shard: `tokens` ids in `bytes` bytes; `documents` of them begin here."""

    file: str
    tokens: int
    documents: int
    bytes: int
    sha256: str
    index_file: str
    index_sha256: str
    trained_file: str | None = None
    trained_sha256: str | None = None


class Split(_Record):
    """The shards of one split, in order, with their totals."""

    tokens: int
    documents: int
    shards: tuple[Shard, ...]


class Manifest(_Record):
    """What is in a folder of tokens. `source` and `options` say how it was made; nothing depends on them."""

    format: str = FORMAT
    format_version: int = 1
    created_by: str
    dtype: Literal["uint16", "uint32"]
    vocab_size: int
    separator: str
    separator_id: int
    tokenizer_file: str
    tokenizer_sha256: str
    chat_template_sha256: str | None = None
    answer_end_id: int | None = None
    """Of conversations, the special token that the template writes behind an answer."""
    chat_tokens: dict[str, str] = {}
    """Of conversations, the tokens that the template names: `bos_token` and the like, with their texts."""
    splits: dict[str, Split]
    source: dict[str, Any]
    options: dict[str, Any]

    @staticmethod
    def read(directory: str | Path, *, check_files: bool = True) -> "Manifest":
        """The manifest of `directory`; with `check_files` every file must be there in its full size.

        Raises DataError for a folder that is missing, empty, of something else, of a newer format, damaged.
        """
        folder = Path(directory)
        raw = _read_json(folder)
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            raise DataError(f"{folder}: its {MANIFEST} is not of token shards; they are made by `{PREPARE}`")
        version = raw.get("format_version")
        if not isinstance(version, int) or version > FORMAT_VERSION:
            raise DataError(
                f"{folder}: format version {version}, but this Shardwright reads up to {FORMAT_VERSION}; "
                f"it was written by {raw.get('created_by')}: upgrade to that, or prepare the data again"
            )
        try:
            manifest = Manifest.model_validate(raw)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise DataError(f"{folder}: {MANIFEST} is damaged at {where}: {first['msg']}; prepare it again") from None
        for name in manifest.sha256_of_files:
            inside(folder, name, DataError)
        problems = manifest._contradictions() or (manifest.missing_files(folder) if check_files else [])
        if problems:
            raise DataError(*(f"{folder}: {problem}" for problem in problems))
        return manifest

    @property
    def itemsize(self) -> int:
        """Bytes of a token on disk."""
        return np.dtype(self.dtype).itemsize

    @property
    def fingerprint(self) -> str:
        """A sha256 over the checksums of all shards: equal for equal tokens, partitioned into equal shards."""
        lines: list[str] = [self.dtype]
        for name in sorted(self.splits):
            for shard in self.splits[name].shards:
                masks = [shard.trained_sha256] if shard.trained_sha256 else []
                lines.append(" ".join([name, shard.sha256, shard.index_sha256, *masks]))
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    @property
    def sha256_of_files(self) -> dict[str, str]:
        """Name of every file of the folder but the manifest -> its checksum."""
        found = {self.tokenizer_file: self.tokenizer_sha256}
        if self.chat_template_sha256:
            found[TEMPLATE] = self.chat_template_sha256
        for split in self.splits.values():
            for shard in split.shards:
                found |= {shard.file: shard.sha256, shard.index_file: shard.index_sha256}
                if shard.trained_file and shard.trained_sha256:
                    found[shard.trained_file] = shard.trained_sha256
        return found

    def check_vocabulary(self, model_vocab_size: int) -> None:
        """Raise DataError if a model of that vocabulary (possibly padded) has no row for some of the ids."""
        if model_vocab_size < self.vocab_size:
            raise DataError(
                f"the model's vocab_size={model_vocab_size} is smaller than the {self.vocab_size} tokens of "
                f"the data's tokenizer; set it to {self.vocab_size} or more (the next multiple of 128: "
                f"{-(-self.vocab_size // 128) * 128})"
            )

    def missing_files(self, folder: Path) -> list[str]:
        """Complaints about files that are not there, or not of the size that the manifest says."""
        expected = {self.tokenizer_file: -1}
        for split in self.splits.values():
            for shard in split.shards:
                expected[shard.file] = shard.bytes
                expected[shard.index_file] = shard.documents * INDEX_BYTES
                if shard.trained_file:
                    expected[shard.trained_file] = shard.tokens
        problems = []
        for name, n_bytes in expected.items():
            try:
                actual = (folder / name).stat().st_size
            except OSError:
                problems.append(f"{name} is missing; copy it again, or prepare the data again")
                continue
            if n_bytes not in (-1, actual):
                problems.append(
                    f"{name} has {actual} bytes, the manifest says {n_bytes}: "
                    f"{'cut short' if actual < n_bytes else 'not the file that was written'}; "
                    "copy it again, or prepare the data again"
                )
        return problems

    def _contradictions(self) -> list[str]:
        problems = []
        for name, split in self.splits.items():
            for shard in split.shards:
                if shard.tokens * self.itemsize != shard.bytes:
                    problems.append(
                        f"{MANIFEST} contradicts itself: {shard.file} has {shard.bytes} bytes "
                        f"and {shard.tokens} tokens of {self.itemsize} bytes"
                    )
            tokens = sum(shard.tokens for shard in split.shards)
            documents = sum(shard.documents for shard in split.shards)
            if (tokens, documents) != (split.tokens, split.documents):
                problems.append(
                    f"{MANIFEST} contradicts itself: {name} has {split.tokens} tokens and {split.documents} "
                    f"documents, its shards {tokens} and {documents}"
                )
        return problems


class TokenSplit:
    """All shards of a split as one row of `n_tokens` ids and `n_documents` documents, read by memory map."""

    def __init__(self, folder: Path, name: str, manifest: Manifest) -> None:
        self.folder, self.name, self.manifest = folder, name, manifest
        split = manifest.splits[name]
        self.n_tokens, self.n_documents = split.tokens, split.documents
        self.separator_id = manifest.separator_id
        self._files = [shard.file for shard in split.shards]
        self._shards = [
            np.memmap(folder / shard.file, dtype=f"<u{manifest.itemsize}", mode="r") for shard in split.shards
        ]
        self._index_files = [shard.index_file for shard in split.shards]
        self._trained_files = [shard.trained_file for shard in split.shards if shard.trained_file]
        self._indices = [
            np.memmap(folder / shard.index_file, dtype="<u8", mode="r") if shard.documents else np.empty(0, "<u8")
            for shard in split.shards
        ]
        self._trained = [
            np.memmap(folder / shard.trained_file, dtype=np.uint8, mode="r")
            for shard in split.shards
            if shard.trained_file
        ]
        self._token_ends = list(accumulate(shard.tokens for shard in split.shards))
        self._document_ends = list(accumulate(shard.documents for shard in split.shards))

    def tokens(self, start: int, length: int) -> np.ndarray:
        """Ids [length] from token `start` of the split on, across shards; uint16 or uint32, read-only."""
        return self._row(self._shards, self._files, np.dtype(f"<u{self.manifest.itemsize}"), start, length)

    @property
    def masked(self) -> bool:
        """Whether these are conversations, of which some tokens are not trained on."""
        return bool(self._trained)

    def trained(self, start: int, length: int) -> np.ndarray:
        """Which of the tokens [length] from token `start` of the split on are trained on; bool."""
        if not self._trained:
            return np.ones(length, bool)
        return self._row(self._trained, self._trained_files, np.dtype(np.uint8), start, length).astype(bool)

    def _row(self, shards: list[Any], files: list[str], dtype: np.dtype, start: int, length: int) -> np.ndarray:
        if start < 0 or length < 0 or start + length > self.n_tokens:
            raise IndexError(f"tokens {start} to {start + length} of a split of {self.n_tokens}")
        pieces: list[np.ndarray] = []
        while length or not pieces:
            shard = min(bisect_right(self._token_ends, start), len(shards) - 1)
            if shard < 0:
                return np.empty(0, dtype)
            offset = start - self._shard_start(shard)
            self._require_whole(files[shard], shards[shard].nbytes)
            piece = shards[shard][offset : offset + length]
            pieces.append(piece)
            start, length = start + len(piece), length - len(piece)
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _require_whole(self, file: str, n_bytes: int) -> None:
        """Raises DataError for a file that is shorter than when it was mapped: to read behind its end would end the
        process by SIGBUS, without a word. One that is gone by name can still be read."""
        try:
            size = (self.folder / file).stat().st_size
        except OSError:
            return
        if size < n_bytes:
            raise DataError(
                f"{self.folder / file} has {size} bytes, and had {n_bytes} when it was opened: it was cut short since; "
                f"copy it again, or prepare the data again, and go on with --resume"
            )

    def document(self, i: int) -> np.ndarray:
        """The ids of document i, its separator last."""
        start, end = self.document_start(i), self.document_start(i + 1)
        return self.tokens(start, end - start)

    def document_start(self, i: int) -> int:
        """Where document i begins in the split, in tokens; n_tokens for i = n_documents."""
        if not 0 <= i <= self.n_documents:
            raise IndexError(f"document {i} of a split of {self.n_documents}")
        if i == self.n_documents:
            return self.n_tokens
        shard = bisect_right(self._document_ends, i)
        first = self._document_ends[shard] - len(self._indices[shard])
        self._require_whole(self._index_files[shard], self._indices[shard].nbytes)
        return self._shard_start(shard) + int(self._indices[shard][i - first])

    def document_starts(self, start: int, length: int) -> np.ndarray:
        """Where documents begin among `length` tokens from token `start` of the split on, counted from there; int64."""
        found = [np.empty(0, np.int64)]
        for shard in range(bisect_right(self._token_ends, start), len(self._shards)):
            first, index = self._shard_start(shard) - start, self._indices[shard]
            if first >= length:
                break
            self._require_whole(self._index_files[shard], index.nbytes)
            low, high = np.searchsorted(index, np.array([max(0, -first), max(0, length - first)], index.dtype))
            found.append(index[low:high].astype(np.int64) + first)
        return np.concatenate(found)

    def document_at(self, token: int) -> int:
        """The number of the document that a token of the split is of."""
        shard = bisect_right(self._token_ends, token)
        index = self._indices[shard]
        if len(index):
            self._require_whole(self._index_files[shard], index.nbytes)
        offset = np.array(token - self._shard_start(shard), index.dtype)
        return self._document_ends[shard] - len(index) + int(np.searchsorted(index, offset, side="right")) - 1

    def document_lengths(self) -> np.ndarray:
        """Tokens of every document, separators counted; int64 [n_documents], 8 bytes a document of memory."""
        starts = [index.astype(np.int64) + self._shard_start(i) for i, index in enumerate(self._indices)]
        return np.diff(np.concatenate([*starts, np.array([self.n_tokens])]))

    def place(self, token: int) -> tuple[Path, int]:
        """The file that holds a token of the split, and the number of the token in it."""
        shard = bisect_right(self._token_ends, token)
        return self.folder / self._files[shard], token - self._shard_start(shard)

    def where(self, token: int) -> str:
        """`FILE, token N of it`: the place of a token of the split, for messages."""
        file, offset = self.place(token)
        return f"{file}, token {offset} of it"

    def _shard_start(self, shard: int) -> int:
        return self._token_ends[shard] - len(self._shards[shard])


def open_split(directory: str | Path, name: str) -> TokenSplit:
    """The split `name` ("train", "validation") of a folder of tokens; raises as Manifest.read does."""
    manifest = Manifest.read(directory)
    if name not in manifest.splits:
        raise DataError(f"{directory}: no split {name!r}; {nearest(name, manifest.splits)}")
    return TokenSplit(Path(directory), name, manifest)


def verify_checksums(directory: str | Path, progress: Callable[[str], None] | None = None) -> list[str]:
    """Read every file and compare its sha256 with the manifest's; returns the complaints, if any.

    `progress` is called with the name of each file. Raises DataError only if the manifest cannot be read.
    """
    folder = Path(directory)
    manifest = Manifest.read(folder, check_files=False)
    problems = manifest.missing_files(folder)
    for name, sha256 in manifest.sha256_of_files.items():
        if any(problem.startswith(f"{name} ") for problem in problems):
            continue
        if progress is not None:
            progress(name)
        with open_regular(folder / name) as file:
            actual = hashlib.file_digest(file, "sha256").hexdigest()
        if actual != sha256:
            problems.append(f"{name} has the checksum {actual[:12]}..., the manifest says {sha256[:12]}...: damaged")
    return problems


def _read_json(folder: Path) -> Any:
    if not folder.exists():
        raise DataError(f"{folder}: there is no such data folder{near_path(folder, '*/')}; make it with `{PREPARE}`")
    if not folder.is_dir():
        raise DataError(f"{folder}: a file, not a folder of token shards; make one with `{PREPARE}`")
    path = folder / MANIFEST
    if not path.exists():
        names = sorted(entry.name for entry in folder.iterdir())
        found = f"holds {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}, but no" if names else "is empty: no"
        raise DataError(f"{folder}: the folder {found} {MANIFEST}; token shards are made by `{PREPARE}`")
    try:
        return parse_json(read_bytes(path))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"{path}: not JSON ({error}); prepare the data again") from None
