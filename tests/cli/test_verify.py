"""Proves that `shardwright verify` answers yes with 0, no with 1 and the culprit, bad input with 2, a crash with 3."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from shardwright.cli import common
from shardwright.cli.main import app
from shardwright.config import parse
from shardwright.layout.layout import Layout
from shardwright.verification import Case, Verifier
from shardwright.verification.case import case_of
from shardwright.verification.trace import RankTrace
from shardwright.verification.view import sizes
from tests.marks import prove
from tests.mutation import Mutation
from tests.training.runs import is_alive
from tests.training.worlds import train_mutated

RUN = """
out = "nowhere"
steps = 4
[model]
preset = "debug"
[data]
path = "/no/data/is/needed"
[batch]
seq_len = 64
global_batch = 8
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


def verify(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["verify", *map(str, arguments)], env={"COLUMNS": "160"})


def with_bug(monkeypatch: pytest.MonkeyPatch, mutation: Mutation) -> None:
    monkeypatch.setattr(Verifier.__init__, "__defaults__", (partial(train_mutated, (mutation,)), 60.0))


TWICE = Mutation(
    "shardwright.parallel.apply:shard", "group.set_gradient_divide_factor(1.0)", "group.set_gradient_divide_factor(0.5)"
)


def test_a_layout_that_is_equal_is_a_yes(run_file: Path):
    result = verify(run_file, "--set", "layout.dp_shard=2")
    assert result.exit_code == 0, result.output
    assert "dp_shard 2, zero 3 against one process" in result.output
    assert "equal:" in result.output
    assert "layers.0" in result.output or "layers.1" in result.output


@pytest.mark.prove
def test_a_layout_that_is_not_is_a_no_with_the_culprit(run_file: Path, monkeypatch: pytest.MonkeyPatch):
    with_bug(monkeypatch, TWICE)
    result = verify(run_file, "--set", "layout.dp_shard=2", "--set", "layout.dp_replicate=2", "--json")
    assert result.exit_code == 1, result.output
    found = json.loads(result.stdout)
    assert not found["equal"]
    # Replicas, and accumulation, do not matter; FSDP's sum does.
    assert "differs: dp_shard 2, zero 1 (2 ranks)" in found["culprit"]
    assert found["worst"][0]["error"] > 0.1


