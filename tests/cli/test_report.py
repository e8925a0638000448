"""Proves that `shardloom report` writes a page and a picture, tells the numbers, and refuses what is no run."""

import json
import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from shardloom.cli.report import report
from tests.report.runs import train_record, usual, write_run

app = typer.Typer()
app.command()(report)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_a_report_is_a_page_a_picture_and_the_numbers(tmp_path: Path) -> None:
    done = run(usual(tmp_path))
    assert done.exit_code == 0, done.output
    assert "debug, 250K parameters, on 2 ranks with ZeRO-3" in done.stdout
    assert re.search(r"held-out loss +6\.2000 -> 5\.1000", done.stdout)
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


def test_what_is_no_run_leaves_with_2_and_says_why(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.exit_code == 2
    assert "error:" in done.stderr
    assert "has no metrics.jsonl and no run.toml" in done.stderr
    assert "Traceback" not in done.output
    assert list(tmp_path.iterdir()) == []
