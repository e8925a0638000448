"""Training samples: seq_len + 1 tokens, and a mask of the seq_len predictions that count.

Position t of a sample reads token t and predicts token t + 1; where the mask is False the prediction is not part of the
loss (its target becomes IGNORE). In conversations only the tokens of answers count.

Packed sequences also have the lengths of their documents, within which attention may stay. No torch.
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np

from shardwright.config import RunConfig
from shardwright.config.mixture import name_of, sources_of
from shardwright.config.sections import DataSection
from shardwright.data.shards import TokenSplit, open_split_of_run
from shardwright.data.token_manifest import DataManifest
from shardwright.system.errors import DataError
from shardwright.system.units import counted

IGNORE = -100


class Samples(Protocol):
    """Splits seen as `len(samples)` samples of `seq_len` predictions."""

    seq_len: int
    padded: bool
    """Whether samples may end with padding."""
    mirrored: bool
    """Whether tokens are at a URL, so that `fetch_samples` reads them."""

    def __len__(self) -> int: ...

    def origin(self, i: int) -> tuple[TokenSplit, int]:
        """Return the split of sample i, and its first token there."""
        ...

    def span(self, i: int) -> tuple[int, int]:
        """Return the first token of sample i in its split, and its number of tokens there: at most seq_len + 1. All but
        the last predict the next one; the rest of the seq_len predictions are padding."""
        ...

    def read(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Return sample i: tokens int64 [seq_len + 1] and mask bool [seq_len]."""
        ...

    def documents(self, i: int) -> list[int]:
        """Return the numbers of sample i's first seq_len tokens in each of its documents, in order. A separator belongs
        to the document that it ends; tokens that the sample cuts off on either side are not counted."""
        ...

    def document_lengths(self) -> np.ndarray:
        """Return `documents` of all samples, in any order, int64."""
        ...


def fetch_samples(samples: Samples, indices: Iterable[int]) -> None:
    """Read samples of tokens at a URL, many at once, which makes later reads local; nothing for tokens on this disk."""
    spans: dict[TokenSplit, list[tuple[int, int]]] = {}
    for i in indices if samples.mirrored else ():
        split, start = samples.origin(i)
        if split.mirrored:
            spans.setdefault(split, []).append((start, samples.span(i)[1]))
    for split, of_split in spans.items():
        split.fetch(of_split)


