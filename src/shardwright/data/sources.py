"""Streams documents from a file, a folder, a URL, or a dataset of the Hugging Face hub.

    text, source code      one file, one document
    JSON lines, an array of objects   one object, one document: the field `text_key`
    Parquet                one row, one document: the column `text_key`
    hf:NAME[:CONFIG][:SPLIT]   one row, one document, streamed
    s3://BUCKET/FOLDER and other URLs of fsspec   files of these kinds, read as they stream

The content of a file decides its kind, and whether it is compressed (`content`). A folder is read in sorted order, so
that a source has the same documents in the same order every time. Memory does not grow with the corpus.
"""

import fnmatch
import functools
import os
from collections.abc import Iterator
from pathlib import Path

from shardwright.data.chat import ChatFormat, without_nulls
from shardwright.data.content import STRUCTURED, kind_of, suffix
from shardwright.data.readers import (
    ENCODING_ERRORS,
    Document,
    EncodingErrors,
    Meter,
    ReadOptions,
    field_text,
    naming,
    parquet_documents,
    record_documents,
    text_documents,
)
from shardwright.data.remote import File, remote_files
from shardwright.system.errors import DataError, nearest
from shardwright.system.remote import REMOTE

__all__ = ["Document", "EncodingErrors", "Meter", "documents", "source_files"]

HUB = "hf:"
JSON_LINES = tuple(f".{kind}{packed}" for kind in ("jsonl", "ndjson") for packed in ("", ".gz", ".zst"))


def documents(
    source: str | Path,
    *,
    text_key: str = "text",
    glob: str | None = None,
    encoding_errors: EncodingErrors = "error",
    skip_bad: bool = False,
    meter: Meter | None = None,
    chat: ChatFormat | None = None,
) -> Iterator[Document]:
    """Yield every document of `source`, in an order that is the same every time.

    `glob` chooses among the files of a folder: by file name (`*.py`), or by path below the folder if it has a slash
    (`src/*.py`; there `*` also crosses slashes). Hidden files and folders are left out; each folder is read once, even
    if several links lead to it. `meter` counts as the stream is read.

    Raises DataError, when the stream gets there: a path that is missing, a folder without files, a file that is not
    UTF-8 text or not of its suffix's kind. With `encoding_errors` "skip" a document that is not UTF-8 is left out and
    counted; with "replace" its bad bytes become U+FFFD, which are counted. With `skip_bad` a record that is not JSON,
    or has no string in the field `text_key`, is left out and counted. With `chat` each record is a conversation.
    """
    if encoding_errors not in ENCODING_ERRORS:
        raise DataError(f"encoding_errors={encoding_errors!r}; {nearest(str(encoding_errors), ENCODING_ERRORS)}")
    reading = ReadOptions(text_key, encoding_errors, skip_bad, Meter() if meter is None else meter, chat)
    if isinstance(source, str) and source.startswith(HUB):
        yield from _hub_documents(source, reading)
        return
    for path in source_files(source, glob):
        with naming(path):
            kind = kind_of(path, text_key if chat is None else None)
        if kind == "parquet":
            yield from parquet_documents(path, reading)
        elif kind != "text":
            yield from record_documents(path, reading, kind)
        elif chat is not None:
            raise DataError(
                f"{path}: conversations are records of {', '.join(JSON_LINES)} or .parquet files, or of hf:"
            )
        else:
            if suffix(path) in STRUCTURED:
                reading.meter.n_structured += 1
                reading.meter.structured_first = reading.meter.structured_first or str(path)
            yield from text_documents(path, reading)


def source_files(source: str | Path, glob: str | None = None) -> Iterator[File]:
    """Yield the files that `documents` reads, in its order. Raises DataError if there are none."""
    if REMOTE in str(source):
        yield from remote_files(str(source), glob)
        return
    root = Path(source)
    if root.is_file():
        if glob is not None:
            raise DataError(f"--glob {glob!r} chooses files of a folder, but {root} is a file; leave it out")
        yield root
        return
    if not root.exists():
        hint = f"; a dataset of the hub is {HUB}{source}" if str(source).count("/") == 1 else ""
        raise DataError(f"{root}: there is no such file or folder{hint}")
    if not root.is_dir():
        raise DataError(f"{root}: neither a file nor a folder; it is read twice, so write it to a file first")
    empty = True
    for path in _walk(root, set()):
        if glob is not None:
            name = path.relative_to(root).as_posix() if "/" in glob else path.name
            if not fnmatch.fnmatchcase(name, glob):
                continue
        empty = False
        yield path
    if empty:
        chosen = f" that match --glob {glob!r}" if glob is not None else " (hidden ones do not count)"
        raise DataError(f"{root}: the folder has no files{chosen}")


def _walk(folder: Path, seen: set[tuple[int, int]]) -> Iterator[Path]:
    """Yield the regular files below `folder`; a device, a pipe or a dangling link is not a file."""
    try:
        status = folder.stat()
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise DataError(f"{folder}: cannot be read: {error.strerror}") from error
    # A link may lead back to a folder above it.
    if (status.st_dev, status.st_ino) in seen:
        return
    seen.add((status.st_dev, status.st_ino))
    for entry in entries:
        if entry.name.startswith("."):
            continue
        try:
            is_folder, is_file = entry.is_dir(), entry.is_file()
        except OSError as error:  # such as a link to itself
            raise DataError(f"{entry.path}: cannot be read: {error.strerror}") from None
        if is_folder:
            yield from _walk(Path(entry.path), seen)
        elif is_file:
            yield Path(entry.path)


def _hub_documents(source: str, reading: ReadOptions) -> Iterator[Document]:
    name, config, split = _hub_name(source)
    try:
        import datasets
    except ImportError:
        raise DataError(f"{source}: needs the datasets library; pip install datasets") from None

    try:
        rows = datasets.load_dataset(name, config, split=split, streaming=True)
    except Exception as error:  # the library raises dozens of types, from any of its back ends
        raise DataError(f"{source}: datasets cannot open it: {_first_line(error)}") from error
    if rows.column_names is not None:
        reading.check_column(source, rows.column_names)
        if reading.chat is None:
            rows = rows.select_columns([reading.text_key])
    iterator, number = iter(rows), 0
    while True:
        try:
            row = next(iterator, None)
        except Exception as error:  # as above: network, decoding and parsing errors of any type
            raise DataError(f"{source}: row {number + 1} cannot be read: {_first_line(error)}") from error
        if row is None:
            return
        number += 1
        where = f"{source}: row {number}"
        yield from reading.document(where, functools.partial(field_text, without_nulls(row), where, reading))


def _hub_name(source: str) -> tuple[str, str | None, str]:
    """Parse `hf:NAME[:CONFIG][:SPLIT]` into (name, config, split); an empty CONFIG is the dataset's own default."""
    parts = source.removeprefix(HUB).split(":")
    if len(parts) > 3 or not parts[0]:
        raise DataError(
            f"{source!r} is not hf:NAME[:CONFIG][:SPLIT]; for example hf:roneneldan/TinyStories, "
            "hf:wikitext:wikitext-2-raw-v1, or hf:roneneldan/TinyStories::validation"
        )
    name, config, split = (*parts, "", "")[:3]
    return name, config or None, split or "train"


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
