"""Proves that a full disk loses no line and no checkpoint, and ends a run with exit code 3 where it has to end."""

import json
import os
import resource
from functools import partial
from pathlib import Path

import pytest

from shardwright.runs.records import read_events
from shardwright.system.errors import FullError
from shardwright.training.writers.files import JsonLines
from tests.marks import prove, rest_prove
from tests.training.runs import checkpoints, records, train, trajectory, write_run_file


def test_lines_that_a_full_disk_does_not_take_are_written_when_it_does(tmp_path: Path):
    """A limit on the size of files stands for the disk: what was written before it stays, half a line too."""
    path = tmp_path / "metrics.jsonl"
    writer = JsonLines(path, resumed_step=0)
    told = [{"kind": "evaluation", "step": step, "loss": 1 / step} for step in range(1, 6)]
    writer.write(told[0])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 9, limits[1]))
    try:
        for record in told[1:4]:
            writer.write(record)
        assert path.read_text().count("\n") == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    writer.write(told[4])
    writer.close()
    assert [json.loads(each) for each in path.read_text().splitlines()] == told


def disk_is_full_from_step_8_to_11(out: Path, rank: int) -> None:
    """Of any rank no file grows beyond the size that the metrics had, in which the checkpoint of step 10 falls."""
    from shardwright.training.step import Trainer

    step, limits = Trainer.step, resource.getrlimit(resource.RLIMIT_FSIZE)

    def limited(self, batch, at, rate):
        if at in (8, 11):
            n_bytes = (out / "metrics.jsonl").stat().st_size if at == 8 else limits[0]
            resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, limits[1]))
        return step(self, batch, at, rate)

    Trainer.step = limited


@prove
def test_a_run_goes_on_over_a_disk_that_is_full_for_a_while_without_a_checkpoint_or_a_lost_line(tmp_path, tokens):
    path = write_run_file(tmp_path, tokens)
    run = train(
        path, "--set", "checkpoint.on_error=continue", fault=partial(disk_is_full_from_step_8_to_11, tmp_path / "out")
    )
    told = "the checkpoint after step 10 is not written: "
    assert told in " ".join(run.stdout.split())
    assert [record["step"] for record in records(path)] == list(range(1, 21))
    assert checkpoints(path) == ["step-00000015", "step-00000020"]


def disk_stays_full_from_step_8(out: Path, rank: int) -> None:
    """No file of any rank grows beyond the size that the metrics had after 8 steps."""
    from shardwright.training.step import Trainer

    step = Trainer.step

    def limited(self, batch, at, rate):
        if at == 8:
            n_bytes = (out / "metrics.jsonl").stat().st_size
            resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, n_bytes))
        return step(self, batch, at, rate)

    Trainer.step = limited


@pytest.mark.parametrize("every", rest_prove([5, 20]))
def test_a_disk_that_stays_full_ends_a_run_at_its_next_checkpoint_with_that_error_and_no_restart(
    every, tmp_path, tokens
):
    """The metrics cannot be written at the end either, and that error comes later."""
    path = write_run_file(tmp_path, tokens)
    options = ("--max-restarts", "3", "--set", f"checkpoint.every={every}", "--set", "steps=12")
    run = train(path, *options, fault=partial(disk_stays_full_from_step_8, tmp_path / "out"), expect=3)
    assert "step-000000" + ("10" if every == 5 else "12") in run.stderr
    assert "File too large" in run.stderr
    assert "metrics.jsonl" not in run.stderr
    assert "Traceback" not in run.stderr
    assert ("saved up to" in run.stderr) == (every == 5)
    assert [event.kind for event in read_events(tmp_path / "out")].count("restart") == 0
    assert max(record["step"] for record in records(path)) == 8


def stdout_is_on_a_full_disk(rank: int) -> None:
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)


def the_reader_of_stdout_has_ended(rank: int) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    os.dup2(writing, 1)


@pytest.mark.parametrize("fault", [stdout_is_on_a_full_disk, the_reader_of_stdout_has_ended])
def test_a_run_goes_on_where_stdout_takes_no_more(fault, tmp_path, tokens):
    path = write_run_file(tmp_path, tokens)
    train(path, "--set", "steps=2", fault=fault)
    assert len(trajectory(path)) == 2


def test_a_full_disk_ends_a_run_that_goes_back_with_exit_code_3_and_the_lines_before_stay(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    writer = JsonLines(path, resumed_step=0)
    told = [{"kind": "evaluation", "step": step, "loss": 1 / step} for step in range(1, 6)]
    for record in told:
        writer.write(record)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9, limits[1]))
    try:
        with pytest.raises(FullError, match=rf"{path}: no room to write \(.*free some") as full:
            writer.rewind(3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert full.value.exit_code == 3
    assert [json.loads(each) for each in path.read_text().splitlines()] == told
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
