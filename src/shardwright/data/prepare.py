"""Tokenises a corpus into a folder: train or load a tokenizer, encode on all cores, write shards, publish.

Everything is written to a folder next to OUT, `OUT.partial-<pid>-<host>`, and renamed to OUT when it is complete and on
disk. A prepare that is killed leaves no OUT; the next one on the same machine deletes its partial folder. With
`publish`, shards are written to OUT itself, where the manifest lists the complete shards, and a prepare that was
killed is continued (`publication`). Memory holds two batches of text and their ids, for a corpus of any size.
"""

import contextlib
import functools
import hashlib
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np

from shardwright.data.chat import MOST_NAMES, TEMPLATE, ChatFormat, read_chat_format
from shardwright.data.corpus_writer import CorpusWriter, token_dtype
from shardwright.data.encoding import TextSection, answer_sections
from shardwright.data.order import keyed_fractions
from shardwright.data.pairs import PairFormat
from shardwright.data.publication import STAGING, TRAINED, Publication, publishing
from shardwright.data.remote import size_bytes
from shardwright.data.sources import HUB, Document, EncodingErrors, Meter, documents, source_files
from shardwright.data.token_manifest import MANIFEST, TOKENIZER, DataManifest, UnfinishedPrepare
from shardwright.data.tokenizer import TextTokenizer, load_tokenizer, train_bpe
from shardwright.system.errors import DataError
from shardwright.system.files import new_folder, real_path, write_whole
from shardwright.system.owner import LOCK
from shardwright.system.remote import REMOTE
from shardwright.system.units import GiB, MiB, counted, format_bytes
from shardwright.system.version import PACKAGE_VERSION

DataFormat = Literal["text", "chat", "preference"]
NO_ROOM_HINT = ". Tokens take half the size of most text, all of it with a vocabulary above 65,536"


@dataclass(frozen=True)
class PrepareProgress:
    """The progress of a prepare. `stage` is "tokenizer" (the sample it is trained on), "tokens", or "room" while the
    next shard has none; `read_bytes` of `total_bytes` of the source's files have been read (None if unknown: a dataset
    of the hub)."""

    stage: str
    read_bytes: int
    total_bytes: int | None
    documents: int
    tokens: int


@dataclass(frozen=True)
class _ProgressReporter:
    """Reports the progress of a prepare of `total_bytes` to `show`, if there is one."""

    total_bytes: int | None
    show: Callable[[PrepareProgress], None] | None

    def __call__(self, stage: str, meter: Meter, n_documents: int, n_tokens: int = 0) -> None:
        if self.show is not None:
            self.show(PrepareProgress(stage, meter.read_bytes, self.total_bytes, n_documents, n_tokens))


@dataclass(frozen=True)
class _Corpus:
    """The source as a stream that can be started again."""

    source: str
    text_key: str
    glob: str | None
    encoding_errors: EncodingErrors
    skip_bad: bool
    chat: ChatFormat | None = None

    def total_bytes(self) -> int | None:
        if self.source.startswith(HUB):
            return None
        return sum(map(size_bytes, source_files(self.source, self.glob)))

    def pieces(self, meter: Meter) -> Iterator[tuple[int, str]]:
        """Yield (document number, piece of its text); only documents that have text are numbered."""
        for number, document in self._with_text(meter):
            for text in document.pieces:
                yield number, text

    def sections(self, meter: Meter, tokenizer: TextTokenizer) -> Iterator[TextSection]:
        """Yield the text of every document in order, as it will be encoded."""
        specials = tokenizer.special_tokens
        for number, document in self._with_text(meter):
            if document.trained is None:
                yield TextSection(number, document.pieces)
                continue
            texts = list(document.pieces)
            closed = texts[-1].endswith(specials)
            yield from answer_sections(number, texts, document.trained, document.apart, tokenizer, closed)

    def _with_text(self, meter: Meter) -> Iterator[tuple[int, Document]]:
        number = 0
        for document in documents(**vars(self), meter=meter):
            if (first := next(document.pieces, None)) is not None:
                yield number, replace(document, pieces=itertools.chain([first], document.pieces))
                number += 1

    @property
    def given(self) -> dict[str, Any]:
        """The settings that define the documents."""
        kind = "text" if self.chat is None else "chat" if self.chat.per_record == 1 else "preference"
        return {name: value for name, value in vars(self).items() if name != "chat"} | {"format": kind}

    def described(self, meter: Meter) -> dict[str, Any]:
        """Return the manifest's description of the source."""
        counts: dict[str, Any] = {
            "read_bytes": meter.read_bytes,
            "skipped": meter.n_skipped,
            "bad": meter.n_bad,
            "replaced": meter.n_replaced,
        }
        if self.chat is not None and self.chat.writes_date:
            counts["date"] = datetime.fromtimestamp(self.chat.now, UTC).isoformat(timespec="seconds")
        if meter.n_structured:
            counts |= {"structured": meter.n_structured, "structured_first": meter.structured_first}
        if self.chat is not None and self.chat.unread:
            more = ["and maybe more"] if len(self.chat.unread) == MOST_NAMES else []
            counts["unread"] = sorted(self.chat.unread) + more
        return self.given | counts | ({"skipped_first": meter.skipped} if meter.skipped else {})


