"""Proves that log-probabilities that are not finite never agree, and that a tokenizer that fails is an error."""

import math
from typing import Any

import pytest
import torch

import shardwright
from shardwright.generation.agreement import PathAgreement, PathDifference, largest_of, rounding_bound
from shardwright.generation.source import Text
from shardwright.system.errors import DataError
from tests.mutation import Mutation, mutated


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_that_are_not_finite_do_not_agree(value: float):
    largest = largest_of([0.1, value, 0.2])
    assert not PathAgreement((PathDifference("score", largest, largest, 0),), 3, "float32", 1e-4).holds
    bound = rounding_bound(shardwright.preset("debug"), torch.float32, largest_of([1.0, value]))
    assert not PathAgreement((PathDifference("score", 0.0, 0.0, 3),), 3, "float32", bound).holds


def test_a_largest_difference_that_drops_nan_would_be_seen():
    with mutated(Mutation("shardwright.generation.agreement:largest_of", "any(map(math.isnan, values))", "False")):
        assert largest_of([0.1, math.nan]) == 0.1


class PanickingTokenizer:
    """Fails as the library does, whose panics are no Exception."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        raise BaseException("range end index 9 out of range")


def test_ids_that_the_tokenizer_cannot_decode_are_an_error():
    tokenizer: Any = PanickingTokenizer()
    with pytest.raises(DataError, match="the rules of the tokenizer fail on a text: range end index 9 out of range"):
        Text(tokenizer, frozenset()).decode([1])
