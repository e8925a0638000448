"""Detects the content of a file: compressed or not, records or text. The name decides only for JSON lines."""

import bz2
import gzip
import io
import itertools
import json
import lzma
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any, Literal

from shardwright.data.remote import File
from shardwright.system.errors import DataError
from shardwright.system.files import parse_json
from shardwright.system.units import KiB, MiB, format_bytes

Kind = Literal["lines", "array", "object", "parquet", "text"]
LONGEST_RECORD_BYTES = 256 * MiB
LARGEST_OBJECT_BYTES = 16 * MiB
"""A JSON object over several lines is examined up to this size; a larger one is text."""
CHUNK_BYTES = 64 * KiB
_PACKED = (".gz", ".gzip", ".zst", ".bz2", ".xz")
_LINES = (".jsonl", ".ndjson")
STRUCTURED = (".json", ".csv", ".tsv")
"""Suffixes of files that may have records in a form that is not read; such a file is one document of text."""
MOST_BEFORE_RECORDS = 3
"""Lines, such as comments, that are passed over to find records."""
_BEFORE_RECORDS = "\ufeff\x1e \t\r\n"
"""Characters that may precede the first record: U+001E precedes each record of a JSON text sequence (RFC 7464)."""


def suffix(path: File) -> str:
    """Return the suffix of a name in lower case, without a compression's suffix."""
    name = path.name.lower()
    for packed in _PACKED:
        name = name.removesuffix(packed)
    return PurePath(name).suffix


@contextmanager
def opened(path: File) -> Iterator[tuple[Any, Callable[[], int]]]:
    """Open a file and decompress it; also yield a function that returns the number of bytes read of the file."""
    with path.open("rb") as file:
        magic = file.read(6)
        file.seek(0)
        yield _decompressed(path, file, magic), file.tell


def _decompressed(path: File, file: Any, magic: bytes) -> Any:
    # A file that was decompressed without a new name is read unchanged; any other mismatch is damage.
    named = "" if magic.lstrip().startswith(b"{") else path.name.lower()
    if magic.startswith(b"\x1f\x8b") or named.endswith((".gz", ".gzip")):
        return gzip.GzipFile(fileobj=file)
    if magic.startswith(b"BZh") or named.endswith(".bz2"):
        return bz2.BZ2File(file)
    if magic.startswith(b"\xfd7zXZ\0") or named.endswith(".xz"):
        return lzma.LZMAFile(file)
    if not (magic.startswith(b"\x28\xb5\x2f\xfd") or named.endswith(".zst")):
        return file
    try:
        import pyarrow as pa
    except ImportError:
        raise DataError(f"{path}: Zstandard needs pyarrow; pip install pyarrow") from None
    return io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(file, "r"), "zstd"))


def kind_of(path: File, text_key: str | None) -> Kind:
    """Return how a file is read. `text_key`: the field of a record that has its text; None: every object is a record.

    Raises DataError for records without that field in a file whose name does not identify it as a file of records.
    """
    if suffix(path) in _LINES:
        return "lines"
    with opened(path) as (file, _):
        head = file.read(CHUNK_BYTES)
        if head.startswith(b"PAR1") or suffix(path) == ".parquet":
            return "parquet"
        begin = head.removeprefix(b"\xef\xbb\xbf").lstrip(_BEFORE_RECORDS.encode()[3:])[:1]
        if begin not in (b"{", b"["):
            if (n_before := _lines_before_records(head, text_key)) is not None:
                raise DataError(
                    f"{path}: it has records, one JSON object a line, from line {n_before + 1}; remove the lines "
                    f"before, or leave the file out with --glob if it is not data"
                )
            return "text"
        if begin == b"[":
            first = next(array_items(io.BytesIO(head), str(path), lenient=True), None)
            return _checked(path, "array", [first], text_key) if isinstance(first, dict) else "text"
    with opened(path) as (file, _):
        lines = (file.readline(LONGEST_RECORD_BYTES) for _ in itertools.count())
        full = (line.removeprefix(b"\xef\xbb\xbf").strip() for line in itertools.takewhile(bool, lines))
        objects = [_object(line) for line in itertools.islice(filter(None, full), 2)]
    if objects[0] is None or len(objects) == 1:
        return _kind_of_object(path, text_key)
    if objects[1] is None:
        return "lines" if _is_record(objects[0], text_key) else "text"
    return _checked(path, "lines", objects, text_key)


