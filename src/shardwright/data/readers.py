"""Readers of one file format each: text, JSON lines, Parquet, as documents made of bounded pieces of text.

A document may be larger than memory, so its text is an iterator of pieces of about PIECE_BYTES, cut after a line end if
there is one. One piece of text, one JSON line, or one small batch of Parquet rows is in memory at a time.
"""

import functools
import itertools
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from shardwright.data.chat import BadConversation, ChatFormat, TextPiece, without_nulls
from shardwright.data.content import LONGEST_RECORD_BYTES, Kind, array_items, opened
from shardwright.data.remote import File, size_bytes
from shardwright.system.errors import DataError
from shardwright.system.files import parse_json
from shardwright.system.units import KiB, MiB, format_bytes

EncodingErrors = Literal["error", "replace", "skip"]
ENCODING_ERRORS: tuple[str, ...] = get_args(EncodingErrors)

PIECE_BYTES = 256 * KiB
PARQUET_ROWS = 64
SKIPPED_KEPT = 20

WAY_OUT = "convert it to UTF-8, or pass --encoding-errors replace (puts U+FFFD there) or skip (leaves the document out)"

SKIP_BAD = "--skip-bad leaves such records out"


class NotText(DataError):
    """Bytes that are not UTF-8 text: an error, or a document left out under `skip`."""


class BadRecord(DataError):
    """A record that is not JSON or has no text in its field: an error, or left out under `skip_bad`."""


@dataclass(frozen=True)
class Document:
    """`name` is its location (`file`, `file:line`); `pieces`, joined, are its text. `trained`: for each piece of a
    conversation whether its tokens are trained on; None for other text, whose tokens all are. `apart`: whether the
    pieces are encoded one by one (a prompt and a completion) instead of as one text.

    The pieces are read from the source lazily: use them up before the next document.
    """

    name: str
    pieces: Iterator[str]
    trained: tuple[bool, ...] | None = None
    apart: bool = False


@dataclass
class Meter:
    """Counts of the input: bytes of the files, documents left out because they are not UTF-8, records left out because
    they are bad, the first reasons of both, and the number of U+FFFD that replaced other bytes. `n_structured`: files
    of JSON or tables without records that can be read, so that each is one document of text; `structured_first`: the
    first of them."""

    read_bytes: int = 0
    n_skipped: int = 0
    n_bad: int = 0
    n_replaced: int = 0
    skipped: list[str] = field(default_factory=list)
    n_structured: int = 0
    structured_first: str = ""

    def skip(self, error: NotText | BadRecord) -> None:
        """Count a document that is left out; the first few reasons are kept."""
        if isinstance(error, BadRecord):
            self.n_bad += 1
        else:
            self.n_skipped += 1
        if len(self.skipped) < SKIPPED_KEPT:
            self.skipped.append(str(error).partition(";")[0])