def prepare(
    source: str | Path,
    out: str | Path,
    *,
    tokenizer: str | Path | None = None,
    separator: str | None = None,
    vocab_size: int = 8192,
    tokenizer_sample: int = 256 * MiB,
    validation: float = 0.01,
    seed: int = 0,
    shard_tokens: int = 100_000_000,
    max_tokens: int | None = None,
    format: DataFormat = "text",
    chat_template: str | Path | None = None,
    text_key: str = "text",
    glob: str | None = None,
    encoding_errors: EncodingErrors = "error",
    skip_bad: bool = False,
    overwrite: bool = False,
    publish: bool = False,
    keep_gib: float | None = None,
    progress: Callable[[PrepareProgress], None] | None = None,
) -> DataManifest:
    """Tokenise `source` (see `sources.documents`) into the new folder `out`, and return its manifest.

    `tokenizer` is a tokenizer.json; without one a BPE of `vocab_size` is trained on up to `tokenizer_sample` bytes of
    the text, spread over the corpus if its size is known. With `format` "chat" each record is a conversation (see
    `chat`) whose answers are trained on, with "preference" a chosen and a rejected answer (see `pairs.PairFormat`);
    `chat_template` is a file with a template instead of the tokenizer's. About
    the fraction `validation` of the documents, chosen by a hash of (seed, document number), goes to the split
    "validation"; with two or more documents both splits have one. The same call writes the same bytes.

    `max_tokens`: end with the document that reaches this number of tokens, over all splits; the rest of the source is
    not encoded. With `publish`, a run can train on the shards of `out` that are complete while others are written, and
    the same call continues a prepare that ended before its end. It reads the source from the start, and encodes the
    documents that are not published. `keep_gib`: GiB that the published tokens may occupy; without room for a shard,
    the oldest shards that a run has trained on (`publication.write_first_needed`) are deleted, or prepare waits.

    Raises DataError for bad input, a full disk, and an `out` that exists (`overwrite` replaces it, once the new one is
    complete). Nothing is left behind then, except with `publish`.
    """
    _check(
        validation,
        shard_tokens=shard_tokens,
        tokenizer_sample=tokenizer_sample,
        max_tokens=1 if max_tokens is None else max_tokens,
    )
    if chat_template is not None and format == "text":
        raise DataError("--chat-template writes conversations; add --format chat or --format preference")
    loaded = None if tokenizer is None else load_tokenizer(tokenizer, separator)
    chat = None if format == "text" else _chat_format(loaded, tokenizer, chat_template)
    if format == "preference" and chat is not None:
        chat = PairFormat(**vars(chat))
    corpus = _Corpus(str(source), text_key, glob, encoding_errors, skip_bad, chat)
    if (
        REMOTE not in corpus.source
        and Path(corpus.source).is_dir()
        and real_path(out).is_relative_to(real_path(corpus.source))
    ):
        raise DataError(f"out={out} is inside the source {source}: it would read what it writes; choose another")
    report = _ProgressReporter(corpus.total_bytes(), progress)
    of_shards = {"validation": validation, "seed": seed, "shard_tokens": shard_tokens, "max_tokens": max_tokens}
    trained = {"vocab_size": vocab_size, "tokenizer_sample": tokenizer_sample}
    options = of_shards | (trained if loaded is None else dict.fromkeys(trained))
    if publish and overwrite:
        raise DataError(f"--overwrite replaces {out} at the end, and --publish adds shards to it; leave one out")
    if keep_gib is not None and not (publish and keep_gib > 0):
        raise DataError(f"--keep-gib={keep_gib:g} is the room of --publish; it is above 0, and needs --publish")
    place = publishing(Path(out), {"source": corpus.given, "options": options}) if publish else contextlib.nullcontext()
    with place as begun:
        if begun is not None:
            begun.require_tokenizer(loaded, chat)
        if begun is not None and begun.manifest is not None and begun.manifest.unfinished is None:
            return begun.manifest
        with (
            contextlib.nullcontext(begun.staging)
            if begun is not None
            else new_folder(Path(out), lambda place: _may_replace(place, overwrite), DataError, NO_ROOM_HINT)
        ) as folder:
            if loaded is None and begun is not None and begun.manifest is not None:
                loaded = load_tokenizer(begun.folder / TOKENIZER, begun.manifest.separator)
            elif loaded is None:
                texts = _sample(corpus, seed, tokenizer_sample, report)
                loaded = train_bpe(texts, vocab_size, sample_bytes=tokenizer_sample)
            return _write(corpus, folder, loaded, of_shards, options, report, begun, keep_gib)