@prove
def test_the_verdict_and_the_culprit_come_first_and_no_name_is_cut(run_file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(common.console, "width", 40)
    with_bug(monkeypatch, TWICE)
    result = verify(run_file, "--set", "layout.dp_shard=2", "--steps", "1")
    assert result.exit_code == 1, result.output
    verdict, error, replicas, culprit, *rest = result.stdout.splitlines()
    assert verdict.startswith("not equal: ")
    assert error.startswith("largest error: ")
    assert replicas.startswith("replicas: ")
    assert culprit.startswith("culprit: ")
    assert any(line.startswith("dp_shard 2, zero 3 against one process") for line in rest)
    assert "…" not in result.stdout
    rows = [line.split() for line in rest if line.startswith(("gradient, ", "parameter, "))]
    assert rows
    named = verify(run_file, "--set", "layout.dp_shard=2", "--steps", "1", "--json")
    whole = {row["name"] for row in json.loads(named.stdout)["worst"]}
    assert {row[-6] for row in rows if row[-1] == "no"} <= whole


def test_the_stages_of_a_pipeline_are_cut_with_the_model(run_file: Path):
    stages = ("--set", "model.n_layers=32", "--set", "layout.pp=2", "--set", "layout.stage_layers=[12,20]")
    result = verify(run_file, *stages, "--set", "layout.pp_schedule=zb-h1")
    assert result.exit_code == 0, result.output
    assert "pp 2, pp_schedule zb-h1, stage_layers 1+10 against one process" in result.output
    assert "reduced to 11 layers" in result.output


@prove
def test_a_pipeline_is_among_what_is_switched_off(run_file: Path, monkeypatch: pytest.MonkeyPatch):
    with_bug(monkeypatch, TWICE)
    pipeline = ("--set", "layout.pp=2", "--set", "layout.pp_schedule=zb-v", "--set", "layout.dp_shard=2")
    result = verify(run_file, *pipeline, "--steps", "1", "--json")
    assert result.exit_code == 1, result.output
    assert "differs: dp_shard 2, zero 1 (2 ranks)" in json.loads(result.stdout)["culprit"]


def test_a_layout_of_many_ranks_is_reduced_and_says_so(run_file: Path):
    large = ("--set", "layout.dp_shard=64", "--set", "batch.global_batch=64", "--set", "layout.tp=2")
    result = verify(run_file, *large, "--steps", "1")
    assert result.exit_code == 0, result.output
    assert "the layout has 128 ranks and this machine holds" in result.output
    assert "dp_shard 64 to 2" in result.output


def test_two_layouts_are_compared_with_each_other(run_file: Path):
    result = verify(run_file, "--set", "layout.dp_shard=2", "--set-b", "layout.zero=1", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["layout"], found["against"]) == ("dp_shard 2, zero 3", "dp_shard 2, zero 1")
    assert found["worst_error"] < 1e-12


def test_sides_of_other_microbatches_train_on_one_global_batch(run_file: Path):
    for one, other in ((1, 2), (2, 1)):
        sides = ("--set", f"batch.micro_batch={one}", "--set-b", f"batch.micro_batch={other}")
        result = verify(run_file, *sides, "--steps", "1", "--json")
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["replicas"] == 0, "one rank holds nothing twice"


def test_a_matrix_is_a_line_a_layout(run_file: Path):
    result = verify(run_file, "--matrix", "1", "--steps", "1", "--dtype", "float32")
    assert result.exit_code == 0, result.output
    assert "one rank" in result.output
    assert "all 11 layouts of 1 rank" in result.output


def test_a_layout_and_a_matrix_are_written_as_a_page(run_file: Path, tmp_path: Path):
    one, all_ = tmp_path / "one.html", tmp_path / "all.html"
    result = verify(run_file, "--set", "layout.dp_shard=2", "--steps", "1", "--html", one)
    assert result.exit_code == 0, result.output
    assert f"written to {one}" in result.output
    assert "<h1>dp_shard 2, zero 3: equal</h1>" in one.read_text()
    assert "layer 1" in one.read_text()
    result = verify(run_file, "--matrix", "1", "--steps", "1", "--html", all_, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["equal"], "nothing but JSON is printed"
    rows = re.findall(r"<tr>.*?</tr>", all_.read_text())
    assert any("equal</td>" in row and "one rank</td>" in row for row in rows)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--html", "page.txt"], ["--html page.txt", "*.html"]),
        (["--html", "/no/folder/page.html"], ["/no/folder", "make it first"]),
        (["--dtype", "float63"], ["float63", "did you mean 'float64'?"]),
        (["--dtype", "float63", "--against", "b", "--set", "steps=0"], ["--dtype float63", "--against b", "steps=0"]),
        (["--set", "layout.dpshard=2"], ["did you mean 'dp_shard'?"]),
        (["--set-b", "layout.zero=9"], ["layout.zero=9"]),
        (["--set-b", "model.n_layers=3"], ["model.n_layers", "another training", "layout.*"]),
        (["--against", "double"], ["double", "--set-b"]),
        (["--matrix", "2", "--set-b", "layout.zero=1"], ["--matrix", "leave one out"]),
        (["--set", "layout.tp=3"], ["tp=3", "4", "valid: 1, 2, 4"]),
        (["--set", "layout.pp=8"], ["pp=8", "8 stages, more than the 4 layers", "pp from 1 to 4"]),
        (
            [
                "--set",
                "layout.pp=2",
                "--set",
                "layout.pp_schedule=interleaved-1f1b",
                "--set",
                "layout.virtual_stages=3",
            ],
            ["virtual_stages=3 make 6 stages, more than the 4 layers", "valid: layout.pp=1, or up to 4 with"],
        ),
        (
            ["--set", "layout.pp=3", "--set", "layout.pp_schedule=dualpipe"],
            ["pp=3 is odd", "nearest: 2 or 4", "dualpipe-v"],
        ),
        (["--set", "layout.pp=2", "--set", "layout.virtual_stages=2"], ["1f1b: virtual_stages=2", "interleaved-1f1b"]),
        (["--set", "layout.pp=2", "--set", "layout.stage_layers=[1,2]"], ["2 stages of 3 layers", "valid: [2, 2]"]),
        (["--set", "layout.pp=2", "--set", "layout.stage_layers=[4]"], ["1 stages of 4 layers", "valid: [2, 2]"]),
        (
            ["--set", "layout.pp=2", "--set", "layout.pp_schedule=zb-1"],
            ["'zb-1'", "did you mean"],
        ),
        (["--set", "layout.pp_schedule=zb-h1"], ["layout.pp_schedule='zb-h1' needs pp above 1"]),
        (
            ["--set", "layout.pp=2", "--set", "layout.pp_schedule=dualpipe", "--set", "batch.global_batch=5"],
            ["microbatches=5 is odd", "nearest: 4 or 6", "batch.micro_batch"],
        ),
        (["--steps", "0"], ["--steps"]),
        (["--full", "--set", "layout.dp_shard=8", "--set", "layout.tp=3"], ["tp=3"]),
        (
            ["--full", "--set", "layout.dp_shard=128", "--set", "batch.global_batch=128"],
            ["128 ranks", "at most 64", "lower their degrees"],
        ),
        (["--full", "--set", "model.preset=llama-3.1-405b"], ["406B parameters", "TiB", "--steps"]),
    ],
)
def test_bad_input_is_refused(run_file: Path, arguments: list[str], said: list[str]):
    result = verify(run_file, *arguments)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    for part in said:
        assert part in result.output


