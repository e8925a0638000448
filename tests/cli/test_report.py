"""Proves that `shardwright report` writes a page and a picture, tells the numbers, and refuses what is no run."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner, Result

from shardwright.cli.report import report
from shardwright.cost.expert_load import read_expert_load
from shardwright.model.presets import resolve
from shardwright.model.sections import MoESpec
from shardwright.report.comparison_view import DARK_RUN_COLOURS, RUN_COLOURS
from shardwright.runs.records import EventRecord, append_event
from shardwright.view.style import COLOURS
from tests.report.runs import PIPELINE, moe_record, train_record, usual, usual_pipeline, write_run

app = typer.Typer()
app.command()(report)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_a_report_is_a_page_a_picture_and_the_numbers(tmp_path: Path) -> None:
    done = run(usual(tmp_path))
    assert done.exit_code == 0, done.output
    assert "debug, 250K parameters, on 2 ranks with ZeRO-3" in done.stdout
    assert re.search(r"validation loss: 5\.1000 at perplexity 164; from 6\.2000, 82% of it", done.stdout)
    assert f"{tmp_path}/report.html" in done.stdout
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_json_is_one_strict_document(tmp_path: Path) -> None:
    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is not JSON")

    write_run(tmp_path, [train_record(10), train_record(20, loss=float("nan"), grad_norm=float("inf"))])
    told = json.loads(run(tmp_path, "--json").stdout, parse_constant=refuse)
    assert told["steps"] == 20
    assert told["train_loss"] is None
    assert told["first_non_finite_step"] == 20
    assert told["page"] == str(tmp_path / "report.html")


def test_the_files_go_where_they_are_wanted(tmp_path: Path) -> None:
    folder, page, picture = usual(tmp_path / "run"), tmp_path / "a" / "b.html", tmp_path / "c.svg"
    assert run(folder, "--out", page, "--picture", picture).exit_code == 0
    assert page.exists()
    assert picture.read_text().startswith("<?xml")
    assert not (folder / "report.html").exists()
    assert not (folder / "curves.png").exists()


def test_a_pipeline_is_told_measured_and_planned(tmp_path: Path) -> None:
    done = run(usual_pipeline(tmp_path))
    assert done.exit_code == 0, done.output
    assert "pipeline: 29.4% measured, 20.0% planned by 1f1b; step 50 took 17 s, planned 15 s" in done.stdout
    assert "Measured: step 50" in (tmp_path / "timeline.svg").read_text()


def test_json_has_the_numbers_of_a_pipeline(tmp_path: Path) -> None:
    told = json.loads(run(usual_pipeline(tmp_path), "--json").stdout)
    assert told["timeline"] == str(tmp_path / "timeline.svg")
    pipeline = told["pipeline"]
    assert pipeline["schedule"] == "1f1b"
    assert pipeline["bubble_planned"] == pytest.approx(0.2, abs=1e-4)
    assert pipeline["bubble_measured"] == pytest.approx(0.294, abs=1e-3)
    assert pipeline["makespan_s"] == pytest.approx(17.0, abs=1e-4)
    assert [rank["peak_in_flight"] for rank in pipeline["ranks"]] == [2, 1]


def test_a_timeline_is_written_for_a_trace_viewer_too(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    assert run(usual_pipeline(tmp_path / "run"), "--timeline", trace).exit_code == 0
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"0F0", "1B3"} <= names
    assert not (tmp_path / "run" / "timeline.svg").exists()


def test_a_timeline_that_there_is_not_is_refused(tmp_path: Path) -> None:
    done = run(usual(tmp_path / "a"), "--timeline", tmp_path / "a.svg")
    assert (done.exit_code, "layout.pp is 1" in done.stderr) == (2, True)
    done = run(write_run(tmp_path / "b", [train_record(10)], *PIPELINE), "--timeline", tmp_path / "b.svg")
    assert (done.exit_code, "no step has been recorded by all 2 ranks" in done.stderr) == (2, True)
    done = run(usual_pipeline(tmp_path / "c"), "--timeline", tmp_path / "c.pdf")
    assert (done.exit_code, "*.svg or *.json" in done.stderr) == (2, True)
    assert not list(tmp_path.glob("*/report.html"))


def test_a_run_without_a_pipeline_has_no_timeline(tmp_path: Path) -> None:
    told = json.loads(run(usual(tmp_path), "--json").stdout)
    assert told["pipeline"] is None
    assert "timeline" not in told
    assert not (tmp_path / "timeline.svg").exists()


def test_what_is_no_run_leaves_with_2_and_says_why(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.exit_code == 2
    assert "error:" in done.stderr
    assert "has no metrics.jsonl and no run.toml" in done.stderr
    assert "Traceback" not in done.output
    assert list(tmp_path.iterdir()) == []


def test_the_loads_of_a_run_are_a_file_that_a_plan_reads(tmp_path: Path) -> None:
    tokens = [[6, 2, 0, 0, 4, 4, 8, 8], [4, 4, 4, 4, 4, 4, 4, 4]]
    write_run(tmp_path, [moe_record(10, tokens_by_expert=[[4] * 8] * 2), moe_record(20, tokens_by_expert=tokens)])
    told = json.loads(run(tmp_path, "--json").stdout)
    assert told["expert_load"] == str(tmp_path / "expert_load.json")
    spec = replace(resolve("debug-moe"), n_layers=2, moe=MoESpec(n_experts=8, top_k=2, d_ffn=64))
    load = read_expert_load(told["expert_load"], spec)
    assert load.busiest(MoESpec(n_experts=8, top_k=2, d_ffn=64), np.array([1, 2, 8]), placed=False) == pytest.approx(
        [1, (1.5 + 1) / 2, (2 + 1) / 2]
    )
    told = json.loads(run(tmp_path, "--out", tmp_path / "elsewhere/page.html", "--json").stdout)
    assert told["expert_load"] == str(tmp_path / "elsewhere/expert_load.json")
    write_run(tmp_path, [moe_record(10)])
    assert "expert_load" not in json.loads(run(tmp_path, "--json").stdout)


def test_several_runs_are_one_page_with_their_losses_and_a_table_of_numbers(tmp_path: Path) -> None:
    first = usual(tmp_path / "first")
    second = write_run(tmp_path / "second", [train_record(n, loss=4.0, tokens_per_s=2e3) for n in range(1, 101)])
    page = tmp_path / "both.html"
    done = run(first, second, "--out", page)
    assert done.exit_code == 0, done.output
    assert re.search(r"^first: debug, 250K parameters, on 2 ranks with ZeRO-3$", done.stdout, re.MULTILINE)
    assert re.search(r"^training loss +5\.0000 +4\.0000$", done.stdout, re.MULTILINE)
    html = page.read_text()
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", html)
    assert cells[1:18:3] == ["50 of 100", "3.2K", "5.0000", "5.1000", "164", "1K"]
    assert cells[2:18:3] == ["100", "6.4K", "4.0000", "n/a", "n/a", "2K"]
    picture = html[html.index("<svg") : html.index("</svg>")]
    assert {"var(--run-0)", "var(--run-1)"} <= set(re.findall(r"var\([^)]*\)", picture))
    assert not re.findall(r"#[0-9a-f]{6}\b(?!\w)", picture.replace('href="#', "").replace("url(#", ""))
    assert (tmp_path / "both.png").stat().st_size > 10_000
    told = json.loads(run(first, second, "--out", page, "--json").stdout)
    assert [each["validation_loss"] for each in told["runs"]] == [5.1, None]
    assert not (first / "report.html").exists()


def test_a_timeline_of_several_runs_is_refused(tmp_path: Path) -> None:
    done = run(usual(tmp_path / "a"), usual(tmp_path / "b"), "--timeline", tmp_path / "x.svg")
    assert (done.exit_code, "is for one run, and 2 are given" in done.stderr) == (2, True)


def test_the_colours_of_runs_are_told_apart_from_all_others() -> None:
    values = [*COLOURS.values(), *RUN_COLOURS.values()]
    assert len(set(values)) == len(values)
    assert RUN_COLOURS.keys() == DARK_RUN_COLOURS.keys()


def test_events_that_are_no_part_of_every_run_are_told(tmp_path: Path) -> None:
    folder = usual(tmp_path)
    assert "events  " not in run(folder).stdout
    for event in (
        EventRecord("start", 0, "begins"),
        EventRecord("skip", 7, "step 7: the loss is nan\nmore"),
        EventRecord("hang", 9, "no progress: rank 1 <holds> up the others", rank=1),
    ):
        append_event(folder, event)
    done = run(folder)
    assert done.exit_code == 0, done.output
    assert "1 hang, 1 skip" in done.stdout
    assert "(the last: no progress: rank 1 <holds> up the others)" in done.stdout
    page = (folder / "report.html").read_text()
    assert "<h2>Events</h2>" in page
    assert "rank 1 &lt;holds&gt; up the others" in page
    (folder / "events.jsonl").write_text('{"kind": "dance"}\n')
    refused = run(folder)
    assert refused.exit_code == 2
    assert "events.jsonl, line 1 is not an event of a run" in refused.stderr
