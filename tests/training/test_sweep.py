"""Proves that a sweep runs every combination once, continues where it stopped, and finds a power law in its losses."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from typer.testing import CliRunner, Result

from shardwright.cli.main import app
from shardwright.system.errors import InputError
from shardwright.training.kept import kept_run_file
from shardwright.training.sweep import SweepRun, best_by_flops, fit_power_law, parse_grid, sweep_runs
from tests.marks import prove

RUN = """
out = "unused"
steps = 4
device = "cpu"
model = { preset = "debug", n_layers = 1, vocab_size = 300, max_seq_len = 64 }
data = { path = "tokens" }
batch = { seq_len = 16, global_batch = 4, micro_batch = 2 }
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "run.toml").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sweep(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["sweep", "run.toml", *arguments])


def test_the_exponent_and_the_floor_of_exact_losses_are_found():
    best = {10.0**n: 3.0 * (10.0**n / 1e12) ** -0.2 + 1.5 for n in range(10, 17)}
    fit = fit_power_law(best)
    assert fit is not None
    assert (fit.b, fit.c) == pytest.approx((0.2, 1.5), rel=1e-3)
    assert fit.a == pytest.approx(3.0 * 1e12**0.2, rel=1e-2)


def test_the_interval_of_noisy_losses_holds_the_exponent_and_grows_with_the_noise():
    widths = []
    for noise in (0.002, 0.01):
        best = {10.0**n: 2.0 * (10.0**n / 1e12) ** -0.1 * (1 + noise * (-1) ** n) for n in range(12, 16)}
        fit = fit_power_law(best)
        assert fit is not None
        assert fit.c == 0
        assert fit.b_interval[0] < 0.1 < fit.b_interval[1]
        assert all(low < middle < high for _, middle, low, high in fit.band)
        widths.append(fit.b_interval[1] - fit.b_interval[0])
    assert widths[1] > 3 * widths[0]


def test_two_numbers_of_flops_have_no_fit():
    assert fit_power_law({1e12: 3.0, 1e13: 2.5}) is None


def test_the_lowest_loss_of_each_number_of_flops_is_taken():
    runs = [
        SimpleNamespace(flops=flops, loss=loss) for flops, loss in ((2.0, 3.0), (1.0, 4.0), (2.0, 2.5), (3.0, None))
    ]
    assert best_by_flops(cast(list[SweepRun], runs)) == {1.0: 4.0, 2.0: 2.5}


def test_a_key_without_its_section_is_the_one_key_of_that_name():
    assert parse_grid(["lr=1e-3,3e-3", "model.d_ffn=32"]) == {"optimizer.lr": ["1e-3", "3e-3"], "model.d_ffn": ["32"]}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "--grid is missing; give a key and its values, such as --grid optimizer.lr=1e-3,3e-3"),
        (["lr"], "--grid lr: write key=value,value, such as optimizer.lr=1e-3,3e-3"),
        (["lr=1,,2"], "--grid lr=1,,2: write key=value,value"),
        (["nothing=1"], "--grid nothing=1: there is no such key of the run file"),
        (["kind=ema"], "--grid kind=ema: it is one of "),
        (["lr=1", "optimizer.lr=2"], "--grid optimizer.lr=2: the key or a value is given twice"),
        (["out=a,b"], "--grid out=a,b: every run has an out of its own, below --out"),
        ([f"seed={','.join(map(str, range(1001)))}"], "--grid has 1,001 runs; at most 1,000 are possible"),
    ],
)
def test_a_grid_that_cannot_be_used_is_refused(options: list[str], said: str):
    with pytest.raises(InputError) as refused:
        parse_grid(options)
    assert any(problem.startswith(said) for problem in refused.value.problems), refused.value.problems


def test_a_wrong_value_is_refused_before_any_run_starts(folder: Path):
    result = sweep("--grid", "lr=1e-3,-1", "--out", "sweep")
    assert result.exit_code == 2
    assert "optimizer.lr=-1: input should be greater than 0" in " ".join(result.output.split())
    assert not (folder / "sweep").exists()


def test_an_array_job_trains_the_run_file_of_its_task(folder: Path):
    given = (
        "--grid",
        "lr=1e-3,3e-3",
        "--grid",
        "layout.dp_shard=2",
        "--out",
        "it's",
        "--on",
        "slurm",
        "--per-node",
        "2",
    )
    result = sweep(*given)
    assert result.exit_code == 0, result.output
    text = (folder / "it's/sweep.sbatch").read_text()
    assert "#SBATCH --array=0-1\n" in text
    assert f"""python -m shardwright train '{folder}/it'"'"'s/points'/"$SLURM_ARRAY_TASK_ID".toml --resume""" in text
    written = [(folder / f"it's/points/{n}.toml").read_text() for n in range(2)]
    assert ["lr = 0.001" in text for text in written] == [True, False]
    assert f'out = "{folder}/it\'s/lr-3e-3_dp_shard-2"' in written[1]


