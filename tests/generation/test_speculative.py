"""Proves that a draft model changes no greedy token and no distribution."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from shardwright.generation.continuous import Batcher, Running
from shardwright.generation.engine import LayoutEngine, WholeEngine
from shardwright.generation.sampling import PROPOSED, Sampling, draw
from shardwright.generation.speculative import Proposals, Speculative
from shardwright.layout import Layout
from shardwright.parallel.apply import apply
from tests.distributed import run_ranks
from tests.generation.models import (
    DRAWN,
    GREEDY,
    GROUPED,
    N_TOKENS,
    PROMPTS,
    SEED,
    SPECS,
    merged,
    whole_model,
    without_cache,
)
from tests.marks import prove

DRAFT = replace(GROUPED, n_layers=1)


def speculative(spec, draft, sampling, n_proposed: int = 3, n_slots: int = 2) -> Speculative:
    batcher = Batcher(WholeEngine(whole_model(spec), n_slots, spec.max_seq_len), sampling, spec.max_seq_len)
    batcher.decode = Speculative(batcher, WholeEngine(draft, n_slots, spec.max_seq_len), n_proposed, spec.max_seq_len)
    return batcher.decode


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_draft_changes_no_greedy_token(spec):
    expected = without_cache(whole_model(spec), PROMPTS, GREEDY)
    poor = speculative(spec, whole_model(DRAFT), GREEDY)
    assert poor.batcher.complete(PROMPTS, N_TOKENS) == expected
    same = speculative(spec, whole_model(spec), GREEDY)
    assert same.batcher.complete(PROMPTS, N_TOKENS) == expected
    assert poor.accepted < poor.proposed / 2
    assert same.accepted == same.proposed > 0


def drafted_on_layout(layout: Layout, sampling: Sampling) -> dict[int, list[int]]:
    device = torch.device("cpu")
    model = apply(GROUPED, layout, device, seed=SEED, param_dtype=torch.float64, compute_dtype=torch.float64)
    batcher = Batcher(LayoutEngine(model, device, 2, GROUPED.max_seq_len), sampling, GROUPED.max_seq_len)
    batcher.decode = Speculative(batcher, WholeEngine(whole_model(DRAFT), 2, GROUPED.max_seq_len), 3, 48)
    mine = layout.data_rank(dist.get_rank())
    return batcher.complete({i: ids for i, ids in PROMPTS.items() if i % layout.data_ranks == mine}, N_TOKENS)


@prove
@pytest.mark.parametrize(
    "layout", [Layout(tp=2), Layout(pp=2), Layout(dp_replicate=2), Layout(tp=2, pp=2), Layout(cp=2)], ids=str
)
def test_a_draft_gives_the_same_tokens_on_every_layout(layout):
    for sampling in (GREEDY, DRAWN):
        expected = speculative(GROUPED, whole_model(DRAFT), sampling).batcher.complete(PROMPTS, N_TOKENS)
        assert merged(run_ranks(drafted_on_layout, layout.world_size, layout, sampling)) == expected


def test_a_draft_does_not_change_the_distribution():
    """The frequencies of 10,000 pairs of tokens, of which the first is proposed by a draft with another distribution,
    are those of the target: chi-squared over the 36 pairs has 35 degrees of freedom, and is above 80 in 1 of 40,000
    cases. A rejection that draws from p in the place of max(p - q, 0) gives a value in the thousands."""
    n, generator = 10_000, torch.Generator().manual_seed(0)
    logits_2V, drafted_V = torch.randn((3, 6), generator=generator, dtype=torch.float64).split((2, 1))
    p_2V, q_V = logits_2V.softmax(-1), drafted_V[0].softmax(-1)
    sampling = Sampling(temperature=1.0, seed=1)
    checker = speculative(GROUPED, whole_model(DRAFT), sampling)
    proposed_N = draw(q_V.expand(n, -1), sampling.uniform(range(n), [1] * n)[:, PROPOSED])
    later_N = sampling.choose(logits_2V[1:].expand(n, -1), range(n), [2] * n)
    counts = torch.zeros(6, 6, dtype=torch.float64)
    for index, (token, later) in enumerate(zip(proposed_N.tolist(), later_N.tolist(), strict=True)):
        kept = checker.check(Running(index, [0], 1, 8, 0), Proposals(1, [token], [q_V]), logits_2V)
        first, second = [*kept, later][:2]  # after a rejection a later step draws the second token from p
        counts[first, second] += 1
    expected = p_2V[0][:, None] * p_2V[1] * n
    assert float(((counts - expected) ** 2 / expected).sum()) < 80
