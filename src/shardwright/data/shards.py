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

import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable, Iterable
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shardwright.config.mixture import sources_of
from shardwright.config.sections import DataSection, TokenCache
from shardwright.data.blocks import BLOCK_BYTES, SUM_BYTES, CheckedFile, SumsFile, n_blocks
from shardwright.data.chat import TEMPLATE
from shardwright.data.mirror import MANIFEST, Mirror, MirroredFile, warm
from shardwright.system.errors import DataError, near_path, nearest, without_secrets
from shardwright.system.files import LONGEST_TOKENIZER, inside, open_regular, parse_json, read_bytes
from shardwright.system.remote import REMOTE
from shardwright.system.units import MiB

FORMAT = "shardwright.tokens"
FORMAT_VERSION = 4
"""Version 2 has masks of conversations. Version 3 has checksums of blocks and the largest token id. Version 4 has a
checksum of the manifest."""
BLOCKS_VERSION = 3
TOKENIZER = "tokenizer.json"
INDEX_BYTES = 8
INDEX_CHECKED_AT_START_BYTES = 256 * MiB
"""Indices of up to this size in total are checked when a split is opened, larger ones when they are first used."""
DEFAULT_CACHE = TokenCache()
PREPARE = "shardwright data prepare SRC --out DIR"


