"""Proves that a pipeline trains as one process does: loss, raw gradients, parameters, under every schedule, with
uneven stages, tied embeddings and dropout, and together with every other axis.

The reference is plain PyTorch on the whole batch at once, masks are ragged, and clipping is at work in every step. That
all ranks report the same loss and norm and hold the same bits of what they share is a part of every comparison. What a
rank holds, sends and when it computes: tests/parallel/test_pipeline.py. Bugs put in: test_mutations.py.
"""

from dataclasses import replace
from typing import Any

import pytest

from shardwright.layout.layout import Layout
from shardwright.verification import Case, Verifier
from tests.marks import prove, rest_prove
from tests.training.worlds import CASE, SPEC

DEEP = replace(SPEC, n_heads=4, n_kv_heads=2, n_layers=4)  # four stages, splits over two ranks of tp or cp
PIPED = replace(CASE, spec=DEEP, seq_len=12, steps=2)
N_PARAMETERS = 9 * 4 + 3
LIMIT = 1e-12
"""Sums of at most 24 x 12 tokens in another order: a few hundred roundings of 1e-16 at the very most."""

ONE_STAGE = ("afab", "1f1b", "zb-h1", "zb-h2", "auto", "dualpipe")  # of as many stages as ranks
TWO_STAGES = (("interleaved-1f1b", 2), ("zb-v", 1), ("dualpipe-v", 1))


def piped_case(layout: Layout, accumulation: int, **spec: Any) -> Case:
    """PIPED with that many microbatches a step, and what is changed of the model."""
    micro_batch = PIPED.global_batch // (layout.data_ranks * accumulation)
    return replace(PIPED, micro_batch=micro_batch, spec=replace(DEEP, **spec))


def check(verifier: Verifier, case: Case, layout: Layout, limit: float = LIMIT) -> None:
    report = verifier.parity(case, layout)
    assert report.equal, report.differing or report.worst
    assert report.worst_error < limit, report.worst


@pytest.mark.parametrize("schedule", rest_prove(ONE_STAGE, "1f1b", "zb-h1", "dualpipe"))
def test_two_stages_train_as_one_process_does(verifier: Verifier, schedule: str):
    layout = Layout(pp=2, pp_schedule=schedule)
    check(verifier, piped_case(layout, 6), layout)


@pytest.mark.parametrize(("schedule", "virtual_stages"), rest_prove(TWO_STAGES, ("zb-v", 1)))
def test_two_ranks_of_two_stages_train_as_one_process_does(verifier: Verifier, schedule: str, virtual_stages: int):
    layout = Layout(pp=2, pp_schedule=schedule, virtual_stages=virtual_stages)
    check(verifier, piped_case(layout, 6), layout)


@prove
@pytest.mark.parametrize("schedule", ONE_STAGE)
def test_four_stages_train_as_one_process_does(verifier: Verifier, schedule: str):
    layout = Layout(pp=4, pp_schedule=schedule)
    check(verifier, piped_case(layout, 6), layout)


@prove
@pytest.mark.parametrize(("schedule", "virtual_stages"), TWO_STAGES)
def test_four_ranks_of_two_stages_train_as_one_process_does(verifier: Verifier, schedule: str, virtual_stages: int):
    layout = Layout(pp=4, pp_schedule=schedule, virtual_stages=virtual_stages)
    check(verifier, piped_case(layout, 6, n_layers=8), layout)


# More microbatches than ranks are proven above; here as few as there can be.
@prove
@pytest.mark.parametrize(
    ("layout", "accumulation"),
    [
        (Layout(pp=4), 1),
        (Layout(pp=4, pp_schedule="zb-h2"), 3),
        (Layout(pp=2, pp_schedule="interleaved-1f1b", virtual_stages=2), 3),
        (Layout(pp=2, pp_schedule="dualpipe-v"), 1),
        (Layout(pp=2, pp_schedule="dualpipe"), 2),
        (Layout(pp=2, pp_schedule="zb-h1"), 2),
    ],
    ids=str,
)
def test_fewer_microbatches_than_ranks_and_odd_numbers_of_them_train_as_one_process_does(
    verifier: Verifier, layout: Layout, accumulation: int
):
    check(verifier, piped_case(layout, accumulation), layout)


@pytest.mark.parametrize(
    "layout",
    rest_prove(
        [
            Layout(pp=2, stage_layers=(3, 1)),
            Layout(pp=2, pp_schedule="zb-h1", stage_layers=(1, 3), dp_shard=2, zero=3),
            Layout(pp=2, pp_schedule="dualpipe", stage_layers=(1, 3)),
        ],
        Layout(pp=2, stage_layers=(3, 1)),
    ),
    ids=str,
)
def test_uneven_stages_train_as_one_process_does(verifier: Verifier, layout: Layout):
    check(verifier, piped_case(layout, 4), layout)


TIED = [
    Layout(pp=2),  # the copies are on two ranks
    Layout(pp=2, pp_schedule="zb-h1", dp_shard=2, zero=3),
    Layout(pp=2, tp=2, pp_schedule="1f1b", sequence_parallel=True),
    Layout(pp=2, pp_schedule="zb-v"),  # on one
    Layout(pp=2, pp_schedule="zb-v", dp_shard=2, zero=3, zero_pp_gather="microbatch"),
    Layout(pp=2, tp=2, pp_schedule="dualpipe-v", sequence_parallel=False),
    Layout(pp=2, pp_schedule="dualpipe"),  # two on each of two
    Layout(pp=2, pp_schedule="dualpipe", dp_shard=2, zero=2),
]


@pytest.mark.parametrize("layout", rest_prove(TIED, TIED[0], TIED[3]), ids=str)
def test_a_tied_embedding_trains_as_one_process_does(verifier: Verifier, layout: Layout):
    check(verifier, piped_case(layout, 4, tied_embedding=True), layout)


