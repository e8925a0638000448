"""Proves multi-token prediction: which tokens its modules read and predict, and that every layout computes their losses
and gradients as one process does (`verification/reference.py` shifts and masks on its own)."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardwright.config import load
from shardwright.data.prepare import prepare
from shardwright.data.samples import IGNORE
from shardwright.data.shards import open_split
from shardwright.layout.layout import Layout
from shardwright.model.init import initialise
from shardwright.model.transformer import Transformer
from shardwright.training.ahead import BEYOND, look_ahead
from shardwright.verification import Verifier
from tests.marks import prove
from tests.mutation import Mutation
from tests.training.bugs.bug import DUALPIPE, EXPERTS, FEW_PLACES, LATENT, PP, SP, SP_EP, ZB_V, ZERO_3, Bug
from tests.training.runs import records, train, write_run_file

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


def test_the_reported_loss_is_the_mean_of_the_modules_each_over_its_own_targets(tmp_path: Path):
    """In training and in evaluation, of a real run on two ranks with two micro-batches each, as a plain model computes
    it. One step is one epoch, so the order of the samples does not matter."""
    n_samples, length = 8, 16
    (source := tmp_path / "source").mkdir()
    for name in ("train.txt", "validation.txt"):  # with its separator, one token more than the samples have
        (source / name).write_text("".join(chr(97 + i * i % 26) for i in range(n_samples * length)))
    prepare(source, tmp_path / "data", vocab_size=257, validation=0.5)
    run_file = write_run_file(tmp_path, tmp_path / "data")
    changes = {"steps": 1, "batch.global_batch": n_samples, "batch.micro_batch": 2, "model.mtp_modules": 2}
    changes |= {"model.dropout": 0.0, "evaluation.samples": n_samples, "checkpoint.every": 0}
    train(run_file, *(word for key, value in changes.items() for word in ("--set", f"{key}={value}")))

    spec = load(tmp_path / "out/run.toml").model.spec()
    initialise(model := Transformer(spec).eval(), spec, seed=3)
    reported = {(record["kind"], record["step"]): record["mtp_loss"] for record in records(run_file)}
    for kind, step, split in (("train", 1, "train"), ("evaluation", 0, "validation")):
        ids = open_split(tmp_path / "data", split).tokens(0, n_samples * length + 1)
        stream = torch.from_numpy(ids.astype("int64"))
        tokens, targets = stream[:-1].view(n_samples, length), stream[1:].view(n_samples, length)
        with torch.no_grad():
            _, *logits = model(tokens, ahead_KBT=torch.stack([tokens.roll(-1, 1), tokens.roll(-2, 1)]))
        expected = [
            float(F.cross_entropy(each[:, :-k].flatten(0, 1), targets[:, k:].flatten()))
            for k, each in enumerate(logits, start=1)
        ]
        assert reported[kind, step] == pytest.approx(sum(expected) / 2, rel=1e-5)
