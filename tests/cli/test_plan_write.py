"""Proves what `shardwright plan` writes: run files that train takes, and a page that needs nothing else."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardwright.cli.main import app
from shardwright.config import load
from shardwright.planner.choice import read
from tests.cli.plans import EXAMPLES, REAL, SMALL, TINY, document, plan


def test_a_layout_is_written_as_a_run_file_that_train_takes(tmp_path: Path):
    path = tmp_path / "run.toml"
    known = ("--fix", "pp=1,cp=1,tp=1")  # fewer layouts are searched
    recommended = document(*REAL, *known)["recommended"]["text"]
    assert plan(*REAL, *known, "--write", path).exit_code == 0
    config = load(path)
    assert config.layout.layout() == read(recommended).layout
    assert config.model.preset == "llama-3.1-8b"
    assert config.precision.compute == "bf16"
    again = plan(path, "--cluster", "h100:8", *known, "--json")
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout)["recommended"]["text"] == recommended


def test_a_run_file_is_planned_and_written_back_with_all_else_as_it_was(tmp_path: Path):
    source, path = EXAMPLES / "llama-3.1-8b.toml", tmp_path / "planned.toml"
    result = plan(source, "--cluster", "h100:32", "--fix", "pp=1,cp=1,tp=1", "--write", path)
    assert result.exit_code == 0, result.output
    before, after = load(source), load(path)
    assert after.layout.layout().world_size == 32
    assert after.data == before.data
    assert after.optimizer == before.optimizer
    assert after.batch.global_batch == before.batch.global_batch
    given = document(source, "--cluster", "h100:32", "--fix", "pp=1,cp=1,tp=1", "--global-batch", 2048)
    assert given["global_batch"] == 2048


def test_a_run_file_that_is_written_back_begins_a_run_of_its_own(tmp_path: Path):
    source, path = tmp_path / "run.toml", tmp_path / "planned.toml"
    text = (EXAMPLES / "debug.toml").read_text()
    source.write_text(text.replace("[checkpoint]", '[checkpoint]\nresume = "auto"\nkeep_last = 7'))
    result = plan(source, "--cluster", "h100:1/1", "--precision", "bf16", "--write", path, columns=400)
    assert result.exit_code == 0, result.output
    before, after = load(source), load(path)
    assert (before.checkpoint.resume, after.checkpoint.resume) == ("auto", "no")
    assert after.checkpoint.keep_last == 7
    assert after.out == f"{before.out}-planned"
    assert f"its out is a new folder, {after.out}" in result.output
    assert f"# out is a new folder, so that the run in {json.dumps(before.out)} stays" in path.read_text()


def test_a_file_that_exists_is_replaced_only_where_that_is_asked_for(tmp_path: Path):
    path = tmp_path / "run.toml"
    path.write_text("mine")
    result = plan(*TINY, "--write", path, columns=400)
    assert result.exit_code == 2
    assert result.output == f"error: --write {path}: the file exists; name another, or add --overwrite to replace it\n"
    assert path.read_text() == "mine"
    assert plan(*TINY, "--write", path, "--overwrite").exit_code == 0
    assert load(path).model.preset == "debug"


def test_files_are_written_even_where_the_reader_of_the_output_leaves(tmp_path: Path):
    path = tmp_path / "run.toml"
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "shardwright", "plan", *map(str, TINY), "--write", str(path)]
    subprocess.run(command, stdout=writer, stderr=subprocess.DEVNULL, timeout=60, check=False)
    os.close(writer)
    assert load(path).model.preset == "debug"


def test_an_explained_layout_can_be_written_too(tmp_path: Path):
    path = tmp_path / "run.toml"
    text = "tp=2,dp_shard=4,zero=2,micro_batch=2"
    assert plan(*SMALL, "--explain", text, "--write", path).exit_code == 0
    assert load(path).layout.layout() == read(text).layout
    assert load(path).batch.micro_batch == 2


@pytest.mark.prove
def test_a_page_needs_nothing_else(tmp_path: Path):
    path = tmp_path / "plan.html"
    result = plan(*REAL, "--fix", "pp=1,cp=1", "--top", 4, "--html", path, "--budget-tokens", "1e12")
    assert result.exit_code == 0, result.output
    page = path.read_text()
    assert page.count("<svg") == 4
    assert not re.search(r'(src|href)="(?!#)', page)
    assert "<script" not in page
    for part in (
        "The best layout",
        "Memory by kind",
        "More accelerators",
        "accelerator-hours",
        "another zero",
    ):
        assert part in page
    assert not re.search(r"#[0-9a-f]{6}", page.split("</style>", 1)[1].split("<footer")[0]), "a colour without a role"


def test_what_is_written_is_run_dry_without_another_option(tmp_path: Path):
    path = tmp_path / "run.toml"
    assert plan(*TINY, "--write", path).exit_code == 0
    assert load(path).memory_gib == pytest.approx(79.1)
    result = CliRunner().invoke(app, ["dryrun", str(path), "--json"])
    assert result.exit_code == 0, result.output
    assert CliRunner().invoke(app, ["dryrun", str(path), "--json", "--cluster", "h100:2"]).exit_code == 0


def test_a_written_run_has_the_steps_of_its_stages_and_no_stage_that_it_does_not_reach(tmp_path: Path):
    path = tmp_path / "run.toml"
    asked = ("--model", "debug", "--cluster", "h100:2/2", "--global-batch", 16, "--seq-len", 64, "--top", 1)
    stages = ("--budget-tokens", "1e6", "--batch-stages", "0:4,1e5:8,5e5:16,2e6:32")
    assert plan(*asked, *stages, "--write", path).exit_code == 0
    config = load(path)
    assert [stage.global_batch for stage in config.batch.schedule.stages] == [4, 8, 16]
    assert config.batch.schedule.tokens(config.steps) == pytest.approx(1e6, abs=16 * 64)


def test_nothing_is_written_for_a_layout_that_cannot_run_a_stage(tmp_path: Path):
    path = tmp_path / "run.toml"
    asked = ("--model", "debug", "--cluster", "h100:8/8", "--global-batch", 64, "--seq-len", 64)
    stages = ("--budget-tokens", "1e6", "--batch-stages", "0:4,1e5:64")
    refused = plan(*asked, *stages, "--fix", "dp_replicate=8", "--write", path)
    assert refused.exit_code == 2
    assert "the stage of 4 sequences of 64 tokens on" in refused.output
    assert not path.exists()


def test_every_wrong_stage_is_told_and_a_stage_has_the_length_of_the_run_file(tmp_path: Path) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text(
        'out = "out"\nsteps = 9\ndata = { path = "tokens" }\nbatch = { seq_len = 64, global_batch = 8 }\n'
    )
    options = (run_file, "--cluster", "h100:8", "--budget-tokens", "1e6", "--batch-stages")
    result = plan(*options, "1:8,nonsense,2e5:0", columns=400)
    assert result.exit_code == 2
    for said in (
        "'1:8': the first stage starts at 0",
        "'nonsense': write TOKENS:BATCH",
        "'2e5:0': a batch and a length",
    ):
        assert said in result.output
    assert plan(*options, "0:8,1e5:16").exit_code == 0
