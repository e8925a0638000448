"""Proves that the log-likelihood of given tokens is that of the full forward pass, on every layout, also where the
sequences of a pass are together longer than the model's longest sequence."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from shardwright.generation import score
from shardwright.generation.engine import LayoutEngine, WholeEngine
from shardwright.generation.score import SequenceScore, scored
from shardwright.layout.layout import Layout
from shardwright.model.spec import ModelSpec
from shardwright.parallel.apply import apply
from tests.distributed import run_ranks
from tests.generation.models import EXPERTS, GROUPED, LATENT, LEARNED, PROMPTS, SEED, whole_model
from tests.marks import rest_prove
from tests.mutation import Mutation, mutated

SEQUENCES = {index: ([*ids, *ids[:3], 5, 30][:12], 1 + index % 3) for index, ids in PROMPTS.items()}
"""Of 3 to 12 tokens, together more than `max_seq_len` = 12; the last one to three are scored."""


def short(spec: ModelSpec) -> ModelSpec:
    return replace(spec, max_seq_len=12)


@torch.no_grad()
def expected(spec: ModelSpec) -> dict[int, SequenceScore]:
    """Each sequence alone, without a cache."""
    model, found = whole_model(spec), {}
    for index, (ids, n) in SEQUENCES.items():
        log_p_WV = model(torch.tensor([ids[:-1]]))[0, -n:].log_softmax(-1)
        targets = torch.tensor(ids[-n:])
        value = float(log_p_WV.gather(1, targets[:, None]).sum())
        found[index] = SequenceScore(value, bool((log_p_WV.argmax(-1) == targets).all()))
    return found


def on_layout(layout: Layout, spec: ModelSpec, n_slots: int) -> dict[int, SequenceScore]:
    device = torch.device("cpu")
    model = apply(spec, layout, device, seed=SEED, param_dtype=torch.float64, compute_dtype=torch.float64)
    mine = layout.data_rank(dist.get_rank())
    sequences = {index: each for index, each in SEQUENCES.items() if index % layout.data_ranks == mine}
    return scored(LayoutEngine(model, device, n_slots, spec.max_seq_len), sequences)


def worst(found: dict[int, SequenceScore], right: dict[int, SequenceScore]) -> float:
    """The largest error of a log-likelihood; infinite where a greedy answer differs."""
    assert found.keys() == right.keys()
    alike = all(found[index].greedy == right[index].greedy for index in right)
    errors = [abs(found[index].log_likelihood - right[index].log_likelihood) for index in right]
    return max(errors) if alike else float("inf")


CASES = [
    (Layout(tp=2, sequence_parallel=False), GROUPED),
    (Layout(pp=2), LEARNED),
    (Layout(cp=2), GROUPED),
    (Layout(tp=2, ep=2, sequence_parallel=True), EXPERTS),
    (Layout(dp_replicate=2, tp=2, sequence_parallel=False), GROUPED),
    (Layout(pp=2, cp=2), LATENT),
]


@pytest.mark.parametrize("n_slots", [1, 4])
@pytest.mark.parametrize("spec", [GROUPED, LEARNED, LATENT, EXPERTS], ids=["grouped", "learned", "latent", "experts"])
def test_scores_are_those_of_each_sequence_alone(spec: ModelSpec, n_slots: int):
    spec = short(spec)
    found = scored(WholeEngine(whole_model(spec), n_slots, spec.max_seq_len), SEQUENCES)
    assert worst(found, expected(spec)) < 1e-12


@pytest.mark.parametrize(("layout", "spec"), rest_prove(CASES, *CASES[:1]), ids=str)
def test_scores_do_not_depend_on_the_layout(layout: Layout, spec: ModelSpec):
    spec = short(spec)
    right = expected(spec)
    found: dict[int, SequenceScore] = {}
    for of_rank in run_ranks(on_layout, layout.world_size, layout, spec, 4):
        assert all(found.setdefault(index, each) == each for index, each in of_rank.items())
    assert worst(found, right) < 1e-12


@pytest.mark.parametrize(
    ("function", "before", "after"),
    [
        ("scored", "tokens[-n:]", "tokens[-n - 1 : -1]"),
        ("_rows", "logits_WV.double().log_softmax(-1)", "logits_WV.double()"),
    ],
    ids=["the token before", "not normalised"],
)
def test_a_wrong_score_would_be_seen(function: str, before: str, after: str):
    spec = short(GROUPED)
    with mutated(Mutation(f"shardwright.generation.score:{function}", before, after)):
        found = score.scored(WholeEngine(whole_model(spec), 4, spec.max_seq_len), SEQUENCES)
    assert worst(found, expected(spec)) > 0.01