def _lines_before_records(head: bytes, text_key: str | None) -> int | None:
    """Return the number of lines before the records of a file that starts with other lines, such as a comment; None
    unless every other whole line of its start `head` is a record."""
    lines = head.split(b"\n")[:-1]
    n_before = next((n for n, line in enumerate(lines[: MOST_BEFORE_RECORDS + 1]) if line.lstrip()[:1] == b"{"), None)
    records = lines[n_before:] if n_before else []
    return (
        n_before
        if len(records) > 1 and all(_is_record(_object(line), text_key) for line in records if line.strip())
        else None
    )


def _kind_of_object(path: File, text_key: str | None) -> Kind:
    """Return the kind of a file that starts with an object over several lines. Raises DataError for records in another
    form: such a file would become one document of raw JSON."""
    with opened(path) as (file, _):
        content = file.read(LARGEST_OBJECT_BYTES + 1)
    value = _object(content) if len(content) <= LARGEST_OBJECT_BYTES else None
    if value is None:
        if _is_record(_first_object(content), text_key):
            raise DataError(
                f"{path}: it starts with a JSON object that is a record, and has more than one object on a line or "
                f"something else behind it; write one object a line"
            )
        return "text"
    if _is_record(value, text_key):
        return "object"
    for name, inner in value.items():
        if isinstance(inner, list) and inner and _is_record(inner[0], text_key or "messages"):
            raise DataError(
                f"{path}: an object whose field {name!r} has the records; write these as JSON lines, one object a line"
            )
    return "text"


def _first_object(content: bytes) -> Any:
    """Return the JSON object at the start of a file, regardless of the bytes after it; None if there is none."""
    try:
        return json.JSONDecoder().raw_decode(content.decode("utf-8", "replace").lstrip(_BEFORE_RECORDS))[0]
    except (ValueError, RecursionError):
        return None


def _is_record(value: Any, text_key: str | None) -> bool:
    if not isinstance(value, dict):
        return False
    return text_key in value if text_key is not None else bool({"messages", "prompt"} & set(value))


def _checked(path: File, kind: Kind, values: list[Any], text_key: str | None) -> Kind:
    lacking = [value for value in values if text_key is not None and text_key not in value]
    if lacking:
        present = ", ".join(lacking[0]) or "none"
        shape = "an array of objects" if kind == "array" else "a JSON object on each of its first lines"
        raise DataError(
            f"{path}: it has {shape}, so it is read as records, which have no field {text_key!r}; there are: "
            f"{present}. Choose one with --text-key, or leave the file out with --glob if it is not data"
        )
    return kind


def _object(raw: bytes) -> dict[str, Any] | None:
    try:
        value = parse_json(raw.removeprefix(b"\xef\xbb\xbf"))
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def array_items(file: Any, where: str, lenient: bool = False) -> Iterator[Any]:
    """Yield the items of a JSON array as they are read. Raises DataError, or with `lenient` stops, at damage."""
    decoder, reader = json.JSONDecoder(), io.TextIOWrapper(file, "utf-8-sig", errors="strict")
    try:
        text, n = reader.read(CHUNK_BYTES).lstrip()[1:], 0
        while True:
            text = text.lstrip()
            if n and text.startswith(","):
                text = text[1:].lstrip()
            if text.startswith("]"):
                return
            try:
                item, end = decoder.raw_decode(text)
                if end == len(text):
                    raise ValueError("it may continue")
            except ValueError as error:
                more = reader.read(max(len(text), CHUNK_BYTES))
                if not more or len(text) > LONGEST_RECORD_BYTES:
                    long = f" within {format_bytes(LONGEST_RECORD_BYTES)}" if more else ""
                    raise DataError(f"{where}: item {n + 1} of the JSON array has no end{long}: {error}") from None
                text += more
                continue
            n += 1
            yield item
            text = text[end:]
    except (DataError, RecursionError, UnicodeDecodeError) as error:
        if lenient:
            return
        if isinstance(error, DataError):
            raise
        raise DataError(f"{where}: the JSON array cannot be read: {error}") from None
    finally:
        reader.detach()
