"""Proves that a draft model changes no greedy token and no distribution."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from shardwright.generation.batch import RaggedBatch, SequenceSegment
from shardwright.generation.continuous import Batcher, RunningSequence
from shardwright.generation.engine import LayoutEngine, WholeEngine
from shardwright.generation.sampling import PROPOSED, Sampling, draw
from shardwright.generation.speculative import Proposals, Speculative
from shardwright.layout.layout import Layout
from shardwright.model.spec import ModelSpec
from shardwright.parallel.apply import apply
from tests.distributed import run_ranks
from tests.generation.models import (
    DRAWN,
    GREEDY,
    GROUPED,
    LINEAR,
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
    batcher = Batcher(WholeEngine(whole_model(spec), n_slots, spec.max_seq_len, n_proposed), sampling, spec.max_seq_len)
    batcher.decode = Speculative(
        batcher, WholeEngine(draft, n_slots, spec.max_seq_len, n_proposed), n_proposed, spec.max_seq_len
    )
    return batcher.decode


@pytest.mark.parametrize("spec", SPECS)
def test_a_draft_changes_no_greedy_token(spec: str):
    a_draft_changes_no_greedy_token(spec)


def a_draft_changes_no_greedy_token(name: str) -> None:
    spec = SPECS[name]
    expected = without_cache(whole_model(spec), PROMPTS, GREEDY)
    poor = speculative(spec, whole_model(DRAFT), GREEDY)
    assert poor.batcher.complete(PROMPTS, N_TOKENS) == expected
    same = speculative(spec, whole_model(spec), GREEDY)
    assert same.batcher.complete(PROMPTS, N_TOKENS) == expected
    assert poor.accepted < poor.proposed / 2
    assert same.accepted == same.proposed > 0


@torch.no_grad()
def test_states_go_back_to_any_token_that_may_be_replaced():
    logits_after_replaced_tokens_are_those_without_a_cache()


@torch.no_grad()
def logits_after_replaced_tokens_are_those_without_a_cache() -> None:
    """Passes of a sequence, each after 0 to 3 tokens of the pass before were replaced; two sequences in one row."""
    engine = WholeEngine(whole_model(LINEAR), 1, LINEAR.max_seq_len, n_ahead=3)
    for seed in (3, 5):
        tokens: list[int] = []
        for n_kept, n_new in ((0, 2), (2, 4), (3, 4), (7, 1), (8, 4), (10, 4), (11, 9), (17, 1)):
            tokens = tokens[:n_kept] + [(seed * n_kept + i * i) % 31 for i in range(n_new)]
            segment = SequenceSegment(0, n_kept, n_new)
            (logits_TV,) = engine.run([RaggedBatch([segment], tokens[n_kept:], [n_new])])
            expected_TV = whole_model(LINEAR)(torch.tensor([tokens]))[0, n_kept:]
            torch.testing.assert_close(logits_TV, expected_TV, rtol=1e-12, atol=1e-12)


@torch.no_grad()
def counts_without_cache(n_proposed: int) -> tuple[int, int]:
    """Proposals, and how many are accepted, by full forward passes; greedy."""
    target, draft = whole_model(GROUPED), whole_model(DRAFT)
    proposed = accepted = 0
    for prompt in PROMPTS.values():
        tokens, stop = list(prompt), len(prompt) + N_TOKENS
        tokens.append(int(target(torch.tensor([tokens]))[0, -1].argmax()))  # the prefill's
        while len(tokens) < stop:
            tried = list(tokens)
            for _ in range(min(n_proposed, stop - len(tokens) - 1)):
                tried.append(int(draft(torch.tensor([tried]))[0, -1].argmax()))
            best = target(torch.tensor([tried]))[0].argmax(-1).tolist()
            n, proposed = len(tokens), proposed + len(tried) - len(tokens)
            while len(tokens) < len(tried) and best[len(tokens) - 1] == tried[len(tokens)]:
                tokens.append(tried[len(tokens)])
            accepted += len(tokens) - n
            tokens.append(best[len(tokens) - 1])
    return proposed, accepted


def test_the_draft_proposes_what_it_would_without_a_cache():
    found = speculative(GROUPED, whole_model(DRAFT), GREEDY)
    found.batcher.complete(PROMPTS, N_TOKENS)
    assert (found.proposed, found.accepted) == counts_without_cache(3)
    assert found.accepted > 0


def drafted_on_layout(layout: Layout, sampling: Sampling, spec: ModelSpec = GROUPED) -> dict[int, list[int]]:
    device = torch.device("cpu")
    model = apply(spec, layout, device, seed=SEED, param_dtype=torch.float64, compute_dtype=torch.float64)
    batcher = Batcher(LayoutEngine(model, device, 2, GROUPED.max_seq_len, 3), sampling, GROUPED.max_seq_len)
    batcher.decode = Speculative(batcher, WholeEngine(whole_model(DRAFT), 2, GROUPED.max_seq_len, 3), 3, 48)
    mine = layout.data_rank(dist.get_rank())
    return batcher.complete({i: ids for i, ids in PROMPTS.items() if i % layout.data_ranks == mine}, N_TOKENS)


@prove
@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(cp=2)], ids=str)
def test_a_draft_of_linear_layers_gives_the_same_tokens_on_a_layout(layout):
    expected = speculative(LINEAR, whole_model(DRAFT), GREEDY).batcher.complete(PROMPTS, N_TOKENS)
    assert merged(run_ranks(drafted_on_layout, layout.world_size, layout, GREEDY, LINEAR)) == expected


@prove
@pytest.mark.parametrize(
    "layout", [Layout(tp=2), Layout(pp=2), Layout(dp_replicate=2), Layout(tp=2, pp=2), Layout(cp=2)], ids=str
)
def test_a_draft_gives_the_same_tokens_on_every_layout(layout):
    for sampling in (GREEDY, DRAWN):
        expected = speculative(GROUPED, whole_model(DRAFT), sampling).batcher.complete(PROMPTS, N_TOKENS)
        assert merged(run_ranks(drafted_on_layout, layout.world_size, layout, sampling)) == expected


@prove
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
        kept = checker.check(RunningSequence(index, [0], 1, 8, 0), Proposals(1, [token], [q_V]), logits_2V)
        first, second = [*kept, later][:2]  # after a rejection a later step draws the second token from p
        counts[first, second] += 1
    expected = p_2V[0][:, None] * p_2V[1] * n
    assert float(((counts - expected) ** 2 / expected).sum()) < 80
