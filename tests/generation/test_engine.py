"""Proves that generation with a cache gives the tokens of the full forward pass without one, on every layout."""

import ctypes
import resource
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from shardwright.generation import cache
from shardwright.generation.batch import RaggedBatch, SequenceSegment
from shardwright.generation.continuous import Batcher
from shardwright.generation.engine import WholeEngine
from shardwright.layout.layout import Layout
from shardwright.model.sections import RopeScaling
from shardwright.model.spec import ModelSpec
from shardwright.serving.work import cache_bytes_per_token
from shardwright.system.errors import InputError
from tests.distributed import run_ranks
from tests.generation.models import (
    CAPS,
    CHUNKS,
    DRAWN,
    EXPERTS,
    GREEDY,
    GROUPED,
    LATENT,
    LATENT_EXPERTS,
    LEARNED,
    LINEAR,
    N_TOKENS,
    PROMPTS,
    SPECS,
    WINDOWS,
    merged,
    on_layout,
    whole_model,
    without_cache,
)
from tests.marks import prove, rest_prove
from tests.mutation import Mutation, mutated


def test_a_cache_that_longrope_would_mix_two_sets_of_frequencies_in_is_refused():
    spec = GROUPED
    pairs = (1.0,) * (spec.rope_dim // 2)
    scaling = RopeScaling(kind="longrope", factor=2.0, original_max_seq_len=16, short_factor=pairs, long_factor=pairs)
    model = whole_model(replace(spec, rope_scaling=scaling))
    assert WholeEngine(model, 1, 16).model.sequence_len(1) == 16
    with pytest.raises(InputError, match="prompt and new tokens of at most 16 together"):
        WholeEngine(whole_model(replace(spec, rope_scaling=scaling)), 1, 17)


@pytest.mark.parametrize("sampling", [pytest.param(GREEDY, marks=prove), DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_the_cache_changes_no_token(spec, sampling):
    model = whole_model(spec)
    expected = without_cache(model, PROMPTS, sampling)
    for n_slots in (1, 3, 5):
        engine = WholeEngine(whole_model(spec), n_slots, spec.max_seq_len)
        assert Batcher(engine, sampling, spec.max_seq_len).complete(PROMPTS, N_TOKENS) == expected


@torch.no_grad()
def test_a_row_of_the_cache_starts_a_sequence_of_linear_layers_anew():
    tokens_of_linear_layers_are_those_without_a_cache()


@torch.no_grad()
def tokens_of_linear_layers_are_those_without_a_cache() -> None:
    engine = WholeEngine(whole_model(LINEAR), 1, LINEAR.max_seq_len)
    for seed in (3, 5):
        tokens, results = [seed * i % 31 for i in range(30)], []
        for start, stop in pairwise((0, 3, 14, 15, 30)):
            segment = SequenceSegment(0, start, stop - start)
            results += engine.run([RaggedBatch([segment], tokens[start:stop], [stop - start])])
        expected_TV = whole_model(LINEAR)(torch.tensor([tokens]))[0]
        torch.testing.assert_close(torch.cat(results), expected_TV, rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_a_continuation_in_parts_of_a_few_queries_is_that_of_the_whole_sequence(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cache, "ROWS_TOGETHER", 4)
    a_long_continuation_is_that_of_the_whole_sequence(GROUPED)


@pytest.mark.parametrize("spec", [WINDOWS, CHUNKS], ids=["windows", "chunks"])
@torch.no_grad()
def test_a_continuation_longer_than_a_window_is_that_of_the_whole_sequence(spec: ModelSpec):
    a_long_continuation_is_that_of_the_whole_sequence(spec)


@torch.no_grad()
def a_long_continuation_is_that_of_the_whole_sequence(spec: ModelSpec = WINDOWS) -> None:
    tokens = [3 * i % 31 for i in range(30)]
    expected_TV = whole_model(spec)(torch.tensor([tokens]))[0]
    engine, results = WholeEngine(whole_model(spec), 2, spec.max_seq_len), []
    for start, stop in pairwise((0, 3, 14, 15, 30)):
        segment = SequenceSegment(1, start, stop - start)
        results += engine.run([RaggedBatch([segment], tokens[start:stop], [stop - start])])
    torch.testing.assert_close(torch.cat(results), expected_TV, rtol=1e-12, atol=1e-12)
    layers = [min(spec.layer_window(layer) or spec.max_seq_len, spec.max_seq_len) for layer in range(4)]
    assert engine.cache.n_bytes == 2 * sum(layers) * cache_bytes_per_token(spec, 1, 8)


CASES = [
    (Layout(tp=2, sequence_parallel=False), GROUPED),
    (Layout(pp=2), LEARNED),
    (Layout(tp=2, ep=2, sequence_parallel=True), EXPERTS),
    (Layout(tp=2, sequence_parallel=True), LEARNED),
    (Layout(tp=2, sequence_parallel=False), LATENT),
    (Layout(tp=2, pp=2, ep=2, sequence_parallel=True), LATENT_EXPERTS),
    (Layout(dp_shard=2, zero=1, ep=2, pp=2), LATENT_EXPERTS),
    (Layout(cp=2), GROUPED),
    (Layout(tp=2, pp=2, sequence_parallel=True), LINEAR),
    (Layout(tp=2, sequence_parallel=False, dp_shard=2), LINEAR),
    (Layout(cp=2, tp=2, sequence_parallel=True), LINEAR),
    (Layout(cp=4, cp_method="usp", ulysses_degree=2), LINEAR),
    (Layout(cp=2, tp=2, sequence_parallel=True), WINDOWS),
    (Layout(pp=2, tp=2, sequence_parallel=False), CAPS),
    (Layout(cp=2, tp=2, sequence_parallel=True), CHUNKS),
    (Layout(cp=2, cp_method="ulysses"), LEARNED),
    (Layout(cp=4, cp_method="usp", ulysses_degree=2), GROUPED),
    (Layout(cp=2, cp_method="ring", tp=2, sequence_parallel=True), LATENT),
    (Layout(cp=2, cp_method="allgather", pp=2), LEARNED),
]


@pytest.mark.parametrize(
    ("layout", "spec"),
    rest_prove(CASES, *CASES[:1]),
    ids=lambda value: str(value) if isinstance(value, Layout) else next(n for n, s in SPECS.items() if s == value),
)
def test_the_tokens_do_not_depend_on_the_layout(layout, spec):
    samplings, dtypes = (GREEDY, DRAWN), (torch.float64, torch.float32)
    expected = [without_cache(whole_model(spec, dtype), PROMPTS, each) for dtype in dtypes for each in samplings]
    of_ranks = run_ranks(on_layout, layout.world_size, layout, spec, samplings, dtypes)
    assert [merged(case) for case in zip(*of_ranks, strict=True)] == expected


@prove
def test_keys_of_another_rank_are_seen():
    """What other ranks hold is seen where each has one kv head of two."""
    from tests.training.bugs.generation import OTHER_RANK

    arguments = (Layout(tp=2, sequence_parallel=False), GROUPED, (GREEDY,), (torch.float64,), 3)
    (found,) = [merged(case) for case in zip(*run_ranks(on_layout, 2, *arguments, (OTHER_RANK,)), strict=True)]
    assert found != without_cache(whole_model(GROUPED), PROMPTS, GREEDY)


def _page_faults(mutations: tuple[Mutation, ...]) -> int:
    """Of a pass that reads prompts, after two like it: the least of three, as a loaded machine adds some of its own.

    The thresholds of malloc are first set to glibc's defaults, as glibc raises them in a process that has freed a large
    block, such as the one that this one was forked from."""
    trim_threshold, mmap_threshold = -1, -3
    for threshold in (mmap_threshold, trim_threshold):
        ctypes.CDLL(None).mallopt(threshold, 128 * 1024)
    spec = replace(GROUPED, n_layers=2, d_model=256, d_ffn=704, max_seq_len=130)
    prompts = {index: [(index + at) % 31 for at in range(128)] for index in range(8)}
    with mutated(*mutations):
        batcher = Batcher(WholeEngine(whole_model(spec, torch.float32), 8, 130), GREEDY, 130)
        faults = []
        for _ in range(5):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            batcher.complete(prompts, 1)
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return min(faults[2:])


@pytest.mark.skipif(sys.platform != "linux", reason="glibc gives memory back, other libraries do not")
def test_a_pass_keeps_the_memory_of_the_one_before():
    from tests.training.bugs.generation import GIVEN_BACK

    (kept,), (faulted,) = (run_ranks(_page_faults, 1, mutations) for mutations in ((), (GIVEN_BACK,)))
    assert kept < 200 < faulted / 5, (kept, faulted)


@pytest.mark.parametrize("spec", [GROUPED, LATENT], ids=["grouped", "latent"])
def test_the_bytes_of_the_cache_are_those_of_the_formula(spec):
    engine = WholeEngine(whole_model(spec, torch.float32), 3, 20)
    Batcher(engine, GREEDY, 20).complete(PROMPTS, 4)
    assert engine.cache.n_bytes == spec.n_layers * 3 * 20 * cache_bytes_per_token(spec, 1, 4)
    heads = {1: 2, 2: 1, 4: 1}
    for tp, n in heads.items():
        expected = 2 * n * 8 * 4 if spec is GROUPED else (12 + 4) * 4
        assert cache_bytes_per_token(spec, tp, 4) == expected