def _write(
    corpus: _Corpus,
    folder: Path,
    tokenizer: TextTokenizer,
    of_shards: dict[str, Any],
    options: dict[str, Any],
    report: _ProgressReporter,
    begun: Publication | None,
    keep_gib: float | None,
) -> DataManifest:
    """Write the tokens and the manifest, which with `begun` lists the complete shards while more are written.
    `of_shards`: the `options` of the manifest that the writer of the shards takes."""
    meter, chat = Meter(), corpus.chat
    of_tokenizer = _tokenizer_kept(folder, tokenizer, chat)
    writer = CorpusWriter(
        folder,
        tokenizer,
        **of_shards,
        per_record=1 if chat is None else chat.per_record,
        masked=chat is not None,
        begun=None if begun is None else begun.manifest,
    )

    def write_manifest(entries: dict[str, Any], unfinished: UnfinishedPrepare | None) -> DataManifest:
        manifest = DataManifest(
            created_by=f"shardwright {PACKAGE_VERSION}",
            dtype=token_dtype(tokenizer),
            **of_tokenizer,
            **entries,
            pairs=isinstance(chat, PairFormat),
            publication=None if begun is None else begun.name,
            unfinished=unfinished,
            source=corpus.described(meter) | _plain_markers(tokenizer, chat),
            options=options,
        )
        if begun is None:
            return manifest.written(folder)
        written = begun.publish(manifest)
        if unfinished is not None:
            make_room()
        return written

    def make_room() -> None:
        """Wait until the next shard has room."""
        if begun is not None and keep_gib is not None:
            token_bytes = np.dtype(token_dtype(tokenizer)).itemsize + (chat is not None)
            shard_bytes = _largest_shard_bytes(of_shards["shard_tokens"], token_bytes, keep_gib)
            begun.make_room(
                shard_bytes, int(keep_gib * GiB), lambda: report("room", meter, writer.n_documents, writer.n_tokens)
            )

    make_room()
    writer.write(
        corpus.sections(meter, tokenizer),
        functools.partial(report, "tokens", meter),
        None if begun is None else write_manifest,
    )
    if not writer.n_documents:
        raise DataError(f"{corpus.source}: there is no text in it{_left_out(meter)}")
    return write_manifest(writer.entries(), None)


def _left_out(meter: Meter) -> str:
    """Return the end of a sentence about the documents that were skipped, if there are any."""
    n = meter.n_skipped + meter.n_bad
    return f" ({counted(n, 'document')} skipped; the first: {meter.skipped[0]})" if n else ""


def _largest_shard_bytes(shard_tokens: int, token_bytes: int, keep_gib: float) -> int:
    """Return the size of a shard that ends at twice its tokens. Raises DataError if `keep_gib` is less."""
    shard_bytes = 2 * shard_tokens * token_bytes
    if keep_gib * GiB < shard_bytes:
        raise DataError(
            f"--keep-gib={keep_gib:g} is {format_bytes(keep_gib * GiB)}, and a shard of up to 2 x "
            f"--shard-tokens={shard_tokens:,} with {counted(token_bytes, 'byte')} a token has "
            f"{format_bytes(shard_bytes)}; raise it to {6 * shard_bytes / GiB:.3g} or more, for a run that "
            f"reads several"
        )
    return shard_bytes