Count = Annotated[int, Field(ge=0, lt=2**63)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Shard(_Record):
    """The files of one shard: `tokens` ids in `bytes` bytes; `documents` of them start here."""

    file: str
    tokens: Count
    documents: Count
    bytes: Count
    sha256: str
    index_file: str
    index_sha256: str
    trained_file: str | None = None
    trained_sha256: str | None = None
    sums_file: str | None = None
    sums_sha256: str | None = None


class DataSplit(_Record):
    """The shards of one split, in order, with their totals."""

    tokens: Count
    documents: Count
    shards: tuple[Shard, ...]


class DataManifest(_Record):
    """The contents of a folder of tokens. `source` and `options` record its making; nothing depends on them."""

    format: str = FORMAT
    format_version: int = FORMAT_VERSION
    created_by: str
    dtype: Literal["uint16", "uint32"]
    vocab_size: int = Field(ge=1, le=2**32)
    separator: str
    separator_id: Count
    tokenizer_file: str
    tokenizer_sha256: str
    tokenizer_fingerprint: str | None = None
    """Equal for tokenizers that produce the same ids, in any file format; None before version 3."""
    block_bytes: int = Field(BLOCK_BYTES, gt=0, lt=2**63)
    """Bytes of each block whose checksum is in a `.sums` file."""
    largest_id: Count | None = None
    """The largest token id in all splits; None before version 3."""
    chat_template_sha256: str | None = None
    answer_end_id: Count | None = None
    """For conversations, the special token that the template writes after an answer."""
    chat_tokens: dict[str, str] = {}
    """For conversations, the tokens that the template names: `bos_token` and the like, with their texts."""
    pairs: bool = False
    """Whether documents 2i and 2i + 1 of a split are the chosen and the rejected answer of one record."""
    splits: dict[str, DataSplit]
    source: dict[str, Any]
    options: dict[str, Any]
    sha256: str | None = None
    """Checksum of all other values; None before version 4."""

    def written(self, folder: Path) -> "DataManifest":
        """Write the manifest with its checksum to `folder`, without secrets, and return it as it can be read back."""
        raw = parse_json(without_secrets(self.model_dump_json()))
        raw["sha256"] = _digest(raw)
        (folder / MANIFEST).write_bytes(json.dumps(raw, indent=2).encode() + b"\n")
        return DataManifest.model_validate(raw)

    @staticmethod
    def read(directory: str | Path, *, check_files: bool = True) -> "DataManifest":
        """Return the manifest of `directory`; with `check_files` every file must exist in its full size.

        Raises DataError for a folder that is missing, empty, damaged, of a newer format or of another kind.
        """
        folder = Path(directory)
        raw = _read_json(folder)
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            raise DataError(f"{folder}: its {MANIFEST} is not of token shards; they are made by `{PREPARE}`")
        version = raw.get("format_version")
        if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
            raise DataError(
                f"{folder}: format version {version}, but this Shardwright reads up to {FORMAT_VERSION}; "
                f"it was written by {raw.get('created_by')}: upgrade to that, or prepare the data again"
            )
        try:
            manifest = DataManifest.model_validate(raw)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise DataError(f"{folder}: {MANIFEST} is damaged at {where}: {first['msg']}; prepare it again") from None
        for name in (*manifest._n_bytes_of_all_files(), TEMPLATE):
            inside(folder, name, DataError)
        problems = manifest._contradictions() or (manifest.missing_files(folder) if check_files else [])
        has_checksum = version > BLOCKS_VERSION or manifest.sha256 is not None
        if not problems and has_checksum and manifest.sha256 != _digest(raw):
            problems = [f"{MANIFEST} is damaged: values have changed since it was written; prepare the data again"]
        if check_files and not problems:
            problems = manifest._tokenizer_problems(folder)
        if problems:
            raise DataError(*(f"{folder}: {problem}" for problem in problems))
        return manifest

    @property
    def itemsize(self) -> int:
        """Bytes of a token on disk."""
        return np.dtype(self.dtype).itemsize

    @property
    def fingerprint(self) -> str:
        """A sha256 over the checksums of all shards: equal for equal tokens in equal shards."""
        lines: list[str] = [self.dtype]
        for name in sorted(self.splits):
            for shard in self.splits[name].shards:
                masks = [shard.trained_sha256] if shard.trained_sha256 else []
                lines.append(" ".join([name, shard.sha256, shard.index_sha256, *masks]))
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    @property
    def sha256_of_files(self) -> dict[str, str]:
        """Return the checksum of every file of the folder except the manifest, by name."""
        sums = {self.tokenizer_file: self.tokenizer_sha256}
        if self.chat_template_sha256:
            sums[TEMPLATE] = self.chat_template_sha256
        for split in self.splits.values():
            for shard in split.shards:
                sums |= {shard.file: shard.sha256, shard.index_file: shard.index_sha256}
                for file, sha256 in ((shard.trained_file, shard.trained_sha256), (shard.sums_file, shard.sums_sha256)):
                    if file and sha256:
                        sums[file] = sha256
        return sums

    def check_vocabulary(self, model_vocab_size: int) -> None:
        """Raise DataError if a model with that many rows (possibly padded) has no row for a token id of the data.

        A tokenizer may have more tokens than the model has rows, if the data has none of them.
        """
        rows = f"the model's vocab_size={model_vocab_size}"
        fitting = f"{self.vocab_size} or more (the next multiple of 128: {-(-self.vocab_size // 128) * 128})"
        if self.largest_id is not None and self.largest_id >= model_vocab_size:
            raise DataError(
                f"{rows} has no row for token id {self.largest_id}, the largest in the data, whose tokenizer has "
                f"{self.vocab_size} tokens; set it to {fitting}"
            )
        if self.largest_id is None and self.vocab_size > model_vocab_size:
            raise DataError(
                f"{rows} is smaller than the {self.vocab_size} tokens of the data's tokenizer; set it to {fitting}; or "
                f"prepare the data again: this folder is of format version {self.format_version}, which does not say "
                f"the largest token id"
            )

    def remarks(self, model_vocab_size: int) -> list[str]:
        """Return the remarks that a run on this data prints at its start."""
        remarks = []
        if self.vocab_size > model_vocab_size:
            remarks.append(
                f"the tokenizer has {self.vocab_size:,} tokens and the model {model_vocab_size:,} rows; the data fits: "
                f"its largest token id is {self.largest_id:,}"
            )
        if self.format_version < BLOCKS_VERSION:
            remarks.append(
                f"format version {self.format_version} has no checksums of blocks, so damaged tokens are not noticed "
                f"while training; prepare the data again, or check it with `shardwright data inspect DIR --verify`"
            )
        return remarks

    def missing_files(self, folder: Path) -> list[str]:
        """Return problems with files that are missing, or not of the manifest's size."""
        problems = []
        for name, n_bytes in self._n_bytes_of_all_files().items():
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

    def _tokenizer_problems(self, folder: Path) -> list[str]:
        """Return a problem if the tokenizer file is not the tokenizer that made the token ids."""
        actual = hashlib.sha256(read_bytes(folder / self.tokenizer_file, LONGEST_TOKENIZER)).hexdigest()
        if actual == self.tokenizer_sha256:
            return []
        return [
            f"{self.tokenizer_file} is not the tokenizer that made the token ids, or is damaged; copy it again, or "
            f"prepare the data again"
        ]

    def _n_bytes_of_all_files(self) -> dict[str, int]:
        """Return name -> size of each file, or -1 if the manifest has no size."""
        result = {self.tokenizer_file: -1}
        for split in self.splits.values():
            for shard in split.shards:
                result |= self._n_bytes_of_files(shard)
        return result

    def _n_bytes_of_files(self, shard: Shard) -> dict[str, int]:
        """Return name -> size of each file; the `.sums` file has the checksums of the others in this order."""
        sizes = {shard.file: shard.bytes, shard.index_file: shard.documents * INDEX_BYTES}
        if shard.trained_file:
            sizes[shard.trained_file] = shard.tokens
        if shard.sums_file:
            sizes[shard.sums_file] = sum(n_blocks(n, self.block_bytes) for n in sizes.values()) * SUM_BYTES
        return sizes

    def _contradictions(self) -> list[str]:
        problems = [
            f"{MANIFEST} contradicts itself: {name}={token} is no id of a vocabulary of {self.vocab_size}"
            for name in ("separator_id", "largest_id", "answer_end_id")
            if (token := getattr(self, name)) is not None and token >= self.vocab_size
        ]
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
    """All shards of a split as one array of `n_tokens` ids and `n_documents` documents, read by memory map."""

    def __init__(self, folder: Path, name: str, manifest: DataManifest, mirror: Mirror | None = None) -> None:
        """`mirror`: of tokens that are not on this disk."""
        self.folder, self.name, self.manifest = folder, name, manifest
        self.mirrored = mirror is not None
        split = manifest.splits[name]
        self.n_tokens, self.n_documents = split.tokens, split.documents
        self.separator_id = manifest.separator_id
        self._tokens, self._indices, self._trained = (
            (
                list(files)
                for files in zip(*(_open_files(folder, shard, manifest, mirror) for shard in split.shards), strict=True)
            )
            if split.shards
            else ([], [], [])
        )
        self._token_ends = list(accumulate(shard.tokens for shard in split.shards))
        self._document_ends = list(accumulate(shard.documents for shard in split.shards))

    def tokens(self, start: int, length: int) -> np.ndarray:
        """Return ids [length] from token `start` of the split on, across shards; uint16 or uint32, read-only."""
        return self._row(self._tokens, start, length)

    def fetch(self, spans: Iterable[tuple[int, int]]) -> None:
        """Read spans (first token, length) of a mirrored split, many at once, which makes later reads local."""
        reads = [self.tokens, self.trained] if self.masked else [self.tokens]
        warm([partial(read, *span) for span in spans for read in reads])

    @property
    def masked(self) -> bool:
        """Whether these are conversations, with some tokens that are not trained on."""
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
        if self.n_documents and (last := int(self.tokens(self.document_start(1) - 1, 1)[0])) != self.separator_id:
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


def data_folder(path: str | Path, cache: TokenCache = DEFAULT_CACHE) -> Path:
    """Return the local folder of a folder of tokens: itself, or the mirror of a URL, with its small files. Raises
    DataError."""
    return mirror.folder if (mirror := _mirror(path, cache)) else Path(path)


def source_folders(data: DataSection) -> dict[str, Path]:
    """Return the local folder of each source of a run by its path in the run file, as `data_folder` does."""
    return {source.path: data_folder(source.path, data.token_cache) for source in sources_of(data)}


def tokenizer_folder(data: DataSection) -> Path:
    """Return the data folder with the tokenizer of a run, which is the same for all its sources. Raises DataError."""
    return data_folder(sources_of(data)[0].path, data.token_cache)


def _mirror(path: str | Path, cache: TokenCache) -> Mirror | None:
    if REMOTE not in str(path):
        return None
    mirror = Mirror.of(str(path), *cache)
    manifest = DataManifest.read(mirror.folder, check_files=False)  # which refuses names of files that lead elsewhere
    sums = manifest.sha256_of_files
    for split in manifest.splits.values():
        for shard in split.shards:
            if not (shard.sums_file and shard.sums_sha256):
                raise DataError(
                    f"{path}: format version {manifest.format_version} has no checksums of blocks, without which "
                    f"tokens are not read from a URL; prepare the data again, or copy the folder to this machine"
                )
            for name in (shard.file, shard.trained_file):
                if name and sums.pop(name, None):
                    mirror.reserve(name, manifest._n_bytes_of_files(shard)[name])
    for name, sha256 in sums.items():
        mirror.copy(name, sha256)
    return mirror


def open_split(directory: str | Path, name: str, cache: TokenCache = DEFAULT_CACHE) -> TokenSplit:
    """Return the split `name` ("train", "validation") of a folder of tokens, which may be at a URL; raises as
    DataManifest.read does."""
    mirror = _mirror(directory, cache)
    folder = mirror.folder if mirror else Path(directory)
    manifest = DataManifest.read(folder)
    if name not in manifest.splits:
        there = nearest(name, manifest.splits) if manifest.splits else "it has none; prepare the data again"
        raise DataError(f"{directory}: no split {name!r}; {there}")
    split = TokenSplit(folder, name, manifest, mirror)
    split.check_index()
    return split


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
        return CheckedFile(folder / name, dtype, shard.tokens, sha256, sums, first_block)

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


def _digest(raw: dict[str, Any]) -> str:
    """Return the checksum of the values of a manifest."""
    values = {name: value for name, value in raw.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _read_json(folder: Path) -> Any:
    if not folder.exists():
        raise DataError(f"{folder}: there is no such data folder{near_path(folder, '*/')}; make it with `{PREPARE}`")
    if not folder.is_dir():
        raise DataError(f"{folder}: a file, not a folder of token shards; make one with `{PREPARE}`")
    path = inside(folder, MANIFEST, DataError)
    if not path.exists():
        names = sorted(entry.name for entry in folder.iterdir())
        contents = (
            f"holds {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}, but no" if names else "is empty: no"
        )
        raise DataError(f"{folder}: the folder {contents} {MANIFEST}; token shards are made by `{PREPARE}`")
    try:
        return parse_json(read_bytes(path))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"{path}: not JSON ({error}); prepare the data again") from None
