"""Proves that the distinct numbers of an array are found as by sorting it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.cost.memo import CandidateColumn, numbered


@given(st.lists(st.integers(0, 40) | st.integers(0, 10**12)))
def test_the_distinct_ones_of_few_and_of_large_numbers(numbers: list[int]):
    values = np.array(numbers, dtype=np.int64)
    found, back = numbered(values)
    assert found.tolist() == sorted(set(numbers))
    assert found[back].tolist() == numbers


@pytest.mark.parametrize("numbers", [(1, 2, 6), (1, 2, 10**9)])
def test_places_in_a_column_and_of_a_number_that_it_does_not_have(numbers: tuple[int, ...]):
    column = CandidateColumn(numbers)
    assert column.places(np.array([*reversed(numbers), *numbers])).tolist() == [2, 1, 0, 0, 1, 2]
    with pytest.raises(AssertionError):
        column.places(np.array([1, 3]))