def test_an_array_job_has_machines_of_equally_many_ranks(folder: Path):
    more = ("--set", "batch.global_batch=12", "--on", "slurm", "--per-node", "4")
    result = sweep("--grid", "layout.dp_shard=6", "--out", "sweep", *more)
    assert result.exit_code == 0, result.output
    text = (folder / "sweep/sweep.sbatch").read_text()
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=3\n" in text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--time", "5"), "--time 5 (300 s) is not longer than the 600 s that a job has to save"),
        (("--out", "a\nb"), "--out '"),
    ],
)
def test_errors_of_an_array_job_name_options_of_sweep(folder: Path, options: tuple[str, ...], said: str):
    result = sweep("--grid", "seed=1", "--out", "sweep", "--on", "slurm", *options)
    assert result.exit_code == 2
    text = " ".join(result.output.split())
    assert said in text
    assert set(re.findall(r"--[a-z-]+", text)) <= {"--out", "--time"}


def test_two_runs_of_one_folder_are_refused(folder: Path):
    result = sweep("--grid", "data.path=a/b,a-b", "--out", "sweep")
    assert result.exit_code == 2
    said = "sweep/path-a-b would be the folder of data.path=a/b and of data.path=a-b"
    assert said in " ".join(result.output.split())


@pytest.mark.parametrize("more", [(), ("--show",), ("--on", "slurm")])
def test_a_folder_with_a_run_of_another_configuration_is_refused_with_the_keys(folder: Path, more: tuple[str, ...]):
    given = ("--grid", "lr=1e-3,3e-3", "--out", "sweep")
    kept = folder / "sweep/lr-3e-3/run.toml"
    kept.parent.mkdir(parents=True)
    (run,) = sweep_runs(folder / "run.toml", (), {"optimizer.lr": ["3e-3"]}, folder / "sweep")
    kept.write_text(kept_run_file(run.config))
    same = sweep(*given, "--show")
    assert same.exit_code == 0, same.output
    other = sweep(*given, *more, "--set", "seed=7", "--set", "data.path=other")
    assert other.exit_code == 2, other.output
    text = " ".join(other.output.split())
    assert "lr-3e-3 holds a run of another configuration: " in text
    assert re.search("seed 0 to 7.*; give another --out", text)
    assert 'tokens" to "' in text


def test_a_run_whose_recomputation_was_chosen_is_of_the_same_configuration(folder: Path):
    chosen = 'layout.recompute="full"'
    (began,) = sweep_runs(folder / "run.toml", [chosen], {"seed": ["1"]}, folder / "sweep")
    began.out.mkdir(parents=True)
    (began.out / "run.toml").write_text(kept_run_file(began.config))
    for asked, code in (("auto", 0), ("none", 2)):
        found = sweep("--grid", "seed=1", "--out", "sweep", "--show", "--set", f"layout.recompute={asked}")
        assert found.exit_code == code, found.output


def test_no_run_starts_if_the_data_of_another_is_missing(folder: Path, ragged_tokens: Path):
    result = sweep("--grid", f"data.path={ragged_tokens},nowhere", "--out", "sweep")
    assert result.exit_code == 2
    assert "nowhere" in result.output
    assert not (folder / "sweep").exists()


def test_jobs_of_one_array_have_the_same_number_of_ranks(folder: Path):
    result = sweep("--grid", "layout.dp_shard=1,2", "--out", "sweep", "--on", "slurm")
    assert result.exit_code == 2
    assert "the runs have 1 and 2 ranks" in " ".join(result.output.split())


@prove
def test_a_sweep_trains_every_combination_once_and_continues(folder: Path, monkeypatch: pytest.MonkeyPatch):
    (folder / "text").mkdir()
    for n in range(40):
        (folder / f"text/{n}.txt").write_text("".join(f"line {line} of text {n}\n" for line in range(50)))
    made = CliRunner().invoke(
        app, ["data", "prepare", "text", "--out", "tokens", "--vocab-size", "300", "--validation", "0.2"]
    )
    assert made.exit_code == 0, made.output
    started: list[str] = []
    from shardwright.training import start

    real: Any = start.start
    monkeypatch.setattr(start, "start", lambda config, **more: (started.append(config.out), real(config, **more))[1])
    given = ("--grid", "model.d_ffn=32,64,128", "--out", "sweep", "--json")
    first = sweep("--grid", "model.d_ffn=32", "--out", "sweep", "--json")
    assert first.exit_code == 0, first.output
    result = sweep(*given)
    assert result.exit_code == 0, result.output
    assert [Path(out).name for out in started] == ["d_ffn-32", "d_ffn-64", "d_ffn-128"]
    document = json.loads(result.stdout)
    flops = [run["flops"] for run in document["runs"]]
    assert flops == sorted(flops)
    assert all(run["ended"] and 4 < run["loss"] < 7 for run in document["runs"])
    assert document["fit"]["b_interval"][0] < document["fit"]["b"] < document["fit"]["b_interval"][1]
    assert json.loads(sweep(*given, "--show").stdout) == document
    changed = sweep(*given, "--set", "optimizer.weight_decay=0.2")
    assert changed.exit_code == 2
    assert "optimizer.weight_decay 0.1 to 0.2" in " ".join(changed.output.split())
    assert len(started) == 3