@dataclass(frozen=True)
class ReadOptions:
    """The settings of reading: the field that has the text, the treatment of bytes that are not UTF-8, whether bad
    records are left out, the meter. With `chat`, records are conversations, and no field is text."""

    text_key: str
    encoding_errors: EncodingErrors
    skip_bad: bool
    meter: Meter
    chat: ChatFormat | None = None

    def document(self, where: str, text_of: Callable[[], str | list[list[TextPiece]] | None]) -> Iterator[Document]:
        """Yield the document at `where`; nothing if its text is empty or it is left out, which is counted."""
        try:
            text = text_of()
        except (NotText, BadRecord) as error:
            if not (self.skip_bad if isinstance(error, BadRecord) else self.encoding_errors == "skip"):
                raise
            self.meter.skip(error)
            return
        if isinstance(text, list):
            for pieces in text:
                texts, trained, apart = zip(*pieces, strict=True)
                yield Document(where, iter(texts), trained, any(apart))
        elif text:
            yield Document(where, cut(text))

    def decode(self, raw: bytes, where: str, offset: int) -> str:
        """Decode UTF-8; `offset` is the start of `raw` in its file. Raises NotText, or replaces bytes that are not
        UTF-8."""
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            if self.encoding_errors != "replace":
                raise NotText(
                    f"{where}: byte 0x{raw[error.start]:02x} at offset {offset + error.start} is not UTF-8 "
                    f"({error.reason}); {WAY_OUT}"
                ) from None
        text = raw.decode("utf-8", "replace")
        self.meter.n_replaced += text.count("\ufffd") - raw.count("\ufffd".encode())
        return text

    def encodable(self, text: str, where: str) -> str:
        """Return `text`, if UTF-8 can encode it: JSON may have half of a surrogate pair (`\\ud83d`), no character."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            if self.encoding_errors != "replace":
                raise NotText(
                    f"{where}: character {error.start} is half of a surrogate pair "
                    f"(\\u{ord(text[error.start]):04x}) and not UTF-8 text; {WAY_OUT}"
                ) from None
            replaced = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            self.meter.n_replaced += replaced.count("\ufffd") - text.count("\ufffd")
            return replaced
        return text

    def check_column(self, source: object, columns: Iterable[str]) -> None:
        """Raise DataError if the column for the text is missing."""
        if self.chat is None and self.text_key not in columns:
            present = ", ".join(columns)
            raise DataError(f"{source}: no column {self.text_key!r}; there are: {present}. Choose one with --text-key")


def text_documents(path: File, reading: ReadOptions) -> Iterator[Document]:
    """Yield one text file as one document. Under `skip` the file is read twice: first to check that it is clean."""
    if reading.encoding_errors == "skip":
        try:
            for offset, raw, _ in _raw_pieces(path):
                reading.decode(_without_nul(raw, path, offset), str(path), offset)
        except NotText as error:
            reading.meter.skip(error)
            reading.meter.read_bytes += size_bytes(path)
            return

    def pieces() -> Iterator[str]:
        already_bytes = reading.meter.read_bytes
        for offset, raw, n_read in _raw_pieces(path):
            reading.meter.read_bytes = already_bytes + n_read
            text = reading.decode(_without_nul(raw, path, offset), str(path), offset)
            if offset == 0:
                text = text.removeprefix("\ufeff")
            if text:
                yield text

    yield Document(str(path), pieces())


def record_documents(path: File, reading: ReadOptions, kind: Kind) -> Iterator[Document]:
    """Yield each object as one document, its field `text_key` the text; null or empty is no document. `kind`: one
    object a line, an array of objects, or one object over several lines."""
    already_bytes = reading.meter.read_bytes
    with naming(path), opened(path) as (file, n_read):
        if kind == "lines":
            for where, offset, line in _lines(path, file):
                reading.meter.read_bytes = already_bytes + n_read()
                yield from reading.document(where, functools.partial(_record_text, line, where, offset, reading))
        elif kind == "object":
            yield from reading.document(str(path), functools.partial(_record_text, file.read(), str(path), 0, reading))
        else:
            for number, record in enumerate(array_items(file, str(path)), start=1):
                where = f"{path}: item {number}"
                reading.meter.read_bytes = already_bytes + n_read()
                yield from reading.document(where, functools.partial(_object_text, record, where, reading))
        reading.meter.read_bytes = already_bytes + size_bytes(path)


def _lines(path: File, file: Any) -> Iterator[tuple[str, int, bytes]]:
    """Yield (place, offset, line) for each line."""
    offset = 0
    for number in itertools.count(1):
        line = file.readline(LONGEST_RECORD_BYTES + 1)
        if not line:
            return
        where = f"{path}:{number}"
        if len(line) > LONGEST_RECORD_BYTES:
            raise DataError(
                f"{where}: the line is longer than {format_bytes(LONGEST_RECORD_BYTES)}, the most one "
                "record may have; if the file does not hold one record a line, name it .json or .txt"
            )
        yield where, offset, line
        offset += len(line)


def parquet_documents(path: File, reading: ReadOptions) -> Iterator[Document]:
    """Yield each row as one document, its column `text_key` the text; only that column is read, in parts."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise DataError(f"{path}: Parquet needs pyarrow; pip install pyarrow") from None

    already_bytes, file_bytes = reading.meter.read_bytes, size_bytes(path)
    with naming(path, pa.ArrowException):
        # Without these two, Arrow reads whole column chunks, which may be gigabytes, ahead of the rows.
        content = path if isinstance(path, Path) else path.open("rb")
        file = pq.ParquetFile(content, buffer_size=MiB, pre_buffer=False)
    with file:
        reading.check_column(path, file.schema_arrow.names)
        row = 0
        if reading.chat is not None:
            with naming(path, pa.ArrowException):
                for batch in file.iter_batches(PARQUET_ROWS):
                    for record in batch.to_pylist():
                        row += 1
                        where = f"{path}: row {row}"
                        yield from reading.document(
                            where, functools.partial(field_text, without_nulls(record), where, reading)
                        )
                    reading.meter.read_bytes = already_bytes + file_bytes * row // file.metadata.num_rows
            return
        with naming(path, pa.ArrowException):
            for batch in file.iter_batches(PARQUET_ROWS, columns=[reading.text_key]):
                column = batch.column(0)
                if pa.types.is_dictionary(column.type):
                    column = column.dictionary_decode()
                if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
                    raise DataError(
                        f"{path}: column {reading.text_key!r} holds {column.type}, not text; "
                        "choose another with --text-key"
                    )
                # As bytes, so that a damaged string is treated by the same rule as in other formats.
                for raw in column.cast("large_binary").to_pylist():
                    row += 1
                    where = f"{path}: row {row}"
                    decoded = functools.partial(reading.decode, raw or b"", where, 0)
                    yield from reading.document(where, decoded)
                reading.meter.read_bytes = already_bytes + file_bytes * row // file.metadata.num_rows


