"""Proves that inspect says what is in a folder, decoded."""

from pathlib import Path

import pytest

from shardwright.data.inspect import SHOWN_TOKENS, inspect
from shardwright.data.shards import TokenSplit
from shardwright.errors import DataError


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
