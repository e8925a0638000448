"""Proves that `shardwright plan diff` compares two run files, and names everything that is wrong with either."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from shardwright.cli.main import app

RUN = '[model]\npreset = "llama-3.1-8b"\n[data]\npath = "d"\n[batch]\nseq_len = 4096\nglobal_batch = 32\n'
RUN = 'out = "runs/a"\nsteps = 10\n' + RUN + '[precision]\ncompute = "bf16"\n[layout]\n'


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    a, b = tmp_path / "a.toml", tmp_path / "b.toml"
    a.write_text(RUN + "dp_shard = 8\nzero = 3\n")
    b.write_text(RUN + "tp = 8\n")
    return a, b


def compare(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["plan", "diff", *map(str, arguments)], env={"COLUMNS": "160"})


def test_two_run_files_are_compared_term_by_term(files: tuple[Path, Path]):
    result = compare(*files, "--cluster", "h100:8")
    assert result.exit_code == 0, result.output
    for part in ("differ in dp_shard 8 -> 1", "tp 1 -> 8", "longer than A", "tensor parallel", "memory of the fullest"):
        assert part in result.output
    found = json.loads(compare(*files, "--cluster", "h100:8", "--json").stdout)
    assert sum(each["more"] for each in found["time_s"]) == pytest.approx(found["b"]["step_s"] - found["a"]["step_s"])


def test_the_second_file_may_be_for_another_cluster(files: tuple[Path, Path]):
    result = compare(files[0], files[0], "--cluster", "h100:8", "--other-cluster", "a100:8", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["choices"] == {"cluster": ["h100:8", "a100:8"]}
    assert found["time_s"][0]["name"] == "matmuls"
    assert found["slower"] > 1


def test_what_is_wrong_with_either_file_is_told_at_once(files: tuple[Path, Path]):
    files[1].write_text(RUN + "tp = 16\n")
    result = compare(*files, "--cluster", "h100:4/4")
    assert result.exit_code == 2
    assert f"A, {files[0]}: pp x dp_replicate x dp_shard x cp x tp" in result.output
    assert f"B, {files[1]}: " in result.output
    assert "--cluster is missing" in compare(*files).output
    assert compare(files[0]).exit_code == 2


def test_the_page_has_the_terms_and_a_wrong_name_of_it_is_told_with_the_other_problems(files: tuple[Path, Path]):
    page = files[0].parent / "difference.html"
    result = compare(*files, "--cluster", "h100:8", "--html", page)
    assert result.exit_code == 0, result.output
    assert "tensor parallel" in page.read_text()
    files[1].write_text(RUN + "tp = 16\n")
    result = compare(*files, "--cluster", "h100:8", "--html", page.with_suffix(".txt"))
    assert result.exit_code == 2
    assert "--html" in result.output
    assert f"B, {files[1]}: " in result.output