class SplitSamples(ABC):
    """The samples of one split; more of them when the split grows (`TokenSplit.grow`)."""

    def __init__(self, split: TokenSplit, seq_len: int, padded: bool) -> None:
        if seq_len < 1:
            raise DataError(f"seq_len={seq_len} must be at least 1")
        self.split, self.seq_len, self.padded, self.mirrored = split, seq_len, padded, split.mirrored

    def origin(self, i: int) -> tuple[TokenSplit, int]:
        return self.split, self.span(i)[0]

    def shard_ends(self) -> list[int]:
        """Return the number of samples whose tokens are in the first n shards, for n = 1, 2, ..."""
        numbers = range(len(self))
        return [bisect_right(numbers, end, key=lambda i: sum(self.span(i))) for end in self.split.token_ends]

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def span(self, i: int) -> tuple[int, int]: ...

    def read(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        start, length = self.span(i)
        tokens = np.full(self.seq_len + 1, self.split.separator_id, np.int64)
        tokens[:length] = self.split.tokens(start, length)
        mask = np.zeros(self.seq_len, bool)
        mask[: length - 1] = self.split.trained(start + 1, length - 1)
        return tokens, mask

    @abstractmethod
    def documents(self, i: int) -> list[int]: ...

    @abstractmethod
    def document_lengths(self) -> np.ndarray: ...


class PackedSamples(SplitSamples):
    """The split as one sequence of tokens, split every seq_len: no padding, and a sample may span documents.

    Sample i reads tokens [i*T, i*T + T) and predicts the successor of each: n = (n_tokens - 1) // T, and each token
    except the first, and less than T at the end, is predicted once. With `mask_boundaries` the token after a separator,
    the first token of another document, is not predicted. Raises DataError for fewer than T + 1 tokens.
    """

    def __init__(self, split: TokenSplit, seq_len: int, *, mask_boundaries: bool = False) -> None:
        super().__init__(split, seq_len, padded=False)
        self.mask_boundaries = mask_boundaries
        if len(self) < 1:
            way_out = "prepare more text" if split.name == "train" else "prepare with a larger --validation"
            if split.first_only:
                way_out += " or --shard-tokens"
            if split.n_tokens > 1:
                way_out = f"use seq_len <= {split.n_tokens - 1}, or {way_out}"
            raise DataError(
                f"{split.called} has {counted(split.n_tokens, 'token')}, fewer than "
                f"seq_len + 1 = {seq_len + 1}; {way_out}"
            )

    def __len__(self) -> int:
        return max(self.split.n_tokens - 1, 0) // self.seq_len

    def span(self, i: int) -> tuple[int, int]:
        """Return (first token, number of tokens) of sample i in the split."""
        assert 0 <= i < len(self), (i, len(self))
        return i * self.seq_len, self.seq_len + 1

    def read(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        start, length = self.span(i)
        tokens = self.split.tokens(start, length).astype(np.int64)
        mask = self.split.trained(start + 1, length - 1)
        return tokens, mask & (tokens[:-1] != self.split.separator_id) if self.mask_boundaries else mask

    def documents(self, i: int) -> list[int]:
        begins = self.split.document_starts(self.span(i)[0], self.seq_len)
        ends = np.concatenate([[0], begins[begins > 0], [self.seq_len]])
        lengths: list[int] = np.diff(ends).tolist()
        return lengths

    def document_lengths(self) -> np.ndarray:
        return packed_lengths(self.split.document_lengths(), self.seq_len)


class DocumentSamples(SplitSamples):
    """Every document starts its own sample; a long document is split every T, the rest is padded and masked.

    A document of L tokens (its separator included) has L - 1 predictions and makes ceil((L - 1) / T) samples; each of
    its tokens except the first is predicted once. Padding is the separator. Takes 8 bytes of memory a document, to find
    the document of a sample. Raises DataError for a split without any prediction.
    """

    def __init__(self, split: TokenSplit, seq_len: int) -> None:
        super().__init__(split, seq_len, padded=True)
        self._known_ends = np.empty(0, np.int64)
        if not len(self):
            raise DataError(
                f"{split.called} has {counted(split.n_tokens, 'token')} in "
                f"{counted(split.n_documents, 'document')}, nothing to predict; prepare more documents"
            )

    @property
    def _sample_ends(self) -> np.ndarray:
        if len(self._known_ends) != self.split.n_documents:
            self._known_ends = np.cumsum((self.split.document_lengths() - 1 + self.seq_len - 1) // self.seq_len)
        return self._known_ends

    def __len__(self) -> int:
        return int(ends[-1]) if len(ends := self._sample_ends) else 0

    def span(self, i: int) -> tuple[int, int]:
        """Return (first token, number of tokens) of sample i; fewer than seq_len + 1 tokens if the document ends."""
        assert 0 <= i < len(self), (i, len(self))
        ends = self._sample_ends
        document = int(np.searchsorted(ends, i, side="right"))
        piece = i - (int(ends[document - 1]) if document else 0)
        start = self.split.document_start(document) + piece * self.seq_len
        return start, min(self.seq_len + 1, self.split.document_start(document + 1) - start)

    def documents(self, i: int) -> list[int]:
        """Return the numbers of tokens of sample i's document and, if there is any, of its padding."""
        length = min(self.span(i)[1], self.seq_len)
        return [n for n in (length, self.seq_len - length) if n]

    def document_lengths(self) -> np.ndarray:
        whole, rest = np.divmod(self.split.document_lengths().astype(np.int64) - 1, self.seq_len)
        last = np.minimum(rest[rest > 0] + 1, self.seq_len)
        return _present(np.full(int(whole.sum()), self.seq_len), last, self.seq_len - last)


class PairSamples(SplitSamples):
    """The pairs of answers of a split, as many whole ones in each sample as fit; the rest is padding and masked.

    A pair is two documents, each a prompt with an answer and its separator; sample i has consecutive pairs. Padding is
    the separator. Raises DataError for a split without pairs, and for a pair that is longer than a sample.
    """

    def __init__(self, split: TokenSplit, seq_len: int) -> None:
        super().__init__(split, seq_len, padded=True)
        lengths = split.document_lengths().reshape(-1, 2).sum(1)
        if not len(lengths):
            raise DataError(f"{split.folder}: the {split.name} split has no pairs; prepare more records")
        longest = int(lengths.argmax())
        if lengths[longest] > seq_len + 1:
            n_long = int((lengths > seq_len + 1).sum())
            raise DataError(
                f"{split.folder}: pair {longest} of the {split.name} split has {lengths[longest]} tokens, and a "
                f"sequence has seq_len + 1 = {seq_len + 1}, too few for {n_long} of the {len(lengths)} pairs; set "
                f"batch.seq_len={lengths[longest] - 1} or more, or prepare the data without long pairs"
            )
        firsts, used = [0], 0
        for pair, length in enumerate(lengths.tolist()):
            if used + length > seq_len + 1:
                firsts.append(pair)
                used = 0
            used += length
        self._ends = np.array([*firsts[1:], len(lengths)])

    def __len__(self) -> int:
        return len(self._ends)

    def answers(self, i: int) -> range:
        """Return the documents of sample i, each an answer, the chosen one of each pair first."""
        assert 0 <= i < len(self), (i, len(self))
        return range(2 * int(self._ends[i - 1]) if i else 0, 2 * int(self._ends[i]))

    def span(self, i: int) -> tuple[int, int]:
        answers = self.answers(i)
        start = self.split.document_start(answers.start)
        return start, self.split.document_start(answers.stop) - start

    def read(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        tokens, mask = super().read(i)
        start, length = self.span(i)
        begins = self.split.document_starts(start + 1, length - 1)
        mask[begins] = False  # the first token of an answer's document follows another document
        return tokens, mask

    def documents(self, i: int) -> list[int]:
        """Return the numbers of tokens of sample i's documents and, if there is any, of its padding."""
        starts = [self.split.document_start(document) for document in self.answers(i)]
        start, length = self.span(i)
        ends = [*(begin - start for begin in starts), min(length, self.seq_len), self.seq_len]
        return [n for n in np.diff(ends).tolist() if n]

    def document_lengths(self) -> np.ndarray:
        lengths = self.split.document_lengths().astype(np.int64)
        used = np.add.reduceat(lengths, [0, *(2 * self._ends[:-1])])
        lengths[2 * self._ends - 1] -= used > self.seq_len  # the last token of a full sequence is only a target
        return _present(lengths, np.maximum(self.seq_len - used, 0))


def open_sources(config: RunConfig, name: str) -> list[SplitSamples]:
    """Return the samples of the split `name` (train, validation) of each source of a run, by its run file; they have
    the tokens of its longest sequences.

    Raises DataError with every problem at once: data that is missing, damaged or has token ids beyond the model's
    vocabulary, sources with different tokenizers, and splits with too few tokens.
    """
    sources = sources_of(config.data)
    problems: list[str] = []
    samples: dict[str, SplitSamples] = {}
    by_shards = config.data.order == "shards"
    manifests: dict[str, DataManifest] = {}
    for source in sources:
        called = name_of(source)
        try:
            split = open_split_of_run(source.path, name, config.data)
            manifests[called] = split.manifest
            _check_order(split, source.path, by_shards)
            split.manifest.check_vocabulary(config.spec().vocab_size)
            _check_pairs(split, config.preference.kind)
            samples[called] = samples_of(split, config.data, config.batch.schedule.longest.seq_len)
        except DataError as error:
            where = f"source {called!r}: " if len(sources) > 1 else ""
            problems += [f"{where}{problem}" for problem in error.problems]
    problems += _tokenizer_problems(manifests)
    if problems:
        raise DataError(*problems)
    return list(samples.values())


def samples_of(split: TokenSplit, data: DataSection, seq_len: int) -> SplitSamples:
    """Return the samples of a split, by the run file. Raises DataError for a split that has none."""
    if data.attention == "document" and not split.n_documents:
        raise DataError(
            f"{split.folder}: data.attention='document' needs to know where documents start, and the {split.name} "
            f"split has {split.n_tokens} tokens and no document in its index; prepare the data again, or take "
            f"data.attention='sequence'"
        )
    if split.manifest.pairs:
        if data.attention != "document":
            raise DataError(
                f"{split.folder} has pairs of answers, which are documents of one sequence, and here "
                f"data.attention={data.attention!r}; a run with [preference] has data.attention='document'"
            )
        return PairSamples(split, seq_len)
    if data.sequences == "documents":
        return DocumentSamples(split, seq_len)
    return PackedSamples(split, seq_len, mask_boundaries=data.mask_boundaries)


def _check_order(split: TokenSplit, path: str, by_shards: bool) -> None:
    """Raise DataError if a split cannot be read in the order of the run file."""
    if split.manifest.unfinished is not None and not by_shards:
        raise DataError(
            f"{path}: `data prepare` has published {counted(len(split.token_ends), 'shard')} of {split.name} and not "
            f"finished, and data.order='all' permutes all samples; set data.order='shards', or wait until it has"
        )
    if split.manifest.pairs and by_shards:
        raise DataError(f"{path} has pairs of answers, which data.order='shards' does not take; set data.order='all'")


def _check_pairs(split: TokenSplit, kind: str) -> None:
    """Raise DataError if a split has pairs and the run trains on the next token, or the other way round."""
    if split.manifest.pairs and kind == "none":
        raise DataError(
            f"{split.folder} has pairs of answers, and preference.kind='none' trains on the next token; set "
            f"preference.kind to 'dpo', 'ipo' or 'simpo', or prepare answers with --format chat"
        )
    if kind != "none" and not split.manifest.pairs:
        raise DataError(
            f"preference.kind={kind!r} needs pairs of answers, and {split.folder} has none; prepare records with "
            f"'chosen' and 'rejected' with --format preference"
        )


def _tokenizer_problems(manifests: dict[str, DataManifest]) -> Iterator[str]:
    """Yield the differences of tokenizers between the first source and others; a source given twice is named too."""
    for called, manifest in manifests.items():
        first_called, first = next(iter(manifests.items()))
        facts = {
            "the tokenizer": (manifest.tokenizer_sha256[:12], first.tokenizer_sha256[:12]),
            "the vocabulary": (manifest.vocab_size, first.vocab_size),
            "the separator": (manifest.separator, first.separator),
            "the type of ids": (manifest.dtype, first.dtype),
        }
        if differing := [f"{what} ({ours}, not {theirs})" for what, (ours, theirs) in facts.items() if ours != theirs]:
            yield (
                f"source {called!r} and source {first_called!r} differ in {', '.join(differing)}; a run has one "
                f"tokenizer: prepare {called!r} again with the tokenizer.json and the separator of {first_called!r}"
            )
    by_tokens = {manifest.fingerprint: called for called, manifest in manifests.items()}
    for called, manifest in manifests.items():
        if (other := by_tokens[manifest.fingerprint]) != called:
            yield f"sources {called!r} and {other!r} hold the same tokens; keep one, with the sum of the weights"


def _present(*lengths: np.ndarray) -> np.ndarray:
    whole = np.concatenate(lengths)
    return whole[whole > 0]


def packed_lengths(document_lengths: np.ndarray, seq_len: int) -> np.ndarray:
    """Return the lengths of the documents of all packed sequences, one sequence after another; int64.

    Documents are packed one after another and split every `seq_len` tokens; the incomplete sequence at the end is left
    out. Empty for too few tokens.
    """
    ends = np.cumsum(document_lengths, dtype=np.int64)
    n_tokens = int(ends[-1]) - 1 if len(ends) else 0
    cuts = np.arange(0, n_tokens // seq_len + 1, dtype=np.int64) * seq_len
    return np.diff(np.union1d(ends[ends < cuts[-1]], cuts))
