"""Proves that every valid layout of 2 and of 4 ranks, and chosen ones of 8, train as one process does in float64; and
that the matrix holds every layout there is."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from shardloom.config import OptimizerSection
from shardloom.layout import CP_METHODS, Layout
from shardloom.verify import Case, Verifier
from shardloom.verify.matrix import layouts
from tests.train.worlds import SPEC

EVEN = replace(SPEC, n_heads=4, n_kv_heads=2, d_model=32, max_seq_len=32)
CASE = Case(EVEN, seq_len=16, global_batch=8, seed=1, optimizer=OptimizerSection(lr=1e-3), steps=2)
ON_EIGHT = [
    Layout(dp_replicate=2, dp_shard=2, tp=2, zero=3, sequence_parallel=True),
    Layout(dp_shard=2, cp=2, tp=2, zero=2, sequence_parallel=True),
    Layout(cp=4, tp=2, cp_method="usp", ulysses_degree=2, zero=3),
    Layout(dp_replicate=2, cp=2, tp=2, cp_method="ring"),
    Layout(dp_shard=2, tp=4, zero=1, sequence_parallel=True),  # two kv heads on four ranks: copies
]


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    with Verifier() as verifier:
        yield verifier


def check(verifier: Verifier, case: Case, layout: Layout) -> None:
    report = verifier.parity(case, layout)
    assert report.equal, (layout, report.differing or report.worst)
    # Sums of at most 128 tokens in another order, in 14 layers of products.
    strict = [row for row in report.rows if row.tolerance <= 1e-10]
    assert max(row.error for row in strict) < 1e-12, (layout, report.worst)


def test_the_layouts_of_two_ranks_are_these():
    found = layouts(EVEN, 2, 16)
    assert found[:4] == [Layout(dp_replicate=2), *(Layout(dp_shard=2, zero=zero) for zero in (1, 2, 3))]
    context = {(layout.cp_method, layout.zero) for layout in found if layout.cp == 2}
    assert context == set(product(("zigzag", "ring", "allgather", "ulysses"), range(4)))
    assert [layout for layout in found if layout.tp == 2] == [Layout(tp=2), Layout(tp=2, sequence_parallel=True)]
    assert len(found) == 4 + 16 + 2


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_the_matrix_has_each_layout_once_and_of_that_many_ranks(world_size: int):
    found = layouts(EVEN, world_size, 48)
    assert len(set(found)) == len(found)
    assert all(layout.world_size == world_size for layout in found)
    if world_size % 4 == 0:
        assert {layout.cp_method for layout in found} == set(CP_METHODS)


def test_a_layout_that_the_model_cannot_have_is_not_in_the_matrix():
    assert not [layout for layout in layouts(SPEC, 2, 16) if layout.tp == 2]  # 3 heads
    assert not [layout for layout in layouts(EVEN, 2, 10) if layout.cp_method == "zigzag" and layout.cp == 2]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("world_size", [2, 4])
def test_every_layout_trains_as_one_process_does(verifier: Verifier, world_size: int):
    for layout in layouts(EVEN, world_size, CASE.seq_len):
        check(verifier, CASE, layout)


@pytest.mark.parametrize("layout", ON_EIGHT, ids=str)
def test_layouts_of_eight_ranks_train_as_one_process_does(verifier: Verifier, layout: Layout):
    check(verifier, CASE, layout)


def test_uneven_rows_beside_copied_kv_heads_are_shared_out_too(verifier: Verifier):
    # 61 rows on 4 ranks of tp are 16, 16, 16 and 13; of 2 ranks that share 13, one has 7 and one 6.
    uneven = replace(CASE, spec=replace(EVEN, vocab_size=61, d_ffn=28))
    for zero in (1, 3):
        check(verifier, uneven, Layout(dp_shard=2, tp=4, zero=zero, sequence_parallel=True))


@pytest.mark.parametrize(
    "changes",
    [
        {"n_kv_heads": 1},
        {"tied_embedding": True},
        {"norm": "layernorm", "activation": "gelu_tanh", "positions": "learned", "bias": True},
        {"qk_norm": True},
        {"dropout": 0.2},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "layout",
    [Layout(tp=2), Layout(dp_shard=2, tp=2, zero=2, sequence_parallel=True), Layout(cp=2, tp=2, recompute="full")],
    ids=str,
)
def test_every_choice_of_the_model_trains_as_one_process_does(verifier: Verifier, changes: dict, layout: Layout):
    check(verifier, replace(CASE, spec=replace(EVEN, **changes)), layout)


def test_adam_may_step_anywhere_where_the_gradient_is_rounding_alone_and_nowhere_else(verifier: Verifier):
    biased = replace(CASE, spec=replace(EVEN, bias=True, positions="learned"), optimizer=OptimizerSection(lr=0.1))
    report = verifier.parity(biased, Layout(tp=2))
    assert report.equal, report.worst
    loose = {(row.quantity.kind, row.quantity.training, row.name) for row in report.rows if row.tolerance > 1e-10}
    assert loose == {("parameter", "adamw", f"layers.{layer}.attention.k.bias") for layer in range(EVEN.n_layers)}
    assert "AdamW's steps of it" in report.rows[0].reason
