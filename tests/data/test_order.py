"""Proves that the order of samples is a permutation for any size and key, another for each epoch and seed."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.data.order import Permutation, SampleOrder, keyed_fractions


def test_an_epoch_is_every_sample_once() -> None:
    assert sorted(SampleOrder(seed=1, n=10)(np.arange(10))) == list(range(10))


@given(st.integers(1, 5000), st.integers(-(2**70), 2**70), st.integers(0, 2**40))
def test_it_is_a_permutation_for_any_size_and_key(n: int, seed: int, epoch: int) -> None:
    assert np.array_equal(np.sort(Permutation(n, (seed, epoch))(np.arange(n))), np.arange(n))


@given(st.integers(1, 300), st.integers(0, 1000), st.integers(0, 2000), st.integers(1, 50))
def test_any_slice_of_the_order_is_the_slice_of_the_whole(n: int, seed: int, start: int, length: int) -> None:
    order = SampleOrder(seed, n)
    whole = order(np.arange(start + length))
    assert np.array_equal(order(np.arange(start, start + length)), whole[start:])
    assert np.array_equal(order(np.array([[start]])), whole[start : start + 1, None])


def test_epochs_and_seeds_differ() -> None:
    n = 1000
    orders = [SampleOrder(seed, n)(np.arange(epoch * n, (epoch + 1) * n)) for seed in range(4) for epoch in range(4)]
    for one, other in itertools.combinations(orders, 2):
        # Two unrelated permutations agree in one place on average.
        assert (one == other).sum() < 10
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.15
    assert all(abs(np.corrcoef(order, np.arange(n))[0, 1]) < 0.15 for order in orders)


@pytest.mark.parametrize("n", [3, 4])
def test_every_permutation_of_a_few_samples_is_about_equally_likely(n: int) -> None:
    draws = 2400
    counts = Counter(tuple(Permutation(n, (key,))(np.arange(n))) for key in range(draws))
    expected = draws / len(list(itertools.permutations(range(n))))
    chi_squared = sum((count - expected) ** 2 / expected for count in counts.values())
    # 99.9 % of fair draws stay below 20.5 (5 degrees of freedom) and 49.7 (23).
    assert len(counts) == len(list(itertools.permutations(range(n))))
    assert chi_squared < {3: 20.5, 4: 49.7}[n]


def test_each_place_of_an_order_is_uniform() -> None:
    n, draws = 16, 3200
    places = np.stack([Permutation(n, (key,))(np.arange(n)) for key in range(draws)])
    for i in range(n):
        counts = np.bincount(places[:, i], minlength=n)
        # 15 degrees of freedom; 99.99 % of fair draws stay below 44.3.
        assert ((counts - draws / n) ** 2 / (draws / n)).sum() < 44.3


@pytest.mark.parametrize("n", [10**9, 10**12, 2**62])
def test_a_trillion_samples_cost_nothing(n: int) -> None:
    permutation = Permutation(n, (7, 0))
    indices = np.unique(np.random.default_rng(0).integers(0, n, 50_000))
    indices = np.unique(np.concatenate([indices, np.arange(50_000), n - 1 - np.arange(50_000)]))
    places = permutation(indices)
    assert len(np.unique(places)) == len(indices)
    assert places.min() >= 0
    assert places.max() < n
    assert abs(places.mean() / n - 0.5) < 0.01


def test_keyed_fractions_are_uniform_and_keyed() -> None:
    one, other = (keyed_fractions((seed,), np.arange(20_000)) for seed in (0, 1))
    assert abs(one.mean() - 0.5) < 0.01
    assert abs((one < 0.01).mean() - 0.01) < 0.004
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.03
