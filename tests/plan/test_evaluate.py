"""The planner's error on published runs, source by source, stays under what the field has reached."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import pytest

from shardwright.plan import megatron_ci
from shardwright.plan.evaluate import MEASURED_RUNS, Evaluation, Row, evaluate, report_lines
from shardwright.plan.run_model import HABITS


@pytest.fixture(scope="module")
def published() -> Evaluation:
    return evaluate(MEASURED_RUNS)


def error(rows: list[Row], quantity: str) -> float:
    """Mean absolute error over all rows where the quantity was measured."""
    found = [abs(error) for row in rows if (error := row.error(quantity)) is not None]
    assert found
    return fmean(found)


# What others reach on the same rows: Calculon 3.65 % on the first and 10.3 % on the second, 19.7 % and 39 % on those of
# vTrain, which itself profiles each model first and has 14.7 % over nodes.
@pytest.mark.parametrize(
    ("source", "at_most", "rows"),
    [
        ("Korthikanti", 0.036, 8),
        ("SC21", 0.06, 10),
        ("vTrain MICRO24 ground truth (multi-node)", 0.12, 50),
        ("vTrain MICRO24 ground truth (single-node)", 0.15, 140),
        ("Zero Bubble", 0.06, 27),
    ],
)
def test_step_times_of_megatron_runs(published: Evaluation, source: str, at_most: float, rows: int):
    those = [row for row in published.rows if source in row.run.source]
    assert len(those) == rows
    assert error(those, "step time") <= at_most


def test_step_times_of_every_table_of_llm_foundry(published: Evaluation):
    those = [row for row in published.rows if "llm-foundry" in row.run.source]
    assert len(those) == 89
    assert error(those, "step time") <= 0.08
    for source in {row.run.source for row in those}:
        assert error([row for row in those if row.run.source == source], "step time") <= 0.08, source


def test_step_times_of_torchtitan_in_bf16(published: Evaluation):
    those = [row for row in published.rows if "torchtitan" in row.run.source and row.run.job.precision == "bf16"]
    assert len(those) == 8
    assert error(those, "step time") <= 0.08


def test_peak_memory_of_torchtitan(published: Evaluation):
    those = [row for row in published.rows if "llama3_h100_202412_torchtitan" in row.run.source]
    assert len(those) == 18
    assert error(those, "peak memory") <= 0.08


def test_peak_memory_of_megatrons_own_tests():
    found = evaluate(MEASURED_RUNS.with_name("megatron_ci_memory.csv"))
    those = [row for row in found.rows if (row.run.measured_peak_gib or 0) > 2]
    assert len(those) >= 80
    assert error(those, "peak memory") <= 0.03, "required: 0.05"
    # What is left out is no decoder, not plainly trained, or not described.
    assert len(those) + len(found.skipped) < len(found.rows) + len(found.skipped) == 301


def test_a_source_that_the_constants_have_not_seen_is_predicted_too(published: Evaluation):
    unseen = [each.left_out for each in published.summaries if each.quantity == "step time"]
    assert all(each is not None for each in unseen)
    seen = [each.mean_absolute for each in published.summaries if each.quantity == "step time"]
    assert fmean(each for each in unseen if each is not None) <= 2 * fmean(seen)


def test_only_a_row_without_a_measurement_is_skipped(published: Evaluation):
    assert [each.reason for each in published.skipped] == ["neither step_time_s nor peak_mem_gib is given"]


def test_the_report_names_every_row_and_source(published: Evaluation):
    text = "\n".join(report_lines(published))
    for summary in published.summaries:
        assert f"{summary.quantity}, {summary.source}" in text
    assert "assumed: " in text
    assert "skipped: neither step_time_s nor peak_mem_gib is given (row 20)" in text


def test_the_table_in_the_documentation_is_what_is_printed(published: Evaluation):
    page = (Path(__file__).parents[2] / "docs/plan.md").read_text()
    lines = list(report_lines(published))
    table = lines[lines.index("") + 1 :]
    assert len(table) > 15
    assert "\n".join(table) in page


def test_the_answer_for_machines_has_a_prediction_for_each_measurement(published: Evaluation):
    answer = json.loads(json.dumps(published.as_json()))
    assert [row["row"] for row in answer["rows"]] == list(range(2, 368))
    for row in answer["rows"]:
        if row["skipped"] is None:
            assert row["predicted_step_time_s"] > 0
            assert row["predicted_peak_mem_gib"] > 0
    by_source = {(each["source"], each["quantity"]): each for each in answer["sources"]}
    assert len(by_source) == len(published.summaries)


def test_a_row_may_leave_out_what_can_be_assumed(write: Callable[..., Path]):
    row = RUN | dict.fromkeys(("kv_heads", "ffn", "vocab", "gpus_per_node", "interconnect", "dp", "precision"), "")
    found = evaluate(write(row))
    assert not found.skipped
    assumed = found.rows[0].run.assumed
    assert {text.split("=")[0] for text in assumed} >= {"ffn", "vocab", "gpus_per_node", "precision"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"gpu": "TPU-v9"}, "TPU-v9"),
        ({"layers": "many"}, "layers='many' is not a number"),
        ({"layers": "12.5"}, "layers=12.5 is not a whole number"),
        ({"layers": ""}, "layers is empty"),
        ({"step_time_s": "-1"}, "step_time_s=-1 is not positive"),
        ({"dp": "3"}, "dp 3 = 24, not n_gpus=64"),
        ({"global_batch": "65"}, "global_batch=65 is not a multiple of micro_batch 1 x dp 8"),
        ({"model": "T5-11B"}, "T5-11B is not a decoder"),
        ({"pp": "2", "dp": "4", "schedule": "sideways"}, "schedule='sideways' is not known"),
        ({"step_time_s": "inf"}, "step_time_s=inf is not finite"),
        ({"step_time_s": "1e-320"}, "no plausible measurement"),
        ({"layers": "1e30"}, "layers=1e30 is more than"),
        ({"vocab": "1e400"}, "vocab=1e400 is not finite"),
        ({"precision": "fp8"}, "no figures for it on a100-80gb; valid: "),
        ({"pp": "2", "dp": "4", "vpp": "max", "layers": "1", "schedule": "1F1B-I"}, "fewer layers than ranks of pp"),
        ({"pp": "2", "dp": "4", "layers": "3", "schedule": "1F1B-I"}, "make 4 stages, more than the 3 layers"),
        ({"pp": "16", "tp": "4", "dp": "1", "layers": "12"}, "make 16 stages, more than the 12 layers"),
        ({"heads": "7000"}, "heads=7000 does not divide hidden=6144"),
        ({"hidden": "6145"}, "heads=64 does not divide hidden=6145"),
        ({"kv_heads": "5"}, "n_kv_heads=5 does not divide n_heads=64"),
        ({"kv_heads": "1", "heads": "4"}, "tp=8 does not divide 4 query heads"),
        ({"ffn": "1001"}, "tp=8 does not divide 1001 ffn features"),
        ({"seq": "2046", "cp": "2", "dp": "4"}, "seq_len=2046 is not a multiple of"),
        ({"cp": "0"}, "cp=0 is not positive"),
        ({"experts": "8", "topk": "9"}, "top_k=9 is more than moe.n_experts=8"),
        ({"experts": "8", "topk": "2", "ep": "16"}, "ep=16 does not divide 8 experts; valid: 1, 2, 4, 8"),
        ({"zero_stage": "9"}, "zero_stage=9 is no stage of ZeRO; valid: 0, 1, 2, 3"),
        ({"tp": "1", "pp": "3", "n_gpus": "24", "schedule": "dualpipe"}, "pp=3 is odd"),
        ({"tp": "1", "pp": "8", "global_batch": "24", "schedule": "dualpipe"}, "microbatches=3 is odd"),
    ],
)
def test_a_row_that_cannot_be_predicted_is_skipped_with_the_reason(
    write: Callable[..., Path], change: dict[str, str], reason: str
):
    found = evaluate(write(RUN | change, RUN))
    assert len(found.rows) == 1
    assert reason in found.skipped[0].reason


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"recompute": "sometimes"}, {"recompute='sometimes' read as none"}),
        ({"precision": "int4"}, {"precision='int4' read as bf16"}),
        ({"zero_stage": "", "kv_heads": ""}, {"zero_stage=0", "kv_heads=heads"}),
        ({"tp": "", "pp": "", "cp": "", "dp": ""}, {"tp, pp, cp=1", "dp=n_gpus / (tp x pp x cp)"}),
        ({"pp": "2", "dp": "4"}, {"schedule=1f1b", "no sequence parallelism over tp"}),
        ({"pp": "2", "dp": "4", "schedule": "1F1B-I", "vpp": "0"}, {"vpp=2 (usual)"}),
        ({"pp": "2", "dp": "4", "schedule": "1F1B-I", "vpp": ""}, {"vpp=2 (usual)"}),
        ({"pp": "2", "dp": "4", "schedule": "1F1B", "vpp": "0"}, set[str]()),
        ({"pp": "2", "dp": "4", "schedule": "1F1B", "vpp": "3"}, {"schedule=interleaved-1f1b, as vpp is more than 1"}),
        ({"pp": "2", "dp": "4", "schedule": "gpipe", "vpp": "3"}, {"vpp does nothing under afab"}),
        ({"ep": "8"}, {"ep=8 does nothing without experts"}),
        ({"experts": "0", "ep": "8"}, {"ep=8 does nothing without experts"}),
        ({"model": "Llama"}, {HABITS["llama"]}),
        ({}, {"gpt habits: biases, learned positions, tied embedding, dropout 0.1"}),
        ({"interconnect": ""}, {"network between nodes as usual with a100-80gb"}),
        ({"interconnect": "0Gb/s per GPU"}, {"network between nodes as usual with a100-80gb"}),
    ],
)
def test_what_a_row_leaves_open_is_said(write: Callable[..., Path], change: dict[str, str], said: set[str]):
    found = evaluate(write({"vpp": "", "experts": "", "ep": ""} | RUN | change))
    assert not found.skipped
    assert set(found.rows[0].run.assumed) >= said


def test_a_skipped_row_has_the_keys_of_the_others(write: Callable[..., Path]):
    rows = evaluate(write(RUN, RUN | {"layers": ""})).as_json()["rows"]
    assert rows[0].keys() == rows[1].keys()
    assert {rows[1][key] for key in rows[1] if "predicted" in key or "measured" in key} == {None}


HOSTILE = ("", "0", "1", "-1", "0.5", "7", "1000", "1e5", "1e7", "1e30", "1e400", "inf", "-inf", "nan", "x", "9" * 400)
HOSTILE += ("sometimes", "max", "9" * 400 + "Gb/s per GPU", "2x", "True", "a/b/c", "Infinity", "\u0663", "0x10", "-0")


def check_hostile(path: Path) -> None:
    found = evaluate(path)
    assert len(found.rows) + len(found.skipped) == len(HOSTILE) + 1
    assert found.rows[0].run.row == 2, "the row as it was"
    json.dumps(found.as_json(), allow_nan=False)
    assert list(report_lines(found))


COLUMNS = """
    source model layers hidden heads kv_heads ffn vocab seq experts topk moe_ffn gpu n_gpus
    gpus_per_node interconnect tp pp vpp cp ep dp zero_stage schedule micro_batch global_batch recompute precision
    step_time_s peak_mem_gib notes
