"""Predictions of serving against published measurements, and what a table of them has to look like."""

import csv
from pathlib import Path
from statistics import fmean, median

import pytest

from shardwright.planner.run_columns import columns
from shardwright.serving.engines import ENGINES, UNNAMED, engine_of
from shardwright.serving.evaluate import MEASUREMENTS, ServingEvaluation, ServingPrediction, evaluate
from shardwright.serving.interval import HALF_WIDTHS, KINDS, half_widths
from shardwright.serving.measured import FULL, LOOP, MEASUREMENTS_TABLE, STATIC, ServingCase, SkippedServingRow, read
from shardwright.serving.models import named
from shardwright.serving.rates import OTHERS, fitted
from shardwright.system.errors import InputError
from tests.marks import prove

COLUMNS = tuple(columns(MEASUREMENTS_TABLE.row))
GOOD = {
    "id": "x1",
    "source_id": "trtllm-v0.8",
    "source": "somewhere",
    "table": "t",
    "model": "LLaMA 7B",
    "accelerator": "H100-SXM-80GB",
    "n_accelerators": "1",
    "tp": "1",
    "precision_weights": "fp8",
    "precision_kv": "fp8",
    "input_len": "128",
    "output_len": "128",
    "batch_or_concurrency": "64",
    "metric": "output_tokens_per_s",
    "value": "5000",
    "notes": "static batch",
}


def table(folder: Path, *rows: dict[str, str], header: tuple[str, ...] = COLUMNS) -> Path:
    path = folder / "table.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, header, restval="", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return path


def case(folder: Path, **changed: str) -> ServingCase | SkippedServingRow:
    return read(table(folder, GOOD | changed))[0]


@pytest.fixture(scope="module")
def published() -> ServingEvaluation:
    return evaluate(MEASUREMENTS)


@pytest.mark.prove
def test_half_widths_of_intervals_are_quantiles_of_errors_without_the_source(published: ServingEvaluation):
    found = half_widths(
        (row.case.line.source_id, row.case.line.metric, row.left_out, row.case.measured)
        for row in published.rows
        if row.left_out is not None
    )
    assert found == pytest.approx(HALF_WIDTHS, abs=2e-3)
    sources: dict[str, list[float]] = {}
    for each in published.summaries:
        if each.inside is not None:
            sources.setdefault(KINDS[each.metric], []).append(each.inside)
    assert all(0.75 <= fmean(shares) <= 0.9 for shares in sources.values())


def errors(published: ServingEvaluation, regime: str, *metrics: str, requests: int | None = None) -> list[float]:
    return [
        abs(row.error)
        for row in published.rows
        if row.case.regime == regime
        and row.case.line.metric in metrics
        and (requests is None or row.case.requests == requests)
    ]


@prove
def test_static_batches_are_within_a_guard(published: ServingEvaluation):
    found = errors(published, STATIC, "output_tokens_per_s", "e2e_latency_s")
    assert len(found) == 358
    assert fmean(found) < 0.10


@prove
def test_first_tokens_of_one_request(published: ServingEvaluation):
    found = errors(published, STATIC, "ttft_s", requests=1)
    assert len(found) == 70
    assert fmean(found) < 0.15


@prove
def test_maximum_load(published: ServingEvaluation):
    found = errors(published, FULL, "output_tokens_per_s")
    assert len(found) == 255
    assert fmean(found) < 0.08


@prove
def test_closed_loops(published: ServingEvaluation):
    further, first = errors(published, LOOP, "tpot_s"), errors(published, LOOP, "ttft_s")
    assert len(further) == len(first) == 487
    assert fmean(further) < 0.13
    assert fmean(first) < 0.30
    assert median(first) < 0.25


@prove
def test_sources_that_the_constants_have_not_seen(published: ServingEvaluation):
    found = {(each.source, each.metric): each for each in published.summaries}
    assert all(each.left_out is not None for each in found.values())
    for (_, metric), each in found.items():
        if metric != "ttft_s":
            assert each.left_out is not None
            assert each.left_out < 0.45, each


@prove
def test_rows_that_are_skipped_say_why(published: ServingEvaluation):
    assert len(published.skipped) == 23
    assert {each.reason.partition(",")[0] for each in published.skipped} == {
        "the engine Megatron has no constants; fastertransformer",
        "the lengths of prompts and answers are not stated",
    }


@prove
def test_the_document_has_every_row_once(published: ServingEvaluation):
    document = published.as_json()
    ids = [row["id"] for row in document["rows"]]
    assert len(ids) == len(set(ids)) == 1750
    for row in document["rows"]:
        assert (row["predicted"] is None) == (row["skipped"] is not None)
        assert row["measured"] > 0
    for each in document["sources"]:
        rows: list[ServingPrediction] = [
            row
            for row in published.rows
            if (row.case.line.source_id, row.case.regime, row.case.line.metric)
            == (each["source"], each["regime"], each["metric"])
        ]
        assert each["n"] == len(rows)
        assert each["mean_absolute"] == pytest.approx(fmean(abs(row.predicted / row.case.measured - 1) for row in rows))


