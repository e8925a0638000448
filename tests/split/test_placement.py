"""Proves that experts are placed by their load: the busiest rank gets less, and few experts move."""

import random
from pathlib import Path

import pytest

from shardwright.split.placement import LEAST_GAIN, _settled, busiest, home, place


def test_a_busy_rank_gives_an_expert_for_a_less_busy_one_and_an_even_load_moves_nothing():
    assert place([9, 7, 1, 3], home(4), 2, 4) in ((2, 1, 0, 3), (0, 2, 1, 3), (0, 3, 2, 1), (3, 1, 2, 0))
    assert busiest([9, 7, 1, 3], place([9, 7, 1, 3], home(4), 2, 4), 2) == 1
    assert place([5, 5, 5, 5], home(4), 2, 4) == home(4)
    assert place([0, 0, 0, 0], home(4), 2, 4) == home(4)
    assert place([1000, 1001, 1000, 999], home(4), 2, 4) == home(4), "under the least gain"


def test_the_page_of_experts_has_the_least_gain_of_a_swap():
    page = (Path(__file__).parents[2] / "docs/experts.md").read_text()
    assert f"lowers that load by {100 * LEAST_GAIN:g} % of the mean load of a rank" in page


@pytest.mark.parametrize("n_ranks", [2, 4, 8])
def test_random_loads_are_nearly_even_after_few_moves(n_ranks: int):
    rng = random.Random(n_ranks)
    for _ in range(10):
        loads = [rng.expovariate(1.0) for _ in range(64)]
        order = place(loads, home(64), n_ranks, 64)
        assert sorted(order) == list(range(64))
        before, after = busiest(loads, home(64), n_ranks), busiest(loads, order, n_ranks)
        assert after <= before
        assert after < 1 + 2 * LEAST_GAIN, (before, after)
        assert place(loads, order, n_ranks, 64) == order, "a second time nothing moves"


def test_experts_that_stay_on_their_rank_keep_their_positions():
    assert _settled(home(4), (1, 2, 0, 3), 2) == (2, 1, 0, 3)
    rng = random.Random(1)
    loads = [rng.expovariate(1.0) for _ in range(32)]
    order = place(loads, home(32), 4, 32)
    assert order != home(32)
    for position, expert in enumerate(order):
        if position // 8 == expert // 8:
            assert position == expert


def test_with_node_limited_routing_experts_stay_in_their_group():
    rng = random.Random(2)
    loads = [rng.expovariate(1.0) for _ in range(32)]
    order = place(loads, home(32), 8, 16)
    assert order != home(32)
    assert all(position // 16 == expert // 16 for position, expert in enumerate(order))