def _check(validation: float, **least_1: int) -> None:
    if not 0 <= validation < 1:
        raise DataError(f"validation={validation} is not a fraction of the documents: from 0 to below 1")
    for name, value in least_1.items():
        if value < 1:
            raise DataError(f"{name}={value} must be at least 1")


def _kept(path: Path, content: bytes) -> str:
    """Write a file and return its checksum."""
    write_whole(path, content)
    return hashlib.sha256(content).hexdigest()


def _tokenizer_kept(folder: Path, loaded: TextTokenizer, chat: ChatFormat | None) -> dict[str, Any]:
    """Write the tokenizer and the chat template to `folder`, and return the manifest's entries for them."""
    return {
        "vocab_size": loaded.vocab_size,
        "separator": loaded.separator,
        "separator_id": loaded.separator_id,
        "tokenizer_file": TOKENIZER,
        "tokenizer_sha256": _kept(folder / TOKENIZER, loaded.json_bytes),
        "tokenizer_fingerprint": loaded.fingerprint,
        "chat_template_sha256": _kept(folder / TEMPLATE, chat.template.encode()) if chat and chat.template else None,
        "answer_end_id": loaded.tokenizer.token_to_id(chat.answer_end) if chat and chat.answer_end else None,
        "chat_tokens": chat.named_tokens if chat else {},
    }


def _plain_markers(tokenizer: TextTokenizer, chat: ChatFormat | None) -> dict[str, Any]:
    """Return the manifest's entry for control tokens that the template wrote and the tokenizer does not have: their
    numbers of tokens."""
    markers = sorted(chat.markers) if chat is not None else []
    counts = {marker: len(ids) for marker, ids in zip(markers, tokenizer.encode_batch(markers), strict=True)}
    plain = {marker: n for marker, n in counts.items() if n > 1}
    return {"plain_markers": plain} if plain else {}


def _chat_format(
    tokenizer: TextTokenizer | None, tokenizer_file: str | Path | None, template: str | Path | None
) -> ChatFormat:
    """Return the chat format; from now on the tokenizer reads the special tokens that a template writes."""
    given = None if template is None else Path(template)
    if tokenizer is None or tokenizer_file is None:
        return read_chat_format(None, given, ())
    tokenizer.reads_special_tokens()
    return read_chat_format(Path(tokenizer_file), given, tokenizer.special_tokens)


def _may_replace(out: Path, overwrite: bool) -> None:
    """Raise DataError unless `out` is absent, an empty folder or, with `overwrite`, token shards and nothing else."""
    if not os.path.lexists(out):
        return
    if not out.is_dir() or out.is_symlink():
        raise DataError(f"{out}: exists and is not a folder; choose another --out")
    present = {entry.name for entry in out.iterdir()}
    if not present:
        return
    if not overwrite:
        raise DataError(f"{out}: exists already; choose another --out, or replace it with --overwrite")
    try:
        manifest = DataManifest.read(out, check_files=False)
    except DataError as error:
        raise DataError(f"--overwrite replaces only what prepare made: {error}") from None
    if others := sorted(present - {LOCK, STAGING, TRAINED, MANIFEST, *manifest.sha256_of_files}):
        raise DataError(
            f"{out}: --overwrite would delete files that prepare did not make: {', '.join(others[:5])}; move them "
            f"away first"
        )


def _sample(corpus: _Corpus, seed: int, sample_bytes: int, report: _ProgressReporter) -> Iterator[str]:
    """Yield text to train a tokenizer on: for a corpus larger than the sample, pieces from all over it."""
    rate = sample_bytes / report.total_bytes if report.total_bytes else 1.0
    meter, number = Meter(), -1
    for i, (number, piece) in enumerate(corpus.pieces(meter)):
        if rate >= 1 or keyed_fractions((seed, 1), np.array(i))[0] < rate:
            yield piece
        if i % 64 == 0:
            report("tokenizer", meter, number + 1)
    report("tokenizer", meter, number + 1)
