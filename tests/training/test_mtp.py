"""Proves multi-token prediction: which tokens its modules read and predict, and that every layout computes their losses
and gradients as one process does (`verification/reference.py` shifts and masks on its own)."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from shardwright.data.samples import IGNORE
from shardwright.layout.layout import Layout
from shardwright.training.ahead import BEYOND, look_ahead
from shardwright.verification import Verifier
from tests.marks import prove
from tests.mutation import Mutation
from tests.training.bugs.bug import DUALPIPE, EXPERTS, FEW_PLACES, LATENT, PP, SP, SP_EP, ZB_V, ZERO_3, Bug

X = IGNORE


def test_a_module_predicts_what_the_model_predicts_k_tokens_later():
    tokens = torch.tensor([[[3, 4, 5, 6, 7]]])
    targets = torch.tensor([[[4, 5, 6, 7, 8]]])
    ahead, predicted = look_ahead(tokens, targets, 2)
    assert ahead[0].tolist() == [[[4, 5, 6, 7, BEYOND]], [[5, 6, 7, BEYOND, BEYOND]]]
    assert predicted[0].tolist() == [[[4, 5, 6, 7, 8]], [[5, 6, 7, 8, X]], [[6, 7, 8, X, X]]]


def test_no_token_is_predicted_across_one_that_does_not_count():
    """Tokens 1 2 0 | 5 6 0 with 0 the separator, whose successor is left out of the loss."""
    tokens = torch.tensor([[[1, 2, 0, 5, 6]]])
    targets = torch.tensor([[[2, 0, X, 6, 0]]])
    _, predicted = look_ahead(tokens, targets, 2)
    assert predicted[0].tolist() == [[[2, 0, X, 6, 0]], [[0, X, X, 0, X]], [[X, X, X, X, X]]]


MIXTURE: dict[str, Any] = {"moe": EXPERTS, "latent_attention": LATENT, "n_kv_heads": 4}
SETTINGS: dict[str, tuple[Layout, dict[str, Any], bool]] = {
    "zero 3": (ZERO_3, {}, False),
    "two modules on token shards": (SP, {"mtp_modules": 2}, False),
    "documents over cp": (Layout(cp=2), {"mtp_modules": 2}, True),
    "first and last stage on one rank": (ZB_V, {"n_layers": 4}, False),
    "every stage on two ranks, tied": (DUALPIPE, {"n_layers": 5, "tied_embedding": True}, False),
    "experts over ep and tp": (SP_EP, MIXTURE | {"mtp_modules": 2}, False),
    "experts, ZeRO-3 and cp": (Layout(cp=2, ep=2, zero=3), MIXTURE, False),
    "stages, experts with a capacity and ZeRO-3": (
        Layout(pp=2, dp_shard=2, zero=3, ep=2),
        MIXTURE | {"moe": FEW_PLACES},
        False,
    ),
    "stages and tp, recomputed, with dropout": (
        Layout(pp=2, tp=2, sequence_parallel=True, recompute="full"),
        {"dropout": 0.1, "tied_embedding": True},
        False,
    ),
}


@pytest.mark.parametrize(
    ("layout", "spec", "documents"),
    [
        pytest.param(PP, {}, False, id="the last stage"),
        *(pytest.param(*setting, id=name, marks=prove) for name, setting in SETTINGS.items()),
    ],
)
def test_a_layout_computes_what_one_process_does(
    layout: Layout, spec: dict[str, Any], documents: bool, verifier: Verifier
):
    changes = {"mtp_modules": 1} | spec
    nothing = Bug(Mutation("", "", ""), [layout], spec=changes, documents=documents)
    report = verifier.parity(nothing.case(layout), layout)
    assert report.equal, report.worst
    kinds = {row.quantity.kind for row in report.rows}
    assert {"mtp loss", "mtp evaluation"} <= kinds


@prove
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "layout",
    [replace(SP, recompute="full")],
    ids=["token shards, recomputed"],
)
def test_compiled_modules_and_recomputed_parts_compute_what_one_process_does(layout: Layout):
    nothing = Bug(Mutation("", "", ""), [layout], spec={"mtp_modules": 2})
    with Verifier(timeout_s=600) as verifier:
        report = verifier.parity(replace(nothing.case(layout), compiled=True), layout)
    assert report.equal, report.worst
    assert {"mtp loss", "mtp evaluation", "gradient"} <= {row.quantity.kind for row in report.rows}
