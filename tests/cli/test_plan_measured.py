"""Proves that a finished run is set next to its own plan, and that a run of another kind is refused."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from shardwright.cli.main import app
from tests.report.runs import evaluation, started, train_record, write_run


def plan(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)], env={"COLUMNS": "160"})


def test_a_run_is_next_to_its_plan_term_by_term(tmp_path: Path):
    slow = {"step_s": 0.5, "data_s": 0.3, "forward_backward_s": 0.1, "optimizer_s": 0.1, "tokens_per_s": 128.0}
    records = [train_record(10, step_s=9.0, data_s=9.0), *(train_record(step, mfu=0.25, **slow) for step in (20, 30))]
    folder = write_run(tmp_path / "run", [started(0), *records])
    asked = (folder / "run.toml", "--measured", folder, "--cluster", "h100:2")
    explained = plan(folder / "run.toml", "--cluster", "h100:2", "--explain", folder / "run.toml", "--json")
    planned = json.loads(explained.stdout)
    told = json.loads(plan(*asked, "--json").stdout)["measured"]
    terms = {each["name"]: each for each in told["terms"]}
    measured = {"step": 0.5, "tokens per second": 128.0, "MFU": 0.25, "peak memory, rank 0": 2**20, "data": 0.3}
    assert {name: terms[name]["measured"] for name in measured} == measured, "medians"
    assert terms["step"]["planned"] == planned["step_s"]
    assert terms["MFU"]["planned"] == planned["mfu_full"]
    assert terms["tokens per second"]["planned"] == 64 / planned["step_s"]
    assert terms["step"]["ratio"] == 0.5 / planned["step_s"]
    assert terms["optimizer"]["planned"] == planned["time_s"]["optimizer"]
    parts = [terms[name]["planned"] for name in ("data", "forward + backward", "optimizer")]
    assert sum(parts) == pytest.approx(planned["step_s"])
    in_kinds = sum(held[0] for held in planned["memory_by_kind_bytes"].values())
    assert terms["peak memory, rank 0"]["planned"] == in_kinds, "of a GPU what its allocator gave, without its gaps"
    text = plan(*asked)
    assert text.exit_code == 0
    assert "steps 1 to 30: medians of 3 records" in text.output
    assert "data differs most: 300 ms measured and 0 us planned, 300 ms more" in text.output


def test_only_the_steps_on_the_last_layout_are_compared(tmp_path: Path):
    records = [started(0, "4 ranks", "dp_shard 4"), train_record(10), started(10), train_record(20, step_s=1.0)]
    folder = write_run(tmp_path / "run", records)
    told = json.loads(plan(folder / "run.toml", "--measured", folder, "--cluster", "h100:2", "--json").stdout)
    assert told["measured"]["terms"][0]["measured"] == 1.0
    assert (told["measured"]["steps"], told["measured"]["n_records"]) == ("steps 11 to 20", 1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("layout.tp=2 layout.dp_shard=1", "layout.tp=1, layout.dp_shard=2"),
        ("model.n_layers=2", "this is a run with model.n_layers=4, and "),
        ("batch.global_batch=8", "this is a run with batch.global_batch=4, and "),
        ("layout.zero=1", "layout.zero=3, and "),
    ],
)
def test_a_run_of_another_file_is_refused_with_what_differs(tmp_path: Path, change: str, said: str):
    folder = write_run(tmp_path / "run", [train_record(10)])
    other = write_run(tmp_path / "other", [], *change.split()) / "run.toml"
    result = plan(other, "--measured", folder, "--cluster", "h100:2")
    assert result.exit_code == 2
    assert all(part in result.output for part in (said, f"compare the run with its own file, {folder / 'run.toml'}"))


def test_what_cannot_be_compared_is_refused_in_a_line(tmp_path: Path):
    run = write_run(tmp_path / "run", [train_record(10)])
    begun = write_run(tmp_path / "begun", [started(0)])
    evaluated = write_run(tmp_path / "evaluated", [evaluation(0, 6.2)])
    on, file = ("--cluster", "h100:2"), run / "run.toml"
    cases = (
        ((file, "--measured", tmp_path / "nothere", *on), "nothere: no such folder; runs in "),
        ((file, "--measured", file, *on), "run.toml is a file; give the folder of a run"),
        ((begun / "run.toml", "--measured", begun, *on), "has no logged step yet"),
        ((evaluated / "run.toml", "--measured", evaluated, *on), "the run has evaluations and no logged step"),
        ((file, "--measured", run), "--cluster is missing"),
        ((file, "--measured", run, "--cluster", "h100:4"), "2 ranks, and h100:4 has 4 accelerators"),
        (("--measured", run, *on), f"name the run file whose plan it is compared with, such as {file}"),
        ((file, "--measured", run, *on, "--fix", "tp=1", "--seq-len", 8), "leave out --seq-len and --fix"),
    )
    for arguments, said in cases:
        result = plan(*arguments)
        assert result.exit_code == 2, arguments
        assert said in result.output, result.output
        assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("name", "value"), [("step_s", 0.0), ("step_s", -1.0), ("data_s", -0.1), ("optimizer_s", -2.0)]
)
def test_a_record_whose_time_is_none_is_refused_with_its_step(tmp_path: Path, name: str, value: float):
    run = write_run(tmp_path / "run", [train_record(10), train_record(20, **{name: value})])
    result = plan(run / "run.toml", "--measured", run, "--cluster", "h100:2")
    assert (result.exit_code, f"the record of step 20 has {name}={value}: no time" in result.output) == (2, True)


def test_a_run_on_a_cpu_is_not_set_next_to_the_plan_of_a_gpu_nor_the_other_way(tmp_path: Path):
    on_cpu = write_run(tmp_path / "cpu", [started(0) | {"device": "cpu"}, train_record(10)])
    on_gpu = write_run(tmp_path / "gpu", [started(0), train_record(10)])
    for run, cluster, said in (
        (on_cpu, "h100:2", "a run on cpu, and --cluster h100:2 has h100; name what it ran on, such as --cluster cpu:2"),
        (on_gpu, "cpu:2", "a run on NVIDIA H200, and --cluster cpu:2 has cpu"),
    ):
        result = plan(run / "run.toml", "--measured", run, "--cluster", cluster)
        assert (result.exit_code, said in result.output) == (2, True), result.output
    same = plan(on_cpu / "run.toml", "--measured", on_cpu, "--cluster", "cpu:2")
    assert "medians of 1 record on cpu" in same.output, same.output
