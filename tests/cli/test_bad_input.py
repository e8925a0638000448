"""Proves that numbers beyond all bounds, files of a wrong kind and bytes that are no text end a verb at once: with exit
code 2, the rule and nothing written, no traceback and no work without end."""

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from shardwright.cli.main import app
from shardwright.runs.folder import CHECKPOINTS, LOCK, LOGS, METRICS, RUN_FILE
from shardwright.system.files import LONGEST_TEXT, parse_toml
from shardwright.training.checkpoint.store import CheckpointStore

HUGE = 10**30


def refused(arguments: list[Any], *said: str) -> None:
    result = CliRunner().invoke(app, [str(each) for each in arguments])
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    words = " ".join(result.output.split())
    for part in said:
        assert part in words


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["schedule", "--schedule", "1f1b", "--pp", 10**9, "--microbatches", 10**6], "plan prices larger pipelines"),
        (["verify", "examples/debug.toml", "--matrix", 10**9], "less than or equal to 64"),
        (["verify", "examples/debug.toml", "--timeout", "inf"], "less than or equal to 604800"),
        (
            ["generate", ".", "--prompt", "a", "--seed", HUGE],
            "--seed: a number of at most 18 digits",
        ),
        (
            ["plan", "examples/debug.toml", "--cluster", "h100:8", "--top", HUGE],
            "--top: a number",
        ),
        (
            ["plan", "--model", "debug", "--cluster", "h100:8", "--global-batch", 16, "--seq-len", 64, "--top", 10**9],
            "--top 1,000,000,000: at most 2,000 is possible",
        ),
        (["export", ".", "--out", "out", "--max-shard-size", "9" * 5000], "give a number and a unit, such as 5GB"),
        (
            ["generate", ".", "--prompt", "\udcff\udcfe"],
            "--prompt '\\udcff\\udcfe': the bytes given are not UTF-8 text",
        ),
        (["train", "/dev/zero"], "/dev/zero: cannot be read: a device, a pipe or a socket, and no regular file"),
        (["train", "a" * 300 + ".toml"], "File name too long"),
    ],
)
def test_numbers_beyond_all_bounds_and_files_that_are_none_are_refused(arguments, said):
    refused(arguments, said)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a = " + "[" * 100_000 + "]" * 100_000, "nested too deeply"),
        ("a." * 50_000 + "a = 1", "nested too deeply"),
        ("steps = " + "9" * 10_000, "an integer has more than 4300 digits"),
        (f"steps = {HUGE}", "steps=1.000e+30: a number of at most 64 bits is needed"),
        (f"[model]\nd_model = {'9' * 400}", "model.d_model=999999...: a number of at most 64 bits is needed"),
        ("#" * (LONGEST_TEXT + 1), "longer than 16 MiB"),
    ],
    ids=["nested", "dotted", "digits", "64 bits", "400 digits", "long"],
)
def test_a_run_file_beyond_all_bounds_is_refused(tmp_path, text, said):
    path = tmp_path / "run.toml"
    path.write_text(text)
    refused(["train", path], said)


@given(st.text(alphabet="[]{}=\"'abc.\n #0123456789-_:TZ,\\", max_size=60))
@settings(max_examples=200)
def test_text_that_is_no_toml_is_no_error_but_a_value_error(text):
    with suppress(ValueError):
        assert isinstance(parse_toml(text), dict)


@pytest.mark.parametrize("name", [CHECKPOINTS, LOGS])
def test_a_file_in_the_place_of_a_folder_of_the_run_is_refused(run_file, tmp_path, name):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("")
    refused(["train", run_file], f"{name} is a file, and a run keeps a folder there")


@pytest.mark.parametrize("name", [METRICS, RUN_FILE, LOCK])
def test_a_folder_in_the_place_of_a_file_of_the_run_is_refused(run_file, tmp_path, name):
    (tmp_path / "out" / name).mkdir(parents=True)
    refused(["train", run_file], f"{name} is a folder, and a run keeps a file there")


def test_a_run_file_of_the_user_in_the_folder_of_the_run_is_not_written_over(run_file):
    before = run_file.read_bytes()
    refused(["train", run_file, "--set", f"out={run_file.parent}", "--set", "device=cpu"], "was not written by a run")
    assert run_file.read_bytes() == before


def test_more_ranks_than_the_cores_can_run_are_refused(run_file):
    many = 64 * 1024
    arguments = ["train", run_file, "--set", f"layout.dp_shard={many}", "--set", f"batch.global_batch={many}"]
    refused(arguments, f"{many} ranks on the", "processes a core, and at most 16 are started")


def test_a_name_that_is_too_long_for_the_file_system_is_refused(run_file):
    refused(["train", run_file, "--set", f"out={'x' * 300}"], "File name too long")


def test_a_vocabulary_larger_than_any_model_has_is_refused_and_leaves_nothing(tmp_path):
    (tmp_path / "text.txt").write_text("a b c " * 100)
    out = tmp_path / "tokens"
    refused(["data", "prepare", tmp_path / "text.txt", "--out", out, "--vocab-size", 10**12], "is above 4,194,304")
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_a_link_to_itself_in_a_folder_of_text_is_named(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "loop").symlink_to("loop")
    refused(["data", "prepare", tmp_path / "text", "--out", tmp_path / "tokens"], "text/loop: cannot be read")


def test_a_file_with_the_name_of_a_checkpoint_is_replaced_when_that_step_is_saved(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=1)
    for step in (2, 4):
        store.path_of(step).write_text("no checkpoint")
    store.begin(4, 1)
    store.publish(4)
    assert store.published() == [store.path_of(4)]
    assert store.path_of(4).is_dir()
