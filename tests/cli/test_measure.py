"""Proves that `shardwright measure` measures this machine for plan, and refuses bad input before it starts."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from shardwright.cli import measure as module
from shardwright.cli.main import app
from shardwright.cost.hardware import cluster
from shardwright.measuring.generation import passes_of
from shardwright.model.presets import resolve
from shardwright.serving import forms
from shardwright.serving.host import rates_of
from shardwright.serving.setting import Degrees, Serving, Settings
from shardwright.system.processes import threads_of_a_rank
from shardwright.verification.ranks import run_ranks
from tests.marks import prove
from tests.report.pictures import assert_page_never_scrolls, readable_pictures


def measure(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["measure", *map(str, arguments)], env={"COLUMNS": "160"})


@prove
@pytest.mark.timeout(900)
def test_this_machine_is_measured_and_planned_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for part in ("generation", "whole_steps"):
        monkeypatch.setattr(f"shardwright.measuring.{part}.ROUNDS", 1)  # the least or median of several takes minutes
    out, page = tmp_path / "mine.toml", tmp_path / "mine.html"
    asked = ("--out", out, "--html", page, "--budget", 0.002, "--clock", "cpu", "--device", "cpu", "--ranks", 2)
    with readable_pictures(monkeypatch):
        result = measure(*asked)
    assert result.exit_code == 0, result.output
    for part in ("measured in", "fp32", "messages in a node", "disk", f"written to {out}", "--cluster mine:2"):
        assert part in result.output
    assert "heads of 64" in page.read_text()
    assert_page_never_scrolls(page.read_text())
    words = ["plan", "--model", "debug", "--cluster", "mine:2", "--global-batch", "8", "--seq-len", "128"]
    planned = CliRunner().invoke(app, [*words, "--precision", "fp32", "--hardware", str(out), "--json"])
    assert planned.exit_code == 0, planned.output
    assert json.loads(planned.stdout)["best"][0]["step_s"] > 0
    for tp in (1, 2):
        for predicted, took in generation_here(out, tp, sequences=8):
            assert 1 / 3 < predicted / took < 3, (tp, predicted, took)


def generation_here(hardware: Path, tp: int, sequences: int) -> list[tuple[float, float]]:
    """CPU-seconds of prefill and of a decode pass of a small model as predicted and as they were."""
    there = cluster(f"mine:{tp}/{tp}", hardware)
    assert there.accelerator.rates is not None
    sizes = {"d_model": 256, "d_ffn": 704, "n_heads": 8, "n_kv_heads": 4, "head_dim": 32}
    model = replace(resolve("debug"), n_layers=4, **sizes)
    serving = Serving(
        model=model, cluster=there, rates=rates_of(there.accelerator.rates), precision="fp32", kv_precision="fp32"
    )
    settings = Settings.from_layouts([Degrees(tp)])
    predicted = forms.prefill_s(serving, settings, sequences, 32), forms.decode_s(serving, settings, sequences, 36)
    ranks = run_ranks(passes_of, tp, model, "cpu", tp, sequences, 32, 9, n_threads=threads_of_a_rank(tp))
    return [(float(np.max(said)), max(rank[at] for rank in ranks)) for at, said in enumerate(predicted)]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "--out is missing; name the hardware file to write"),
        (("--out", "mine.json"), "--out mine.json: valid: a file named *.toml"),
        (("--out", "nowhere/mine.toml"), "there is no folder nowhere"),
        (("--out", "mine.toml", "--clock", "sun"), "--clock sun: not one of wall, cpu"),
        (("--out", "mine.toml", "--budget", "0"), "--budget 0: seconds above 0"),
        (("--out", "mine.toml", "--ranks", "0"), "--ranks 0: a number of 1 or more"),
        (("--out", "mine.toml", "--device", "tpu"), "--device tpu: not one of auto, cpu, cuda"),
        (("--html", "mine.svg"), "--html mine.svg: valid: a file named *.html"),
    ],
)
def test_bad_input_is_refused(arguments: tuple[str, ...], problem: str):
    result = measure(*arguments)
    assert result.exit_code == 2
    assert problem in result.output


def test_a_file_that_exists_is_kept(tmp_path: Path):
    out = tmp_path / "mine.toml"
    out.write_text("mine")
    result = measure("--out", out)
    assert result.exit_code == 2
    assert "the file exists; name another, or add --overwrite" in result.output
    assert out.read_text() == "mine"


def test_without_torch_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    result = measure("--out", tmp_path / "mine.toml")
    assert result.exit_code == 2
    assert "measure runs PyTorch, which is not installed here: pip install torch" in result.output


def test_ranks_of_torchrun_are_not_counted_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("RANK", "0")
    result = measure("--out", tmp_path / "mine.toml", "--ranks", 2)
    assert result.exit_code == 2
    assert "torchrun has started the ranks" in result.output
