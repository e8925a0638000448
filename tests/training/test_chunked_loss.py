"""Proves that every layout computes with a chunked loss what one process does with whole logits: losses, raw gradients
and parameters, in float64. What it keeps: tests/parallel/test_loss.py."""

from dataclasses import replace
from itertools import cycle

import pytest

from shardwright.layout.layout import Layout
from shardwright.verification import Verifier
from shardwright.verification.cut_case import cut_layout
from tests.marks import prove, rest_prove
from tests.training.bugs.bug import EXPERTS, LATENT, LONG
from tests.training.test_recompute import LAYOUTS, case_of

LAYOUTS_OF_LOSS = LAYOUTS | {
    "one rank": Layout(),
    "zero 1, hybrid": Layout(dp_replicate=2, dp_shard=2, zero=1),
    "tensor and zero 3": Layout(tp=2, dp_shard=2, zero=3),
    "tensor in a pipeline, zero 3 by micro-batch": Layout(
        pp=2, tp=2, dp_shard=2, zero=3, zero_pp_gather="microbatch", recompute="selective"
    ),
    "first and last stage on one rank": Layout(pp=2, pp_schedule="zb-v", recompute="full"),
    "tensor of three, uneven vocabulary": Layout(tp=3, sequence_parallel=False),
    "all micro-batches before the first backward pass": Layout(pp=2, pp_schedule="afab"),
}
MODELS: dict[str, dict[str, object]] = {
    "dense": {"dropout": 0.1, "n_layers": 4},
    "tied": {"tied_embedding": True, "n_layers": 4},
    "two modules": {"mtp_modules": 2, "n_layers": 4},
    "tied, a module": {"mtp_modules": 1, "tied_embedding": True, "n_layers": 4},
}
QUICK = ("tensor", "tied, a module")
CHUNK = 20
"""Tokens; a micro-batch of a rank has more."""


@pytest.mark.parametrize(
    ("name", "model"), rest_prove(dict.fromkeys([*zip(LAYOUTS_OF_LOSS, cycle(MODELS), strict=False), QUICK]), QUICK)
)
def test_a_layout_with_a_chunked_loss_trains_as_one_process_does(verifier: Verifier, name: str, model: str):
    layout = replace(LAYOUTS_OF_LOSS[name], loss_chunk_tokens=CHUNK)
    spec = MODELS[model] | ({"n_heads": 3, "n_kv_heads": 3, "d_ffn": 42} if layout.tp == 3 else {})
    proves_equal(verifier, layout, **spec)


def proves_equal(verifier: Verifier, layout: Layout, documents: bool = False, **spec: object) -> None:
    report = verifier.parity(case_of(layout, documents, **spec), layout)
    assert report.equal, report.differing or report.worst
    assert max(row.error for row in report.rows if row.tolerance <= 1e-10) < 1e-12, report.worst


@prove
@pytest.mark.parametrize(("name", "chunk"), [("one rank", 1), ("one rank", 10_000), ("tensor", 7), ("ring", 4)])
def test_any_chunk_gives_the_same(verifier: Verifier, name: str, chunk: int):
    proves_equal(verifier, replace(LAYOUTS_OF_LOSS[name], loss_chunk_tokens=chunk))


@prove
@pytest.mark.parametrize("name", ["zigzag", "tensor, ring and zero 3"])
def test_targets_follow_their_tokens_within_documents(verifier: Verifier, name: str):
    proves_equal(verifier, replace(LAYOUTS_OF_LOSS[name], loss_chunk_tokens=CHUNK), documents=True, mtp_modules=1)


@prove
def test_experts_balance_losses_and_latent_attention_go_with_it(verifier: Verifier):
    layout = Layout(pp=2, dp_shard=2, zero=1, ep=2, pp_schedule="zb-h1", loss_chunk_tokens=CHUNK)
    proves_equal(verifier, layout, moe=EXPERTS, latent_attention=LATENT, n_kv_heads=4)


@prove
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("one rank", "bfloat16"),
        ("tensor", "float32"),
        ("zero 3", "bfloat16"),
        ("split backward and zero 3", "bfloat16"),
    ],
)
def test_fewer_digits_are_as_good_as_with_whole_logits(verifier: Verifier, name: str, dtype: str):
    layout = replace(LAYOUTS_OF_LOSS[name], loss_chunk_tokens=CHUNK)
    report = verifier.parity(replace(case_of(layout), dtype=dtype), layout)
    assert report.equal, report.differing or report.worst


@prove
@pytest.mark.parametrize("layout", [Layout(tp=2)])
def test_it_runs_compiled(verifier: Verifier, layout: Layout):
    layout = replace(layout, loss_chunk_tokens=CHUNK)
    report = verifier.parity(replace(case_of(layout), compiled=True), layout)
    assert report.equal, report.differing or report.worst


@pytest.mark.parametrize(
    ("chunk", "seq_len", "reduced"),
    [(4096, 8192, 6), (4096, 9000, 5), (1024, 8192, 4), (1000, 8192, 5), (8192, 8192, 8192), (0, 8192, 0)],
)
def test_a_case_at_test_size_has_several_chunks_and_a_shorter_last_one_where_the_true_one_has(
    chunk: int, seq_len: int, reduced: int
):
    true, small = replace(LONG, seq_len=seq_len, micro_batch=1), replace(LONG, micro_batch=1)
    assert cut_layout(Layout(loss_chunk_tokens=chunk), true, small).loss_chunk_tokens == reduced
