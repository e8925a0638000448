"""Proves that `shardwright train` answers each bad input with a clear message and exit code 2, before anything is
written, and that the command explains itself and its keys."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from shardwright.cli.main import app


def train(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["train", *map(str, arguments)])


def refused(result: Result, *said: str) -> None:
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    for part in said:
        assert part in result.output


def test_a_misspelt_key_names_the_one_that_was_meant(run_file: Path):
    refused(train(run_file, "--set", "layout.dpshard=2"), "error: ", "did you mean 'dp_shard'?")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["model.n_heads=3"], ["n_heads=3"]),
        (["model.vocab_size=100"], ["vocab"]),
        (["device=cpu", "model.d_ffn=1000000000"], ["16 bytes a parameter", "this machine has", "on a cluster"]),
        (["batch.seq_len=5000", "model.max_seq_len=8192"], ["train split has", "fewer than seq_len + 1 = 5001"]),
        (["batch.global_batch=9", "batch.micro_batch=2"], ["nearest: 8 or 10"]),
        (["layout.dp_shard=2", "layout.zero=0"], ["set zero to 1, 2 or 3"]),
        (["data.path=/nowhere"], ["/nowhere", "shardwright data prepare"]),
        (["checkpoint.resume=/nowhere"], ["is not a folder"]),
        (
            ["batch.global_batch=9", "batch.micro_batch=2", "lr_schedule.warmup_steps=9"],
            ["nearest: 8 or 10", "steps=4"],
        ),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(run_file: Path, overrides: list[str], said: list[str]):
    result = train(run_file, *(part for override in overrides for part in ("--set", override)))
    refused(result, *said)
    assert not (run_file.parent / "out").exists()


def test_an_empty_and_a_foreign_folder_are_not_data(run_file: Path, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    refused(train(run_file, "--set", f"data.path={tmp_path / 'empty'}"), "empty")
    refused(train(run_file, "--set", f"data.path={tmp_path}"), "manifest.json")


def test_degrees_that_do_not_multiply_to_the_world_are_refused(run_file: Path, monkeypatch: pytest.MonkeyPatch):
    for key, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(key, value)
    refused(train(run_file, "--set", "layout.dp_shard=2"), "needs 2 ranks (dp_shard 2), but 3 processes were started")


def test_a_folder_that_holds_a_run_is_not_overwritten(run_file: Path):
    out = run_file.parent / "out"
    out.mkdir()
    (out / "metrics.jsonl").write_text("")
    refused(train(run_file), "already holds a run", "--resume", "--set out=")
    assert [path.name for path in out.iterdir()] == ["metrics.jsonl"]


def test_no_run_file_says_what_one_is():
    refused(train(), "name a run file")
    refused(train("none.toml"), "no such run file")


def test_the_keys_are_listed_with_their_defaults():
    result = train("--keys", "--json")
    listed = {key["path"]: key for key in json.loads(result.output)}
    assert listed["layout.dp_shard"]["default"] == "1"
    assert listed["steps"]["default"] == "required"
    assert not [key for key in listed.values() if "\\" in str(key) or "`" in str(key)], "Markdown in plain text"


def test_a_line_of_the_keys_is_whole_on_a_narrow_screen():
    listed = json.loads(train("--keys", "--json").output)
    lines = CliRunner().invoke(app, ["train", "--keys"], env={"COLUMNS": "40"}).output.splitlines()
    assert len(lines) == len(listed)
    for key, line in zip(listed, lines, strict=True):
        assert line.startswith(f"{key['path']} ({key['type']}; ")
        assert line.endswith(f"{key['default']}): {key['description']}")


@pytest.mark.parametrize("verb", ["quickstart", "data", "train", "report", "generate"])
def test_every_verb_explains_itself(verb: str):
    result = CliRunner().invoke(app, [verb, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_the_command_starts_without_torch():
    code = "import sys, shardwright.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
