"""Proves who sums the gradients of replicas over tp, and which layouts are refused. No torch is needed."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.layout.keys import CP_METHODS
from shardwright.layout.layout import Layout
from shardwright.model.modules import row_of
from shardwright.model.presets import resolve
from shardwright.model.spec import ModelSpec
from shardwright.split.rules import problems, sequence_cuts, tp_divides
from shardwright.split.sequence import spans
from shardwright.split.tensor import summed_over, vocabulary_rows

SPEC = replace(resolve("debug"), n_heads=12, n_kv_heads=4, d_ffn=120, vocab_size=50257)


GPT = replace(resolve("gpt2"), qk_norm=True)


def over(spec: ModelSpec, name: str, layout: Layout, n_kv_heads: int) -> str | None:
    return summed_over(row_of(spec, name), layout, n_kv_heads)


def test_copies_are_summed_where_each_saw_a_part_and_nowhere_else():
    plain, shards = Layout(tp=4, sequence_parallel=False), Layout(tp=4, sequence_parallel=True)
    assert over(GPT, "layers.0.ffn_norm.weight", plain, 2) is None, "every rank saw all tokens"
    assert over(GPT, "layers.0.ffn_norm.weight", shards, 2) == "tp"
    assert over(GPT, "layers.0.attention.o.bias", plain, 2) is None
    assert over(GPT, "layers.0.attention.o.bias", shards, 2) == "tp"
    assert over(GPT, "layers.0.attention.k_norm.weight", plain, 2) == "tp", "every rank saw its heads"
    assert over(GPT, "layers.0.attention.k.weight", plain, 2) == "tp_replicas"
    assert over(GPT, "layers.0.attention.k.weight", plain, 4) is None, "a kv head for every rank"
    assert over(GPT, "layers.0.attention.q.weight", shards, 2) is None
    assert over(GPT, "norm.weight", Layout(sequence_parallel=True), 2) is None, "one rank"


@given(st.integers(1, 70_000), st.sampled_from([1, 2, 4, 8, 16]))
def test_each_row_of_the_vocabulary_is_on_one_rank(vocab_size: int, tp: int):
    shares = [vocabulary_rows(vocab_size, tp, rank) for rank in range(tp)]
    assert [row for share in shares for row in share] == list(range(vocab_size))
    assert max(len(share) for share in shares) <= -(-vocab_size // tp)


@pytest.mark.parametrize(
    ("layout", "seq_len", "complaint"),
    [
        (
            Layout(tp=5, sequence_parallel=False),
            64,
            "layout.tp=5 does not divide 12 query heads (model.n_heads) (12 = 5*2 + 2); valid: 1, 2, 4, 12",
        ),
        (
            Layout(tp=3, sequence_parallel=False),
            64,
            "layout.tp=3 neither divides 4 kv heads (model.n_kv_heads) nor is a multiple of them (4 = 3*1 + 1), so "
            "kv heads can be neither sharded nor replicated evenly; valid: 1, 2, 4, 12",
        ),
        (
            Layout(cp=4),
            60,
            "batch.seq_len=60 is not a multiple of 2 x 4 = 8 chunks (cp_method='zigzag') (60 = 8*7 + 4)",
        ),
        (
            Layout(cp=4, cp_method="ring"),
            62,
            "batch.seq_len=62 is not a multiple of cp=4 (62 = 4*15 + 2); nearest: 60 or 64",
        ),
        (
            Layout(cp=3, tp=2, sequence_parallel=True, cp_method="ring"),
            3,
            "batch.seq_len=3 is not a multiple of cp=3 x tp=2 = 6 (sequence_parallel) (3 = 6*0 + 3); nearest: 6",
        ),
        (
            Layout(cp=8, cp_method="ulysses"),
            64,
            "layout.cp=8 partitions the heads of a rank, with tp=1 12 query and 4 kv heads: it has to divide 12 "
            "(12 = 8*1 + 4), and to divide 4 or be a multiple of it; valid: 1, 2, 4, 12; cp_method='zigzag'",
        ),
        (Layout(cp=16, cp_method="usp", ulysses_degree=8), 64, "layout.ulysses_degree=8 partitions the heads"),
        (
            Layout(recompute="full", recompute_layers=99),
            64,
            "layout.recompute_layers=99: the model has 4 layers; valid: 1 to 4, or leave it out, for all",
        ),
        (
            Layout(recompute="selective", recompute_modules=("experts", "rope")),
            64,
            "layout.recompute_modules=['experts', 'rope']: the model has none of these parts, so nothing would be "
            "recomputed; valid: norms, activation, attention",
        ),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_with_its_arithmetic(layout: Layout, seq_len: int, complaint: str):
    assert any(problem.startswith(complaint) for problem in problems(SPEC, layout, seq_len)), problems(
        SPEC, layout, seq_len
    )


def test_latent_attention_is_sharded_by_heads_after_latent_vectors_that_every_rank_computes():
    spec, layout = resolve("deepseek-v3"), Layout(tp=8, sequence_parallel=True)
    assert problems(spec, layout, 4096) == []
    for name in ("q_down", "kv_down", "q_latent_norm", "kv_latent_norm"):
        assert row_of(spec, f"layers.0.attention.{name}.weight").split_dim is None
        assert over(spec, f"layers.0.attention.{name}.weight", layout, spec.n_kv_heads) == "tp"
        assert (
            over(spec, f"layers.0.attention.{name}.weight", Layout(tp=8, sequence_parallel=False), spec.n_kv_heads)
            is None
        )
    for name in ("q_up", "kv_up"):
        assert row_of(spec, f"layers.0.attention.{name}.weight").split_dim == 0


def test_a_vocabulary_too_small_for_tp_is_refused():
    tiny = replace(SPEC, vocab_size=5, n_heads=4, n_kv_heads=4)
    assert not tp_divides(tiny, 4), "2, 2, 1 and none"
    assert (
        "leaves a rank without a row of the vocabulary: 5 rows in shards of 2; valid: 1, 2"
        in problems(tiny, Layout(tp=4, sequence_parallel=False), 8)[0]
    )


@given(
    st.sampled_from(CP_METHODS),
    st.integers(1, 6),
    st.integers(1, 4),
    st.booleans(),
    st.integers(1, 5),
)
def test_a_length_that_passes_gives_every_rank_as_many_tokens(
    method: str, cp: int, tp: int, sequence_parallel: bool, times: int
):
    ulysses = cp if method == "usp" and cp > 1 else 1
    layout = Layout(cp=cp, tp=tp, cp_method=method, ulysses_degree=ulysses, sequence_parallel=sequence_parallel)
    seq_len = times * sequence_cuts(layout)
    held = [
        sum(len(span) for span in spans(method, seq_len, layout.cp_ring, layout.cp_ulysses, ring, ulysses))
        for ring in range(layout.cp_ring)
        for ulysses in range(layout.cp_ulysses)
    ]
    assert set(held) == {seq_len // cp}
    assert not layout.token_shards or seq_len // cp % tp == 0


def test_one_rank_is_refused_nothing():
    spec: ModelSpec = SPEC
    assert problems(spec, Layout(), 7) == []