def test_every_problem_of_a_row_or_of_the_columns_is_told_at_once(tmp_path: Path):
    bad = GOOD | {"tp": "two", "value": "-1", "model": "", "id": ""}
    _, skipped = read(table(tmp_path, GOOD, bad))
    assert isinstance(skipped, SkippedServingRow)
    for part in ("tp='two'", "value='-1'", "model is empty", "id is empty"):
        assert part in skipped.reason
    document = evaluate(table(tmp_path, GOOD, bad, GOOD | {"id": "", "metric": "itl"})).as_json()
    assert [row["measured"] for row in document["rows"]] == [5000, "-1", 5000]
    assert [row["metric"] for row in document["rows"]] == [GOOD["metric"], GOOD["metric"], "itl"]
    assert [row["id"] for row in document["rows"]] == ["x1", "line 3", "line 4"]
    with pytest.raises(InputError, match="row 3: id=x1: row 2 has the same"):
        read(table(tmp_path, GOOD, GOOD))
    with pytest.raises(InputError, match="column 'tpp' is not known"):
        read(table(tmp_path, GOOD, header=(*COLUMNS[:-1], "tpp")))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"model": "Nobody 3B"}, "model 'Nobody 3B' is not known"),
        ({"accelerator": "abacus"}, "accelerator 'abacus' is not known"),
        ({"tp": "3", "n_accelerators": "3"}, "tp=3 does not divide 32 query heads (32 = 3*10 + 2)"),
        ({"tp": "2"}, "tp 2 x pp 1 x dp 1 = 2, not n_accelerators=1"),
        ({"accelerator": "A100-SXM4-80GB"}, "a100-80gb has no matmuls in fp8"),
        ({"precision_weights": "int3"}, "precision_weights='int3': valid: fp32, bf16"),
        ({"precision_kv": "int4"}, "precision_kv='int4': valid: fp32, bf16"),
        ({"metric": "itl"}, "metric='itl': valid: output_tokens_per_s"),
        ({"input_len": ""}, "the lengths of prompts and answers are not stated"),
        ({"notes": "static batch; ENGINE: Megatron (not FasterTransformer)"}, "the engine Megatron has no constants"),
    ],
)
def test_what_cannot_be_priced_is_skipped(tmp_path: Path, changed: dict[str, str], reason: str):
    found = case(tmp_path, **changed)
    assert isinstance(found, SkippedServingRow)
    assert reason in found.reason


def test_a_row_that_names_no_engine_has_what_those_of_today_share(tmp_path: Path):
    found = case(tmp_path, source_id="mine", source="mine")
    assert isinstance(found, ServingCase)
    assert found.engine is UNNAMED
    assert any("no engine is named" in text for text in found.assumed)
    rates = fitted()[0]
    assert rates.rates(found.engine.name, "h100") == rates.rates("an engine that nobody has measured", "h100")


def test_engines_are_like_one_another_down_to_those_of_today():
    for each in ENGINES:
        seen = [each.name]
        while seen[-1] != OTHERS:
            seen.append(next(other.like for other in ENGINES if other.name == seen[-1]))
            assert len(seen) == len(set(seen)), seen


def test_how_requests_arrive_is_read_from_what_the_row_says(tmp_path: Path):
    for changed, regime in (
        ({}, STATIC),
        ({"batch_or_concurrency": "", "notes": "offered at infinite rate"}, FULL),
        ({"source_id": "vllm-0.9", "notes": "closed loop", "metric": "tpot_s", "value": "0.01"}, LOOP),
        ({"source_id": "vllm-0.9", "notes": "", "metric": "e2e_latency_s", "value": "1"}, STATIC),
    ):
        found = case(tmp_path, **changed)
        assert isinstance(found, ServingCase)
        assert found.regime == regime


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("trtllm-v0.5", "trtllm-0.5"),
        ("TensorRT-LLM v0.9", "trtllm-0.8"),
        ("trtllm-v0.17 of NVIDIA/TensorRT-LLM", "trtllm-0.17"),
        ("trtllm 1.2.0rc6", "trtllm-1"),
        ("trtllm ; something", "trtllm-1"),
        ("vLLM 0.10.0 against TensorRT-LLM", "vllm"),
        ("NVIDIA/FasterTransformer docs", "fastertransformer"),
    ],
)
def test_generations_of_engines(text: str, name: str):
    found = engine_of(text)
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama-3.1-70b"),
        ("Qwen3-235B-A22B-FP8", "qwen3-235b-a22b"),
        ("DeepSeek-R1-0528", "deepseek-v3"),
        ("LLaMA 70B", "llama-2-70b"),
        ("Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
    ],
)
def test_names_of_models_in_tables(text: str, name: str):
    assert named(text)[0] == name


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-2-70b", 68.98),
        ("mistral-7b", 7.24),
        ("mixtral-8x22b", 140.6),
        ("qwen2.5-72b", 72.7),
        ("falcon-180b", 179),
        ("internlm-20b", 20.1),
        ("yi-34b", 34.4),
        ("qwen-72b", 72.3),
        ("mistral-nemo-12b", 12.25),
        ("mistral-small-24b", 23.6),
        ("llama-4-scout", 107.8),
    ],
)
def test_sizes_of_served_models_are_the_published_ones(name: str, billions: float):
    assert named(name)[1].n_parameters / 1e9 == pytest.approx(billions, rel=0.01)
