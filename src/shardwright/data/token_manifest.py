"""The manifest of a folder of tokens: its shards with sizes and checksums, and the type and source of the tokens."""

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shardwright.data.blocks import BLOCK_BYTES, SUM_BYTES, n_blocks
from shardwright.data.chat import TEMPLATE
from shardwright.system.errors import DataError, near_path, without_secrets
from shardwright.system.files import LONGEST_TOKENIZER, inside, parse_json, read_bytes, write_whole

FORMAT = "shardwright.tokens"
FORMAT_VERSION = 6
"""Version 2 has masks of conversations. Version 3 has checksums of blocks and the largest token id. Version 4 has a
checksum of the manifest. Version 5 can list the shards that an unfinished `prepare` has published.
Version 6 can list shards whose tokens are deleted."""
MANIFEST = "manifest.json"
BLOCKS_VERSION = 3
TOKENIZER = "tokenizer.json"
INDEX_BYTES = 8
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
    deleted: bool = False
    """Whether `prepare --keep-gib` has made holes of the tokens and the mask. The index is kept."""

    @property
    def content(self) -> tuple[str, ...]:
        """The names of the files that are deleted: tokens and mask."""
        return (self.file, self.trained_file) if self.trained_file else (self.file,)

    def same_tokens(self, other: "Shard") -> bool:
        """Return whether both are one shard, deleted or not."""
        return self.model_copy(update={"deleted": other.deleted}) == other


class DataSplit(_Record):
    """The shards of one split, in order, with their totals."""

    tokens: Count
    documents: Count
    shards: tuple[Shard, ...]


class UnfinishedPrepare(_Record):
    """The point that a `prepare` has reached: `documents` of the source are in the shards of the manifest, and
    `text_xxh3` is the checksum of their text."""

    documents: Count
    text_xxh3: str


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
    publication: Annotated[str, Field(pattern="^[0-9a-f]{32}$")] | None = None  # a mirror names its folder by it
    """Identifies the folder while `prepare --publish` adds shards to it, and afterwards; None for other folders."""
    unfinished: UnfinishedPrepare | None = None
    """None once all documents of the source are in the shards."""
    source: dict[str, Any]
    options: dict[str, Any]
    sha256: str | None = None
    """Checksum of all other values; None before version 4."""

    def written(self, folder: Path) -> "DataManifest":
        """Write the manifest with its checksum to `folder`, without secrets, instead of an earlier one, and return
        it as it can be read back."""
        raw = parse_json(without_secrets(self.model_dump_json()))
        raw["sha256"] = _digest(raw)
        write_whole(folder / MANIFEST, json.dumps(raw, indent=2).encode() + b"\n", durable=True)
        return DataManifest.model_validate(raw)

    @staticmethod
    def read(directory: str | Path, *, check_files: bool = True) -> "DataManifest":
        """Return the manifest of `directory`; with `check_files` every file must exist in its full size.

        Raises DataError for a folder that is missing, empty, damaged, of a newer format or of another kind.
        """
        return DataManifest._checked(_read_json(Path(directory)), Path(directory), check_files)

    @staticmethod
    def parsed(content: bytes, folder: Path) -> "DataManifest":
        """Return the manifest with that content, for files that are to be in `folder`. Raises DataError."""
        return DataManifest._checked(_parse(content, folder / MANIFEST), folder, False)

    @staticmethod
    def _checked(raw: Any, folder: Path, check_files: bool) -> "DataManifest":
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

    def shard_sums(self, split: str) -> list[str]:
        """Return a short checksum of each shard of a split: equal for equal tokens, documents and masks."""
        shards = self.splits[split].shards
        sums = (f"{shard.sha256} {shard.index_sha256} {shard.trained_sha256}" for shard in shards)
        return [hashlib.sha256(text.encode()).hexdigest()[:12] for text in sums]

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
        if self.unfinished is not None and self.vocab_size > model_vocab_size:
            raise DataError(
                f"the model's vocab_size={model_vocab_size} is smaller than the {self.vocab_size} tokens of the data's "
                f"tokenizer, and `data prepare` may still write each of them; set it to {self.vocab_size} or more"
            )
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
                result |= self.n_bytes_of_files(shard)
        return result

    def n_bytes_of_files(self, shard: Shard) -> dict[str, int]:
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
        return _parse(read_bytes(path), path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def _parse(content: bytes, path: Path) -> Any:
    try:
        return parse_json(content)
    except ValueError as error:
        raise DataError(f"{path}: not JSON ({error}); prepare the data again") from None