def test_learned_positions_biases_and_layer_norms_train_as_one_process_does(verifier: Verifier):
    layout = Layout(pp=2, pp_schedule="zb-h1")
    spec = {
        "norm": "layernorm",
        "activation": "gelu_tanh",
        "positions": "learned",
        "bias": True,
        "tied_embedding": True,
    }
    # The gradient of a key's bias is rounding and nothing else.
    check(verifier, piped_case(layout, 4, **spec), layout, limit=1e-10)


@pytest.mark.parametrize(
    "layout",
    rest_prove(
        [
            Layout(pp=2, pp_schedule="interleaved-1f1b", virtual_stages=2),
            Layout(pp=2, pp_schedule="zb-v", recompute="full"),
            Layout(pp=2, pp_schedule="dualpipe"),
            Layout(pp=2, tp=2, pp_schedule="zb-h1", sequence_parallel=True),
        ],
        Layout(pp=2, pp_schedule="zb-v", recompute="full"),
    ),
    ids=str,
)
def test_dropout_is_that_of_one_process(verifier: Verifier, layout: Layout):
    check(verifier, piped_case(layout, 4, dropout=0.2), layout)


@pytest.mark.parametrize(
    "layout",
    rest_prove(
        [
            Layout(pp=2, recompute="full"),
            Layout(pp=2, tp=2, pp_schedule="zb-h1", recompute="full", sequence_parallel=False),
            Layout(pp=2, dp_shard=2, zero=3, pp_schedule="zb-h1", recompute="full"),
        ],
        Layout(pp=2, recompute="full"),
    ),
    ids=str,
)
def test_blocks_computed_again_train_as_one_process_does(verifier: Verifier, layout: Layout):
    check(verifier, piped_case(layout, 4), layout)


@pytest.mark.parametrize(
    "layout",
    rest_prove(
        [
            Layout(pp=2, dp_replicate=2),
            Layout(pp=2, dp_shard=2, zero=1, pp_schedule="zb-h1"),
            Layout(pp=2, dp_shard=2, zero=2),
            Layout(pp=2, dp_shard=2, zero=2, pp_schedule="zb-h1"),
            Layout(pp=2, dp_shard=2, zero=3),
            Layout(pp=2, dp_shard=2, zero=3, zero_pp_gather="microbatch", pp_schedule="zb-h1"),
        ],
        Layout(pp=2, dp_shard=2, zero=3),
    ),
    ids=str,
)
def test_a_pipeline_on_two_data_ranks_trains_as_one_process_does(verifier: Verifier, layout: Layout):
    check(verifier, piped_case(layout, 4), layout)


@prove
@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=2, pp_schedule="interleaved-1f1b", virtual_stages=2, dp_shard=2, zero=2),
        Layout(pp=2, pp_schedule="zb-v", dp_shard=2, zero=3),
        Layout(pp=2, pp_schedule="dualpipe", dp_shard=2, zero=3, zero_pp_gather="microbatch"),
        Layout(pp=2, pp_schedule="dualpipe", dp_replicate=2),
        Layout(pp=2, pp_schedule="zb-v", tp=2, sequence_parallel=True),
        Layout(pp=2, pp_schedule="1f1b", cp=2, cp_method="ulysses", zero=3),
        Layout(pp=2, pp_schedule="zb-v", cp=2, cp_method="ring"),
    ],
    ids=str,
)
def test_a_pipeline_on_four_ranks_with_another_axis_trains_as_one_process_does(verifier: Verifier, layout: Layout):
    check(verifier, piped_case(layout, 4), layout)


@prove
@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=2, dp_shard=2, tp=2, zero=3, sequence_parallel=True, pp_schedule="zb-h1"),
        Layout(pp=2, cp=2, tp=2, pp_schedule="zb-h1", sequence_parallel=True),
        Layout(pp=2, dp_replicate=2, dp_shard=2, zero=2),
    ],
    ids=str,
)
def test_a_pipeline_on_eight_ranks_trains_as_one_process_does(verifier: Verifier, layout: Layout):
    check(verifier, piped_case(layout, 3), layout)


@pytest.mark.parametrize(
    ("layout", "dtype"),
    rest_prove(
        [
            (Layout(pp=4, pp_schedule="zb-h1"), "float32"),
            (Layout(pp=2, dp_shard=2, zero=2), "float32"),
            (Layout(pp=2, pp_schedule="zb-h1"), "bfloat16"),
            (Layout(pp=2, dp_shard=2, zero=3), "bfloat16"),
            (Layout(pp=2, dp_shard=2, zero=2, pp_schedule="zb-h1"), "bfloat16"),
        ],
        (Layout(pp=2, pp_schedule="zb-h1"), "bfloat16"),
    ),
    ids=str,
)
def test_other_types_are_as_near_as_one_process_is(verifier: Verifier, layout: Layout, dtype: str):
    report = verifier.parity(replace(piped_case(layout, 3), dtype=dtype), layout)
    assert report.equal, report.differing or report.worst
    assert dtype == "bfloat16" or report.worst_error < 1e-5, report.worst


def test_losses_norms_and_what_stages_share_are_compared_bit_for_bit(verifier: Verifier):
    layout = Layout(pp=2, pp_schedule="dualpipe")
    report = verifier.parity(piped_case(layout, 4), layout)
    # Both ranks hold every parameter: their initial values, and gradients and values in the end of each training. The
    # numbers are the loss and the norm of each step, and an evaluation.
    assert report.n_replicated == 2 * (PIPED.steps * 2 + 1) + N_PARAMETERS * (1 + 2 * (PIPED.steps + 1))
