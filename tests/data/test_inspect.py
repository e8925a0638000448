"""Proves that inspect says what is in a folder, decoded."""

from itertools import pairwise
from pathlib import Path

import pytest

from shardwright.data.inspect import SHOWN_TOKENS, inspect
from shardwright.data.shards import TokenSplit
from shardwright.system.errors import DataError


def test_the_first_documents_are_decoded(prepared: Path, corpus: Path) -> None:
    (document,) = inspect(prepared, n=1)["documents"]
    assert (corpus / "__init__.py").read_text().startswith(document["text"])
    assert document["shortened"] == (document["tokens"] > SHOWN_TOKENS)


def test_totals_and_lengths_are_those_of_the_split(prepared: Path, train: TokenSplit) -> None:
    answer = inspect(prepared, n=0)
    assert answer["splits"]["train"]["tokens"] == train.n_tokens
    assert answer["document_tokens"]["longest"] == train.document_lengths().max()
    assert answer["tokenizer"]["vocab_size"] == 512
    assert answer["documents"] == []


def test_a_negative_number_of_documents_is_an_error(prepared: Path) -> None:
    with pytest.raises(DataError, match="documents=-1 must be 0 or more"):
        inspect(prepared, n=-1)


def test_packed_sequences_tell_the_scores_within_documents_and_the_balance(prepared: Path, train: TokenSplit) -> None:
    seq_len = 4096
    packing = inspect(prepared, n=0, seq_len=seq_len)["packing"]
    n = (train.n_tokens - 1) // seq_len
    # What a reader would count: every document, cut where sequences end.
    ends = {min(int(end), n * seq_len) for end in train.document_lengths().cumsum()} | {
        i * seq_len for i in range(n + 1)
    }
    lengths = [b - a for a, b in pairwise(sorted(ends))]
    assert packing["sequences"] == n
    assert packing["attended_tokens"] == sum(length**2 for length in lengths) / (n * seq_len)
    scores = sum(length * (length + 1) // 2 for length in lengths)
    assert packing["scores_share"] == pytest.approx(scores / (n * seq_len * (seq_len + 1) / 2))
    assert [ring["cp"] for ring in packing["rings"]] == [2, 4, 8]
    for ring in packing["rings"]:
        assert ring["dealt"]["worst"] < 1.1
        assert ring["dealt"]["sum"] < ring["zigzag"]["sum"]


def test_more_tokens_than_there_are_cannot_be_packed(prepared: Path, train: TokenSplit) -> None:
    with pytest.raises(DataError, match="fewer than seq_len"):
        inspect(prepared, seq_len=train.n_tokens)
