"""Proves that several processes find what one finds, and leave nothing behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from shardwright.model.presets import resolve
from shardwright.planner.search import spread, survey
from shardwright.system.errors import LayoutError
from shardwright.system.units import GiB
from tests.marks import prove
from tests.planner.calls import killed, refused, squared
from tests.planner.test_search import job


def test_items_are_shared_out_and_results_are_in_order():
    found = spread(squared, range(20), 2)
    assert [square for square, _ in found] == [number**2 for number in range(20)]
    assert os.getpid() not in {process for _, process in found}
    assert spread(squared, range(3), 1) == [(number**2, os.getpid()) for number in range(3)]
    assert spread(squared, [], 4) == []


def test_progress_is_told_after_each_item():
    done: list[tuple[int, int]] = []
    for processes in (1, 2):
        spread(squared, range(5), processes, lambda *told: done.append(told))
    assert done == 2 * [(n, 5) for n in range(1, 6)]


def test_what_the_function_raises_is_raised():
    with pytest.raises(LayoutError, match="0 is refused"):
        spread(refused, range(4), 2)


def test_where_a_process_is_killed_this_one_calls_the_function():
    assert spread(killed, [os.getpid()] * 3, 2) == [os.getpid()] * 3


SLEEPS = """
import os, signal, sys, time
from pathlib import Path
from shardwright.planner.search import spread

def sleep(folder):
    (Path(folder) / str(os.getpid())).touch()
    time.sleep(100)

if __name__ == "__main__":
    # Tests that a shell runs in its background ignore SIGINT, and what they start inherits that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    spread(sleep, [sys.argv[1]] * 2, 2)
"""


@pytest.mark.parametrize("sent", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=prove)])
def test_processes_end_with_the_one_that_started_them(tmp_path: Path, sent: signal.Signals):
    script, folder = tmp_path / "sleeps.py", tmp_path / "pids"
    script.write_text(SLEEPS)
    folder.mkdir()
    first = subprocess.Popen(
        [sys.executable, script, folder], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while len(pids := [int(path.name) for path in folder.iterdir()]) < 2:
        assert first.poll() is None
        time.sleep(0.05)
    if sent == signal.SIGINT:
        os.killpg(first.pid, sent)  # as a terminal does
    else:
        first.kill()
    assert first.stderr is not None
    said = first.communicate(timeout=60)[1]
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.05)
    assert said.count("Traceback") == (sent == signal.SIGINT)  # that of the script, which does not catch it


@prove
def test_a_survey_by_processes_is_that_of_one():
    asked = job(resolve("llama-3.1-8b"), "h100:64", 512, 8192)
    one, several = (survey(asked, 80 * GiB, processes=n) for n in (1, 2))
    assert (one.n_layouts, one.nearest, one.nearest_bytes) == (
        several.n_layouts,
        several.nearest,
        several.nearest_bytes,
    )
    assert np.array_equal(one.pool.bound_s, several.pool.bound_s)
    assert np.array_equal(one.pool.peak_bytes, several.pool.peak_bytes)
    assert one.pool.fastest(3) == several.pool.fastest(3)
    assert [one.pool.choice(n) for n in one.pool.fastest(3)] == [
        several.pool.choice(n) for n in several.pool.fastest(3)
    ]
