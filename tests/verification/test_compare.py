"""Proves that the comparison itself cannot be fooled: by what is not a number, by pieces that do not fit, by copies
that differ in one bit, by what is missing; and that it gives the same answer each time."""

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.layout.layout import Layout
from shardwright.verification import ReportRow, Verifier
from shardwright.verification.case import PLAIN_SGD
from shardwright.verification.compare import Report, differing_replicas, errors
from shardwright.verification.trace import RankTrace, Trace, TracedQuantity, TraceRecorder
from tests.distributed import run_ranks
from tests.marks import prove
from tests.training.worlds import case

GRADIENT, LOSS = TracedQuantity("gradient", PLAIN_SGD, 1), TracedQuantity("loss", PLAIN_SGD, 1)


def record(folder: Path, tensors: list[dict[str, Tensor]], loss: list[float]) -> RankTrace:
    recorder = TraceRecorder(folder)
    recorder.tensors(GRADIENT, tensors[dist.get_rank()])
    recorder.scalar(LOSS, torch.tensor(loss[dist.get_rank()]))
    return recorder.trace


def trace(folder: Path, *tensors: dict[str, Tensor], loss: list[float] | None = None) -> Trace:
    folder.mkdir()
    return Trace(folder, run_ranks(record, len(tensors), folder, list(tensors), loss or [1.0] * len(tensors)))


def test_equal_tensors_have_no_error_and_a_wrong_scale_has_its_size(tmp_path: Path):
    weights = {"w": torch.arange(1.0, 7).view(2, 3), "b": torch.ones(2)}
    expected = trace(tmp_path / "a", weights)
    assert errors(trace(tmp_path / "b", weights), expected) == {(LOSS, ""): 0, (GRADIENT, "w"): 0, (GRADIENT, "b"): 0}
    doubled = errors(trace(tmp_path / "c", weights | {"w": 2 * weights["w"]}, loss=[1.5]), expected)
    assert doubled == {(LOSS, ""): 0.5, (GRADIENT, "w"): pytest.approx(1), (GRADIENT, "b"): 0}


def test_a_gradient_that_is_only_rounding_is_measured_by_the_others(tmp_path: Path):
    big = torch.ones(100)
    expected = trace(tmp_path / "a", {"w": big, "key bias": torch.full((4,), 1e-17)})
    found = errors(trace(tmp_path / "b", {"w": big, "key bias": torch.full((4,), -1e-17)}), expected)
    assert found[GRADIENT, "key bias"] < 1e-14


def test_replicas_that_differ_in_one_bit_are_told_with_their_ranks(tmp_path: Path):
    one, other = torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    other[1] += 2**-52
    count, found = differing_replicas(trace(tmp_path / "a", {"w": one}, {"w": other}, {"w": one}, loss=[1, 1, 2]))
    assert count == 2
    assert found == [
        "loss, plain sgd, step 1: not the same bits on ranks 0,1 | 2",
        "gradient w, plain sgd, step 1: not the same bits on ranks 0,2 | 1",
    ]


def test_what_is_missing_or_of_another_shape_is_infinitely_wrong(tmp_path: Path):
    expected = trace(tmp_path / "a", {"w": torch.ones(3), "b": torch.ones(2)})
    found = errors(trace(tmp_path / "b", {"w": torch.ones(4)}), expected)
    assert found[GRADIENT, "w"] == found[GRADIENT, "b"] == math.inf


@pytest.mark.parametrize("tolerance", [0.0, 1e-10, math.inf, math.nan])
@pytest.mark.parametrize("error", [math.nan, math.inf])
def test_what_is_not_a_number_is_not_equal(error: float, tolerance: float):
    row = ReportRow(GRADIENT, "w", error, tolerance, "")
    assert not row.equal
    assert row.excess == math.inf


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_same_value_that_is_not_finite_on_both_sides_is_not_equal_and_is_named(tmp_path: Path, value: float):
    weights = {"good": torch.ones(4), "bad": torch.tensor([1.0, value])}
    expected = trace(tmp_path / "a", weights, loss=[value])
    found = errors(trace(tmp_path / "b", weights, loss=[value]), expected)
    rows = [ReportRow(quantity, name, error, math.inf, "") for (quantity, name), error in found.items()]
    assert {(row.quantity.kind, row.name) for row in rows if not row.equal} == {("gradient", "bad"), ("loss", "")}
    report = Report(case(Layout(), 1), Layout(), "one process", rows, 0)
    assert not report.equal
    assert {each["name"] for each in report.document()["worst"]} == {"bad", ""}


@prove
def test_two_comparisons_give_the_same_bits():
    layout = Layout(dp_shard=2, zero=2)
    with Verifier() as one, Verifier() as two:
        assert one.parity(case(layout, 3), layout) == two.parity(case(layout, 3), layout)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(), "one rank"),
        (Layout(dp_shard=2, tp=2, zero=3, sequence_parallel=True), "tp 2, dp_shard 2, zero 3"),
        (Layout(tp=2, sequence_parallel=False), "tp 2, sequence_parallel false"),
        (Layout(pp=2), "pp 2"),
        (Layout(dp_shard=2, cp=2, zero=1, ep=4), "cp 2, ep 4, dp_shard 2, zero 1"),
        (Layout(pp=2, pp_schedule="zb-h1"), "pp 2, pp_schedule zb-h1"),
        (
            Layout(pp=2, cp=2, pp_schedule="interleaved-1f1b", virtual_stages=2),
            "pp 2, pp_schedule interleaved-1f1b, virtual_stages 2, cp 2, zero 0",
        ),
        (Layout(pp=2, stage_layers=(1, 2)), "pp 2, stage_layers 1+2"),
        (
            Layout(pp=2, dp_shard=2, zero=3, zero_pp_gather="microbatch"),
            "pp 2, dp_shard 2, zero 3, zero_pp_gather microbatch",
        ),
    ],
)
def test_a_layout_is_told_by_what_is_not_at_its_default(layout: Layout, words: str):
    assert str(layout) == words