"""


@pytest.mark.parametrize("pipeline", [False, True])
@pytest.mark.parametrize("column", COLUMNS.split())
def test_no_cell_of_a_table_of_runs_ends_it(write: Callable[..., Path], column: str, pipeline: bool):
    row = dict.fromkeys(COLUMNS.split(), "") | RUN
    if pipeline:
        row |= {"pp": "4", "dp": "2", "schedule": "1F1B-I", "vpp": "2", "experts": "8", "topk": "2", "ep": "2"}
    check_hostile(write(row, *(row | {column: value} for value in HOSTILE)))


NOT_SAID = """
    kv_heads ffn swiglu vocab untie experts topk moe_ffn sp layers_per_vpp etp dist_opt fsdp recompute
    fp16 fp8 attn_backend impl mla mtp
"""
TEST = dict.fromkeys(NOT_SAID.split(), "") | {
    "source_file": "tests/functional_tests/test_cases/gpt/some.json",
    "test": "gpt3_tp2_pp2",
    "platform": "dgx_h100",
    "mem_max_GiB": "4",
    "layers": "12",
    "hidden": "512",
    "heads": "8",
    "seq": "1024",
    "mbs": "4",
    "gbs": "32",
    "n_gpus_from_recipe": "8",
    "tp": "2",
    "pp": "2",
    "cp": "1",
    "ep": "1",
}


@pytest.mark.parametrize("experts", ["", "8"])
@pytest.mark.parametrize("column", TEST)
def test_no_cell_of_a_table_of_megatrons_tests_ends_it(write: Callable[..., Path], column: str, experts: str):
    row = TEST | {"experts": experts, "topk": experts and "2"}
    check_hostile(write(row, *(row | {column: value} for value in HOSTILE)))


def test_a_table_of_megatrons_tests_needs_no_more_than_the_columns_that_tell_it(write: Callable[..., Path]):
    row = {column: TEST[column] for column in megatron_ci.NEEDED}
    found = evaluate(write(row, row | {"gbs": ""}))
    assert len(found.rows) == 1
    assert {"tp, pp, cp, ep=1", "n_gpus_from_recipe=8 (usual)"} <= set(found.rows[0].run.assumed)
    assert found.skipped[0].reason == "gbs is empty"


RUN = {
    "source": "somewhere",
    "model": "GPT-22B",
    "layers": "48",
    "hidden": "6144",
    "heads": "64",
    "kv_heads": "64",
    "ffn": "24576",
    "vocab": "51200",
    "seq": "2048",
    "gpu": "A100-80GB-SXM",
    "n_gpus": "64",
    "gpus_per_node": "8",
    "interconnect": "NVLink3+8xHDR IB",
    "tp": "8",
    "pp": "1",
    "cp": "1",
    "dp": "8",
    "zero_stage": "0",
    "schedule": "",
    "micro_batch": "1",
    "global_batch": "64",
    "recompute": "full",
    "precision": "bf16",
    "step_time_s": "3",
}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write rows to a CSV."""

    def to_file(*rows: dict[str, str]) -> Path:
        path = tmp_path / "runs.csv"
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        return path

    return to_file