def cut(text: str) -> Iterator[str]:
    """Yield `text` in pieces of at most PIECE_BYTES characters, cut after a line end if there is one."""
    start = 0
    while len(text) - start > PIECE_BYTES:
        end = text.rfind("\n", start, start + PIECE_BYTES) + 1 or start + PIECE_BYTES
        yield text[start:end]
        start = end
    yield text[start:] if start else text


def _raw_pieces(path: File) -> Iterator[tuple[int, bytes, int]]:
    """Yield (offset, bytes, bytes of the file that were read) of a file's content, at most PIECE_BYTES each, never cut
    inside a UTF-8 character."""
    with naming(path), opened(path) as (file, n_read):
        offset, buffer = 0, b""
        while True:
            buffer += file.read(PIECE_BYTES - len(buffer))
            if len(buffer) < PIECE_BYTES:
                break
            end = buffer.rfind(b"\n") + 1
            if not end:
                # No line end (a gigabyte of JSON on one line): cut before the last character.
                end = next((i for i in range(PIECE_BYTES - 1, PIECE_BYTES - 4, -1) if buffer[i] & 0xC0 != 0x80), 0)
                end = end or PIECE_BYTES
            yield offset, buffer[:end], n_read()
            offset, buffer = offset + end, buffer[end:]
        if buffer:
            yield offset, buffer, n_read()


def _without_nul(raw: bytes, path: File, offset: int) -> bytes:
    at = raw.find(b"\0")
    if at >= 0:
        raise NotText(
            f"{path}: a NUL byte at offset {offset + at}: a binary file, or UTF-16; choose the text files "
            "of a folder with --glob, convert it to UTF-8, or pass --encoding-errors skip"
        )
    return raw


def _record_text(raw: bytes, where: str, offset: int, reading: ReadOptions) -> str | list[list[TextPiece]] | None:
    line = reading.decode(raw, where, offset).removeprefix("\ufeff").strip()
    if not line:
        return None
    try:
        record = parse_json(line)
    except ValueError as error:
        raise BadRecord(f"{where}: not JSON ({error}); a .jsonl file holds one object a line. {SKIP_BAD}") from None
    return _object_text(record, where, reading)


def _object_text(record: Any, where: str, reading: ReadOptions) -> str | list[list[TextPiece]] | None:
    if not isinstance(record, dict):
        problem = f"{where}: a JSON {type(record).__name__}, not an object with the field {reading.text_key!r}"
        raise BadRecord(f"{problem}; {SKIP_BAD}")
    return field_text(record, where, reading)


def field_text(record: dict[str, Any], where: str, reading: ReadOptions) -> str | list[list[TextPiece]] | None:
    """Return the text of a record's field `text_key`, None if it is null, or the pieces of each conversation.

    Raises BadRecord for a missing field, a field that is not a string and a record that is not a conversation, NotText
    for half a surrogate pair.
    """
    if reading.chat is not None:
        try:
            documents = reading.chat.documents(record)
        except BadConversation as error:
            end = "" if str(error).endswith("?") else "."
            raise BadRecord(f"{where}: {error}{end} {SKIP_BAD}") from None
        return [[piece._replace(text=reading.encodable(piece.text, where)) for piece in pieces] for pieces in documents]
    if reading.text_key not in record:
        raise BadRecord(
            f"{where}: no field {reading.text_key!r}; there are: {', '.join(record) or 'none'}. "
            f"Choose one with --text-key. {SKIP_BAD}"
        )
    text = record[reading.text_key]
    if text is None:
        return None
    if not isinstance(text, str):
        raise BadRecord(
            f"{where}: the field {reading.text_key!r} is a {type(text).__name__}, not a string; "
            f"choose another with --text-key. {SKIP_BAD}"
        )
    return reading.encodable(text, where)


@contextmanager
def naming(path: File, *more: type[Exception]) -> Iterator[None]:
    """Turn an error while reading a file into a DataError that names the file."""
    caught: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error, lzma.LZMAError, *more)
    try:
        yield
    except caught as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise DataError(f"{path}: cannot be read: {reason}") from error
