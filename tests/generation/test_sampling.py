"""Proves that tokens are drawn from the distribution that is asked for, and that a draw depends on the seed, the prompt
and the position alone."""

import pytest
import torch

from shardwright.generation.sampling import Sampling, draw

P_V = torch.tensor([0.15, 0.5, 0.05, 0.3], dtype=torch.float64)


def kept(**how: float) -> list[float]:
    found = Sampling(**({"temperature": 1.0} | how)).probabilities(P_V.log()[None])  # type: ignore[arg-type]
    return found[0].tolist()


def test_top_p_keeps_the_most_probable_tokens_that_reach_it():
    assert kept(top_p=0.6) == pytest.approx([0, 0.625, 0, 0.375])
    assert kept(top_p=0.4) == pytest.approx([0, 1, 0, 0])
    assert kept(top_p=1.0) == pytest.approx(P_V.tolist())


def test_top_k_and_temperature_and_greedy():
    assert kept(top_k=2) == pytest.approx([0, 0.625, 0, 0.375])
    assert kept(temperature=0.5) == pytest.approx((P_V**2 / (P_V**2).sum()).tolist())
    assert Sampling().probabilities(P_V[None]).tolist() == [[0, 1, 0, 0]]


def test_draws_have_the_frequencies_of_the_distribution():
    """Chi-squared with 3 degrees of freedom is above 25 in 2 of 100,000 cases."""
    n = 20_000
    tokens_N = Sampling(temperature=1.0).choose(P_V.log().expand(n, -1), range(n), [5] * n)
    counts_V = tokens_N.bincount(minlength=4).double()
    assert float(((counts_V - n * P_V) ** 2 / (n * P_V)).sum()) < 25


def test_a_token_of_probability_0_is_never_drawn():
    p_NV = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]], dtype=torch.float64).expand(3, -1)
    assert draw(p_NV, torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)).tolist() == [1, 3, 3]


def test_a_draw_depends_on_seed_prompt_and_position_alone():
    def first(seed: int, prompt: int, position: int) -> float:
        return float(Sampling(seed=seed).uniform([prompt], [position])[0, 0])

    together = Sampling(seed=4).uniform([0, 1, 1], [7, 7, 8])[:, 0].tolist()
    assert together == [first(4, 0, 7), first(4, 1, 7), first(4, 1, 8)]
    assert len({*together, first(5, 0, 7)}) == 4
