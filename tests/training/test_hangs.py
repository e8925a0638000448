"""Proves that a rank that hangs is named, with where it is and what the others wait for, and that the run then ends."""

import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from shardwright.run_folder import read_events
from tests.training.runs import is_alive, trajectory, train, training, write_run_file

SOON = ("--set", "faults.hang_after=2.0", "--set", "steps=2000", "--set", "checkpoint.every=0")


@pytest.fixture
def run_file(tokens: Path, tmp_path: Path) -> Path:
    return write_run_file(tmp_path, tokens)


def test_a_stopped_rank_is_named_with_its_step_and_what_the_others_wait_for(run_file):
    with training(run_file, *SOON) as run:
        run.wait_for(lambda: len(trajectory(run_file)) >= 12)
        os.kill(run.workers()[1], signal.SIGSTOP)
        assert run.wait() == 3
        print(run.stderr)
    assert run.stderr.startswith("error: no progress: rank 1 holds up the others\n  rank 1 is stopped (SIGSTOP, or a d")
    assert "in which rank 0 waits" in run.stderr
    assert "--- Python stack of rank 0 ---" in run.stderr
    assert "go on from it with --resume" in run.stderr or "nothing was saved yet" in run.stderr
    (hang,) = [each for each in read_events(run_file.parent / "out") if each.kind == "hang"]
    assert hang.rank == 1
    assert not any(is_alive(pid) for pid in run.workers())
    assert not (run_file.parent / "out" / "ranks").exists()
