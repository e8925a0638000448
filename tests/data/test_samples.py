"""Proves that samples predict every token once, and that masks cover exactly what must not count."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.data.samples import DocumentSamples, PackedSamples
from shardwright.data.shards import TokenSplit
from shardwright.system.errors import DataError

SEPARATOR = 0
PROMPT = 65_000  # tokens from this id on are of a prompt


class Row:
    """The part of TokenSplit that samples use, over an array."""

    called, first_only = TokenSplit.called, False

    def __init__(self, *documents: list[int], name: str = "train") -> None:
        self.name, self.separator_id, self.n_documents, self.mirrored = name, SEPARATOR, len(documents), False
        self._row = np.array([id for document in documents for id in [*document, SEPARATOR]], np.uint16)
        self._starts = np.cumsum([0] + [len(document) + 1 for document in documents])
        self.n_tokens = len(self._row)

    def tokens(self, start: int, length: int) -> np.ndarray:
        return self._row[start : start + length]

    def trained(self, start: int, length: int) -> np.ndarray:
        return self.tokens(start, length) < PROMPT

    def document_start(self, i: int) -> int:
        return int(self._starts[i])

    def document_lengths(self) -> np.ndarray:
        return np.diff(self._starts)


def row(*documents: list[int], name: str = "train") -> TokenSplit:
    return Row(*documents, name=name)  # type: ignore[return-value]


def test_packed_samples_share_one_token_with_their_neighbour() -> None:
    samples = PackedSamples(row([1, 2, 3], [4, 5]), seq_len=3)
    assert len(samples) == 2
    assert [samples.read(i)[0].tolist() for i in range(2)] == [[1, 2, 3, 0], [0, 4, 5, 0]]
    assert samples.read(0)[1].all()


def test_only_the_tokens_of_answers_are_predicted() -> None:
    """Tokens from 65_000 on are prompts; the answers are 1 2, 3 and 4 5 6."""
    split = row([65_000, 65_001, 1, 2], [65_002, 3], [65_003, 65_004, 4, 5, 6])
    packed = PackedSamples(split, seq_len=6)
    tokens, mask = packed.read(0)
    assert tokens.tolist() == [65_000, 65_001, 1, 2, 0, 65_002, 3]
    assert mask.tolist() == [False, True, True, True, False, True]
    tokens, mask = packed.read(1)
    assert tokens.tolist() == [3, 0, 65_003, 65_004, 4, 5, 6]
    assert mask.tolist() == [True, False, False, True, True, True]
    documents = DocumentSamples(split, seq_len=4)
    assert [documents.read(i)[1].tolist() for i in range(len(documents))] == [
        [False, True, True, True],
        [True, True, False, False],
        [False, True, True, True],
        [True, False, False, False],
    ]


def test_with_masked_boundaries_nothing_is_predicted_from_a_separator() -> None:
    samples = PackedSamples(row([1, 2, 3], [4, 5]), seq_len=3, mask_boundaries=True)
    assert [samples.read(i)[1].tolist() for i in range(2)] == [[True, True, True], [False, True, True]]


def test_document_samples_begin_with_a_document_and_are_padded() -> None:
    samples = DocumentSamples(row([1, 2, 3, 4], [], [5]), seq_len=3)
    assert len(samples) == 3
    tokens, masks = zip(*(samples.read(i) for i in range(3)), strict=True)
    assert [t.tolist() for t in tokens] == [[1, 2, 3, 4], [4, 0, 0, 0], [5, 0, 0, 0]]
    assert [m.tolist() for m in masks] == [[True] * 3, [True, False, False], [True, False, False]]


DOCUMENTS = st.lists(st.lists(st.integers(1, 60_000), max_size=12), min_size=1, max_size=8)


@given(DOCUMENTS, st.integers(1, 9))
def test_document_samples_predict_every_token_of_a_document_but_its_first(
    documents: list[list[int]], seq_len: int
) -> None:
    expected = [id for document in documents for id in [*document, SEPARATOR][1:]]
    split = row(*documents)
    if not expected:
        with pytest.raises(DataError, match="nothing to predict"):
            DocumentSamples(split, seq_len)
        return
    samples = DocumentSamples(split, seq_len)
    predicted: list[int] = []
    for i in range(len(samples)):
        tokens, mask = samples.read(i)
        assert tokens.shape == (seq_len + 1,)
        assert mask.any()
        predicted += tokens[1:][mask].tolist()
    assert predicted == expected


@given(DOCUMENTS, st.integers(1, 9))
def test_packed_samples_predict_every_token_but_the_first_and_a_rest(documents: list[list[int]], seq_len: int) -> None:
    split = row(*documents)
    if split.n_tokens < seq_len + 1:
        with pytest.raises(DataError, match="fewer than seq_len"):
            PackedSamples(split, seq_len)
        return
    samples = PackedSamples(split, seq_len)
    predicted = [id for i in range(len(samples)) for id in samples.read(i)[0][1:].tolist()]
    assert predicted == split.tokens(1, len(predicted)).tolist()
    assert split.n_tokens - 1 - len(predicted) < seq_len


def test_both_read_real_documents_across_shards(train: TokenSplit) -> None:
    whole = train.tokens(0, train.n_tokens).astype(np.int64)
    packed = PackedSamples(train, 1000)
    assert np.array_equal(
        np.concatenate([packed.read(i)[0][:-1] for i in range(len(packed))]), whole[: len(packed) * 1000]
    )
    samples = DocumentSamples(train, 1000)
    n_targets = sum(int(samples.read(i)[1].sum()) for i in range(len(samples)))
    assert n_targets == train.n_tokens - train.n_documents


def test_a_split_that_is_too_short_says_by_how_much() -> None:
    with pytest.raises(DataError) as caught:
        PackedSamples(row([1] * 811), seq_len=1024)
    assert str(caught.value) == (
        "the train split has 812 tokens, fewer than seq_len + 1 = 1025; use seq_len <= 811, or prepare more text"
    )
    with pytest.raises(DataError, match=r"0 tokens.*prepare with a larger --validation"):
        PackedSamples(row(name="validation"), seq_len=4)
    with pytest.raises(DataError, match="nothing to predict"):
        DocumentSamples(row(), seq_len=4)
    with pytest.raises(DataError, match="seq_len=0 must be at least 1"):
        PackedSamples(row([1]), seq_len=0)
