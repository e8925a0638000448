"""Encodes the documents of a corpus and writes them to the shards of their splits, from any document on.

Shards can be published while the corpus is written: when a document ends a shard of `train`, the open shard of
`validation` ends too, so the manifest of that moment has the first n documents of the source and no others. The
checksum of their text, which a later prepare compares, shows whether the source still has the same documents.
"""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from shardwright.data import blocks
from shardwright.data.encoding import Joiner, TextSection, TextWindow, encode, windows
from shardwright.data.order import keyed_fractions
from shardwright.data.token_manifest import DataManifest, UnfinishedPrepare
from shardwright.data.tokenizer import TextTokenizer, all_cores
from shardwright.data.writer import SplitWriter
from shardwright.system.control_groups import usable_cores
from shardwright.system.errors import DataError
from shardwright.system.units import MiB, counted

TRAIN, VALIDATION = "train", "validation"
# The tokenizers library holds about 100 bytes a token while it encodes: 35 times the text.
BATCH_BYTES_PER_CORE = 2 * MiB
LARGEST_BATCH_BYTES = 32 * MiB


class CorpusWriter:
    """The shards of all splits of a corpus, in a folder."""

    def __init__(
        self,
        folder: Path,
        tokenizer: TextTokenizer,
        *,
        validation: float,
        seed: int,
        shard_tokens: int,
        max_tokens: int | None = None,
        per_record: int = 1,
        masked: bool = False,
        begun: DataManifest | None = None,
    ) -> None:
        """`max_tokens`: end with the document that reaches this number. `per_record`: documents of a record, which are
        in one split. `masked`: write the tokens that are trained on. `begun`: an unfinished manifest, whose shards the
        new ones follow."""
        self._tokenizer, self._validation, self._seed, self._per_record = tokenizer, validation, seed, per_record
        self._max_tokens = math.inf if max_tokens is None else max_tokens
        dtype = np.dtype(token_dtype(tokenizer)).newbyteorder("<")
        self._writers = {
            name: SplitWriter(
                folder, name, dtype, tokenizer.separator_id, shard_tokens, masked, begun.splits[name] if begun else None
            )
            for name in ((TRAIN, VALIDATION) if validation > 0 else (TRAIN,))
        }
        self._begun = None if begun is None else begun.unfinished
        self._largest_id = 0 if begun is None else begun.largest_id or 0
        self._text = xxhash.xxh3_128()
        self.n_documents = 0 if self._begun is None else self._begun.documents
        """The documents that are written."""

    @property
    def _enough(self) -> bool:
        """Return whether the documents that are written are enough, so that no other follows."""
        return self.n_tokens >= self._max_tokens and self.n_documents % self._per_record == 0

    @property
    def n_tokens(self) -> int:
        """The tokens that are written, of all splits."""
        return sum(writer.n_tokens for writer in self._writers.values())

    def write(
        self,
        sections: Iterator[TextSection],
        report: Callable[[int, int], None],
        publish: Callable[[dict[str, Any], UnfinishedPrepare], object] | None = None,
    ) -> None:
        """Write the documents of `sections` that are not written yet, and close the shards.

        `report` receives the numbers of documents and tokens so far, `publish` the manifest's entries for the splits
        whenever the shards have all documents that are written. Raises DataError if the documents that are written are
        not the first of `sections`.
        """
        joiner, dtype = Joiner(self._tokenizer), np.dtype(token_dtype(self._tokenizer)).newbyteorder("<")
        current, ends_trained = self.n_documents - 1, True  # whether the current document's separator is trained on

        def end_document() -> None:
            full = self._writer_of(current).end_document(ends_trained)
            self.n_documents = current + 1
            whole_record = self.n_documents % self._per_record == 0
            if full and publish is not None and whole_record and self._split_of(current) == TRAIN:
                self._close()
                publish(self.entries(), UnfinishedPrepare(documents=self.n_documents, text_xxh3=self._text.hexdigest()))

        def write(parts: list[TextWindow], encoded: "Future[list[Any]]") -> None:
            nonlocal current, ends_trained
            for window, encoding in zip(parts, encoded.result(), strict=True):
                section = window.section
                if section.document != current:
                    if current >= self.n_documents:
                        end_document()
                    if self._enough:
                        return
                    current = section.document
                self._add_text(window)
                for ids, trained in joiner.add(window, encoding):
                    self._writer_of(current).write(ids.astype(dtype), trained)
                    ends_trained = bool(np.all(np.atleast_1d(trained)[-1:])) and not section.closed
            report(current + 1, self.n_tokens)

        try:
            # One batch is encoded while the one before is written and the one after is read.
            with all_cores(), ThreadPoolExecutor(1) as encoder:
                waiting: tuple[list[TextWindow], Future[list[Any]]] | None = None
                for parts in _batches(self._unwritten(sections, report)):
                    if self._enough:
                        waiting = None
                        break
                    encoded = encoder.submit(encode, self._tokenizer, parts)
                    if waiting is not None:
                        write(*waiting)
                    waiting = parts, encoded
                if waiting is not None and not self._enough:
                    write(*waiting)
            if current >= self.n_documents:
                end_document()
        finally:
            self._close()

    def entries(self) -> dict[str, Any]:
        """Return the manifest's entries for the splits, whose shards are closed."""
        return {
            "block_bytes": blocks.BLOCK_BYTES,
            "largest_id": max(self._largest_id, *(writer.largest_id for writer in self._writers.values())),
            "splits": {name: writer.split() for name, writer in self._writers.items()},
        }

    def _close(self) -> None:
        for writer in self._writers.values():
            writer.close()

    def _unwritten(self, sections: Iterator[TextSection], report: Callable[[int, int], None]) -> Iterator[TextSection]:
        """Yield the sections after the documents that are written, whose text is only compared."""
        begun, reached, n_read = self._begun, False, 0
        for section in sections:
            if begun is None or section.document >= begun.documents:
                if begun is not None and not reached:
                    self._require_same_text(begun, n_read)
                    reached = True
                yield section
                continue
            for window in windows(section):
                self._add_text(window)
            report(section.document + 1, self.n_tokens)
            n_read = section.document + 1
        if begun is not None and not reached:
            self._require_same_text(begun, n_read)

    def _require_same_text(self, begun: UnfinishedPrepare, n_read: int) -> None:
        if self._text.hexdigest() != begun.text_xxh3:
            has = f"it has {counted(n_read, 'document')} now" if n_read < begun.documents else "their text has changed"
            raise DataError(
                f"the first {counted(begun.documents, 'document')} of the source are published, and {has}; give the "
                f"source as it was, or another --out"
            )

    def _add_text(self, window: TextWindow) -> None:
        self._text.update(f"{window.section.document} {window.start} {window.last}\n".encode())
        self._text.update(window.text.encode("utf-8", "surrogatepass"))

    def _writer_of(self, document: int) -> SplitWriter:
        return self._writers[self._split_of(document)]

    def _split_of(self, document: int) -> str:
        # A stream does not know how many documents follow, so the first goes to `train` and the second to `validation`.
        record = document // self._per_record
        if self._validation == 0 or record == 0:
            return TRAIN
        if record == 1 or keyed_fractions((self._seed,), np.array(record))[0] < self._validation:
            return VALIDATION
        return TRAIN


def _batches(sections: Iterator[TextSection]) -> Iterator[list[TextWindow]]:
    """Yield windows in groups that are large enough for every core."""
    enough = min(usable_cores() * BATCH_BYTES_PER_CORE, LARGEST_BATCH_BYTES)
    gathered: list[TextWindow] = []
    size = 0
    for section in sections:
        for window in windows(section):
            gathered.append(window)
            size += len(window.text)
            if size >= enough:
                yield gathered
                gathered, size = [], 0
    if gathered:
        yield gathered


def token_dtype(tokenizer: TextTokenizer) -> Any:
    """Return the name of the type that ids of a tokenizer are written in."""
    return "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"