def die(case: Case, layout: Layout, folder: Path) -> RankTrace:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    raise AssertionError("not reached")


def test_a_rank_that_dies_is_named(run_file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Verifier.__init__, "__defaults__", (die, 60.0))
    result = verify(run_file, "--set", "layout.dp_replicate=2")
    assert result.exit_code == 3, result.output
    assert "rank 1 was killed by signal 9 (SIGKILL)" in result.output


def children(pid: int) -> list[int]:
    """All that descend from a process, as Linux tells it."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found += [int(path.parent.name), *children(int(path.parent.name))]
    return found


@prove
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_ctrl_c_ends_every_rank_and_says_one_word(run_file: Path):
    command = [sys.executable, "-m", "shardwright", "verify", str(run_file), "--matrix", "4"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        # Tests that a shell runs in its background ignore SIGINT, and what they start would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    until = time.monotonic() + 60
    while len(below := children(process.pid)) < 4 and time.monotonic() < until:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    assert b"interrupted" in errors
    assert b"Traceback" not in errors
    until = time.monotonic() + 10  # the server that ranks are forked from leaves once it sees its client gone
    while any(is_alive(pid) for pid in below) and time.monotonic() < until:
        time.sleep(0.05)
    assert not [pid for pid in below if is_alive(pid)]


def test_the_report_says_that_initial_values_are_not_those_of_init_weights():
    table = {"out": "x", "steps": 1, "data": {"path": "d"}, "batch": {"seq_len": 8, "global_batch": 2}}
    plain, begun = (parse({**table, **more}) for more in ({}, {"init": {"weights": "w"}}))
    said = "; initial values from the seed, and not init.weights"
    assert [said in sizes(config, case_of(config)) for config in (plain, begun)] == [False, True]
