"""Proves that the log-probabilities of given tokens and of generated tokens are those of the full forward pass, on
every layout, also where the sequences of a pass are together longer than the model's longest sequence."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from shardwright.generation import score
from shardwright.generation.continuous import Batcher
from shardwright.generation.engine import GenerationEngine, LayoutEngine, WholeEngine
from shardwright.generation.score import SequenceScore, scored
from shardwright.layout.layout import Layout
from shardwright.model.spec import ModelSpec
from shardwright.parallel.apply import apply
from tests.distributed import run_ranks
from tests.generation.models import DRAWN, EXPERTS, GROUPED, LATENT, LEARNED, PROMPTS, SEED, whole_model
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
        values = log_p_WV.gather(1, targets[:, None])[:, 0].tolist()
        found[index] = SequenceScore(tuple(values), bool((log_p_WV.argmax(-1) == targets).all()))
    return found


Generated = dict[int, tuple[list[int], list[float]]]
"""Drawn tokens of prompts, and their log-probabilities."""


def generated(engine: GenerationEngine, prompts: dict[int, list[int]]) -> Generated:
    """Four tokens of each prompt, one by one with the cache."""
    batcher = Batcher(engine, DRAWN, engine.cache.n_positions, log_probs={})
    tokens = batcher.complete(prompts, 4)
    assert batcher.log_probs is not None
    return {index: (new, batcher.log_probs[index]) for index, new in tokens.items()}


@torch.no_grad()
def error_of(made: Generated, spec: ModelSpec, dtype: torch.dtype = torch.float64) -> float:
    """The largest difference, in nats, of the log-probabilities of generation and of `scored` from those of the
    trainer's forward pass."""
    model, worst_error = whole_model(spec, dtype), 0.0
    sequences = {index: (PROMPTS[index] + new, len(new)) for index, (new, _) in made.items()}
    scores = scored(WholeEngine(whole_model(spec, dtype), 4, spec.max_seq_len), sequences)
    for index, (new, values) in made.items():
        logits_WV = model(torch.tensor([sequences[index][0][:-1]]))[0, -len(new) :]
        right_W = logits_WV.double().log_softmax(-1).gather(1, torch.tensor(new)[:, None])[:, 0]
        for found in (values, scores[index].log_probs):
            worst_error = max(worst_error, float((torch.tensor(found, dtype=torch.float64) - right_W).abs().max()))
    return worst_error


def on_layout(layout: Layout, spec: ModelSpec, n_slots: int) -> tuple[dict[int, SequenceScore], Generated]:
    device = torch.device("cpu")
    model = apply(spec, layout, device, seed=SEED, param_dtype=torch.float64, compute_dtype=torch.float64)
    mine = layout.data_rank(dist.get_rank())
    sequences = {index: each for index, each in SEQUENCES.items() if index % layout.data_ranks == mine}
    engine = LayoutEngine(model, device, n_slots, spec.max_seq_len)
    prompts = {index: PROMPTS[index] for index in sequences if len(PROMPTS[index]) < spec.max_seq_len}
    return scored(engine, sequences), generated(engine, prompts)


def worst(found: dict[int, SequenceScore], right: dict[int, SequenceScore]) -> float:
    """The largest error of a log-likelihood; infinite where a greedy answer differs."""
    assert found.keys() == right.keys()
    alike = all(found[index].greedy == right[index].greedy for index in right)
    errors = [
        max(abs(value - other) for value, other in zip(found[index].log_probs, right[index].log_probs, strict=True))
        for index in right
    ]
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
    made: Generated = {}
    for of_rank, new_of_rank in run_ranks(on_layout, layout.world_size, layout, spec, 4):
        assert all(found.setdefault(index, each) == each for index, each in of_rank.items())
        assert all(made.setdefault(index, each) == each for index, each in new_of_rank.items())
    assert worst(found, right) < 1e-12
    assert len(made) == 4
    assert error_of(made, spec) < 1e-12


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 2e-5)], ids=str)
@pytest.mark.parametrize("spec", [GROUPED, LATENT, EXPERTS], ids=["grouped", "latent", "experts"])
def test_the_trainers_forward_pass_score_and_generation_have_the_same_log_probabilities(
    spec: ModelSpec, dtype: torch.dtype, bound: float
):
    made = generated(WholeEngine(whole_model(spec, dtype), 3, spec.max_seq_len), PROMPTS)
    assert len(made) == len(PROMPTS)
    assert error_of(made, spec, dtype) < bound


@pytest.mark.parametrize(
    ("function", "before", "after"),
    [
        ("generation.score:scored", "tokens[-n:]", "tokens[-n - 1 : -1]"),
        ("parallel.loss:log_probabilities", "part_WV.double().log_softmax(-1)", "part_WV.double()"),
    ],
    ids=["the token before", "not normalised"],
)
def test_a_wrong_score_would_be_seen(function: str, before: str, after: str):
    spec = short(GROUPED)
    with mutated(Mutation(f"shardwright.{function}", before, after)):
        found = score.scored(WholeEngine(whole_model(spec), 4, spec.max_seq_len), SEQUENCES)
    assert worst(found, expected(spec)) > 0.01


@pytest.mark.parametrize(
    ("function", "before", "after"),
    [
        ("generation.continuous:Batcher.next_tokens", "as_bits(log_probabilities(logits, tokens_N))",
         "as_bits(log_probabilities(logits, tokens_N.flip(0)))"),
        ("parallel.loss:log_probabilities", "part_WV.double().log_softmax(-1)",
         "part_WV.double().div(0.8).log_softmax(-1)"),
    ],
    ids=["another sequence's token", "with a temperature"],
)  # fmt: skip
def test_a_wrong_log_probability_of_generation_would_be_seen(function: str, before: str, after: str):
    with mutated(Mutation(f"shardwright.{function}", before, after)):
        made = generated(WholeEngine(whole_model(GROUPED), 3, GROUPED.max_seq_len), PROMPTS)
    assert error_of(made, GROUPED) > 0.01
