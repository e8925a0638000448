"""Proves that `shardwright plan serve` and `plan evaluate-serving` find, say, write and refuse what they should."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from shardwright.cli.main import app
from tests.cli.imports import runs_without
from tests.report.pictures import assert_page_never_scrolls, readable_pictures

ASKED = ("--model", "llama-3.1-8b", "--cluster", "h100:2/2", "--input-len", 1024, "--output-len", 128)


def serve(*arguments: object, columns: int = 300) -> Result:
    return CliRunner().invoke(app, ["plan", "serve", *map(str, arguments)], env={"COLUMNS": str(columns)})


def document(*arguments: object, exit_code: int = 0) -> Any:
    result = serve(*arguments, "--json")
    assert result.exit_code == exit_code, result.output
    return json.loads(result.stdout)


def test_the_best_is_told_with_its_times_memory_and_what_others_lose():
    result = serve(*ASKED, "--concurrency", 32, "--ttft", "1s", "--tpot", "40ms", "--price", 2, "--separate")
    assert result.exit_code == 0, result.output
    for part in ("best: ", "tokens/s", "first token", "further token", "weights", "cost", "simulated", "separate"):
        assert part in result.output, part


def test_the_document_holds_what_the_page_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with readable_pictures(monkeypatch):
        found = document(*ASKED, "--precision", "fp8", "--html", tmp_path / "plan.html", "--price", 3)
    best = found["best"][0]
    assert best["cost_per_million_tokens"] == pytest.approx(3 / 3600 / best["tokens_per_s_per_accelerator"] * 1e6)
    assert best["ttft_s"]["p50"] <= best["ttft_s"]["p95"] <= best["ttft_s"]["p99"]
    page = (tmp_path / "plan.html").read_text()
    assert f"{best['tokens_per_s']:,.0f}" in page
    assert_page_never_scrolls(page)
    assert "http" not in page.replace("http://www.w3.org", "").replace("https://matplotlib.org", "").replace(
        "http://purl.org", ""
    ).replace("http://creativecommons.org", "")
    users = [point["tokens_per_s_per_user"] for point in found["pareto"]]
    assert users == sorted(users, reverse=True)


def test_a_published_config_is_served_in_the_format_of_its_weights(tmp_path: Path):
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    config = {"model_type": "llama", **dict(zip(sizes, (64, 2, 4, 96, 64), strict=True)), "max_position_embeddings": 64,
              "quantization_config": {"quant_method": "fp8"}}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    lengths = ("--input-len", 32, "--output-len", 8)
    published = ("--model", tmp_path, "--cluster", "h100:1", *lengths)
    assert "weights fp8, cache bf16" in serve(*published).output
    assert "weights fp8, cache fp8" in serve(*published, "--precision", "fp8").output
    refused = serve("--model", tmp_path / "config.json", "--cluster", "a100:1", *lengths)
    assert refused.exit_code == 2
    assert "--precision (of the published weights) fp8: a100-80gb has no fp8" in refused.output
    assert "give --precision bf16" in refused.output
    remedied = serve("--model", tmp_path, "--cluster", "a100:1", *lengths, "--precision", "bf16")
    assert (remedied.exit_code, "weights bf16, cache bf16" in remedied.output) == (0, True)


def test_where_no_layout_fits_it_says_what_would():
    result = serve("--model", "llama-3.1-405b", "--cluster", "a100:8", "--input-len", 1000, "--output-len", 100)
    assert result.exit_code == 1
    assert "nothing fits" in result.output
    assert "16 accelerators of the same kind, twice as many" in result.output


def test_where_no_layout_keeps_the_limits_it_says_what_the_best_is():
    result = serve(*ASKED, "--tpot", "10us", "--ttft", "1ms")
    assert result.exit_code == 1
    assert "no layout keeps the limits" in result.output
    assert "shortest time of a further token" in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), ("--model is missing", "--cluster is missing", "--input-len is missing", "--output-len is missing")),
        ((*ASKED, "--precision", "fp6", "--tpot", "40", "--rate", "5"), ("--precision fp6", "--tpot 40", "--rate 5")),
        (
            (*ASKED[:3], "a100:8", *ASKED[4:], "--precision", "fp8"),
            ("a100-80gb has no fp8; it has fp32, bf16, fp16, int8, nvfp4, mxfp4, int4",),
        ),
        ((*ASKED[:5], 200_000, *ASKED[6:]), ("= 200128 tokens, and llama-3.1-8b is meant for 131072 at most",)),
        ((*ASKED, "--concurrency", 0, "--top", 0), ("--concurrency 0", "--top 0")),
        ((*ASKED, "--concurrency", 4, "--rate", "5/s"), ("leave one out",)),
        ((*ASKED, "--draft-tokens", 3), ("--acceptance",)),
        ((*ASKED, "--engine", "vlm"), ("--engine vlm", "vllm")),
        ((*ASKED, "--explain", "tp=3,top=1"), ("--explain top=1",)),
        ((*ASKED, "--explain", "tp=4"), ("not a layout of h100:2/2; valid: tp 1",)),
    ],
)
def test_bad_input_is_refused_in_a_line(arguments: tuple[object, ...], said: tuple[str, ...]):
    result = serve(*arguments)
    assert result.exit_code == 2, result.output
    for part in said:
        assert part in result.output, result.output
    assert "Traceback" not in result.output


def test_every_formula_of_a_layout_is_shown_and_comes_to_what_is_priced():
    found = document(*ASKED, "--explain", "tp=2,batch=8")
    values = {entry["what"]: entry["value"] for entry in found["formulas"] if entry["section"].startswith("decode")}
    parts = [entry for entry in found["formulas"] if entry["section"] == "decode: a layer"]
    (layer,) = [entry for entry in parts if entry["what"] == "a layer"]
    assert layer["value"] == pytest.approx(sum(layer["inputs"].values()))
    assert 32 * layer["value"] < values["a token of each request"] < 40 * layer["value"]
    assert "attention over the cache = " in serve(*ASKED, "--explain", "tp=2,batch=8").output


def test_the_evaluation_is_one_document(tmp_path: Path):
    path = tmp_path / "two.csv"
    from shardwright.serving.evaluate import MEASUREMENTS

    lines = MEASUREMENTS.read_text().splitlines()
    path.write_text("\n".join([lines[0], *[line for line in lines if ",trtllm-v0.5," in line][:5]]) + "\n")
    result = CliRunner().invoke(app, ["plan", "evaluate-serving", str(path), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert len(found["rows"]) == 5
    assert {"id", "predicted", "measured", "skipped"} <= set(found["rows"][0])
    text = CliRunner().invoke(app, ["plan", "evaluate-serving", str(path), "--rows"]).output
    assert "left out" in text
    missing = CliRunner().invoke(app, ["plan", "evaluate-serving", str(tmp_path / "no.csv")])
    assert missing.exit_code == 2


def test_a_row_with_a_bad_cell_is_skipped_and_the_other_rows_are_compared(tmp_path: Path):
    from shardwright.serving.evaluate import MEASUREMENTS

    with MEASUREMENTS.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["source_id"] == "trtllm-v0.5"][:3]
    rows[0]["tp"], rows[1]["accelerator"] = "many", "abacus"
    path = tmp_path / "three.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    result = CliRunner().invoke(app, ["plan", "evaluate-serving", str(path), "--json"])
    assert result.exit_code == 0, result.output
    skipped = [row["skipped"] for row in json.loads(result.stdout)["rows"]]
    assert None in skipped
    assert "tp='many': valid: a whole number from 1 to 999,999,999" in skipped
    assert any("accelerator 'abacus' is not known" in each for each in skipped if each)


def test_serving_is_planned_without_torch():
    runs_without({"torch"}, ["plan", "serve", *ASKED])
