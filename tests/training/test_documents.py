"""Proves that every layout trains packed documents, within which attention stays, as one process does: loss, raw
gradients and parameters, in float64. That one process computes each document as if it were alone: tests/model."""

from dataclasses import replace
from itertools import product

import pytest

from shardwright.config import Scope
from shardwright.layout.layout import Layout
from shardwright.model.sections import MoESpec
from shardwright.verification import Case, Verifier
from tests.marks import prove, rest_prove
from tests.training.bugs.bug import EVEN, EXPERTS, FEW_PLACES, LATENT, LONG
from tests.training.worlds import in_few_micro_batches

LAYOUTS = {
    "one rank, recomputed": Layout(recompute="full"),
    "tensor": Layout(tp=2),
    "tensor without token shards": Layout(tp=2, sequence_parallel=False),
    "ring": Layout(cp=2, cp_method="ring"),
    "zigzag": Layout(cp=2),
    "all-gather": Layout(cp=2, cp_method="allgather"),
    "ulysses": Layout(cp=2, cp_method="ulysses"),
    "ulysses in a ring": Layout(cp=4, cp_method="usp", ulysses_degree=2),
    "tensor and ring": Layout(tp=2, cp=2, recompute="full"),
    "pipeline and ring": Layout(pp=2, cp=2, pp_schedule="zb-h1"),
    "pipeline and tensor": Layout(pp=2, tp=2, pp_schedule="1f1b", recompute="full"),
    "data and ring": Layout(dp_shard=2, cp=2, zero=3),
}
LATENT_HEADS = {"n_kv_heads": 4, "latent_attention": LATENT}


def case_of(layout: Layout, positions: Scope = "document", **spec: object) -> Case:
    model = replace(EVEN, dropout=0.1, **spec)  # type: ignore[arg-type]
    return in_few_micro_batches(replace(LONG, steps=2, spec=model, attention="document", positions=positions), layout)


@pytest.mark.parametrize(
    ("name", "positions"),
    rest_prove(
        [*product(LAYOUTS, ["document"]), ("zigzag", "sequence"), ("pipeline and tensor", "sequence")],
        ("zigzag", "document"),
    ),
)
def test_a_layout_trains_documents_as_one_process_does(verifier: Verifier, name: str, positions: Scope) -> None:
    report = verifier.parity(case_of(LAYOUTS[name], positions), LAYOUTS[name])
    assert report.equal, report.differing or report.worst
    assert report.worst_error < 1e-12, report.worst


@prove
@pytest.mark.parametrize("name", ["ring", "zigzag", "ulysses", "tensor and ring"])
def test_latent_attention_stays_within_documents(verifier: Verifier, name: str) -> None:
    report = verifier.parity(case_of(LAYOUTS[name], **LATENT_HEADS), LAYOUTS[name])
    assert report.equal, report.differing or report.worst


@prove
@pytest.mark.parametrize(
    ("name", "moe"),
    [("zigzag", FEW_PLACES), ("tensor and ring", FEW_PLACES), ("ulysses in a ring", EXPERTS)],
    ids=["zigzag, with a capacity", "tensor and ring, with a capacity", "ulysses in a ring, dropless"],
)
def test_experts_see_the_tokens_of_documents(verifier: Verifier, name: str, moe: MoESpec) -> None:
    report = verifier.parity(case_of(LAYOUTS[name], moe=moe), LAYOUTS[name])
    assert report.equal, report.differing or report.worst


@prove
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_documents_are_trained_in_fewer_digits(verifier: Verifier, dtype: str) -> None:
    layout = LAYOUTS["zigzag"]
    case = replace(case_of(layout), dtype=dtype)
    report = verifier.parity(replace(case, micro_batch=LONG.global_batch // 4), layout)
    assert report.equal, report.differing or report.worst
