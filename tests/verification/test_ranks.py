"""Proves that ranks give back what they came to, and that one that fails, dies or hangs is named and none is left."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardwright.system.errors import LayoutError, WorkerError
from tests.distributed import run_ranks
from tests.marks import prove


def sum_of_ranks(factor: int) -> int:
    total = torch.tensor(factor * dist.get_rank())
    dist.all_reduce(total)
    return int(total)


def test_each_rank_gives_back_its_result():
    assert run_ranks(sum_of_ranks, 3, 10) == [30, 30, 30]


def one_fails(kind: str) -> None:
    if dist.get_rank() == 1:
        if kind == "bug":
            raise KeyError("nothing here")
        if kind == "input":
            raise LayoutError("tp=3 does not divide 8 heads", "another problem")
        if kind == "leaves":
            os._exit(7)
        time.sleep(60)
    dist.barrier()


def test_a_rank_that_raises_is_named_with_its_traceback_though_others_fail_with_it():
    with pytest.raises(WorkerError, match=r"(?s)^rank 1 failed: KeyError: 'nothing here'.*in one_fails"):
        run_ranks(one_fails, 3, "bug")


def test_what_a_rank_raises_on_purpose_is_raised_as_it_is():
    with pytest.raises(LayoutError) as caught:
        run_ranks(one_fails, 2, "input")
    assert caught.value.problems == ["tp=3 does not divide 8 heads", "another problem"]


def test_a_rank_that_leaves_is_named():
    with pytest.raises(WorkerError, match=r"^rank 1 left with code 7 without a word"):
        run_ranks(one_fails, 2, "leaves")


def test_ranks_that_hang_are_named_with_where_they_stand():
    with pytest.raises(WorkerError, match=r"(?s)^ranks 0, 1 were not done within 3 s.*rank 1 ---.*one_fails"):
        run_ranks(one_fails, 2, "hangs", timeout_s=3)


SCRIPT = """
from shardwright.layout.layout import Layout
from shardwright.model.presets import resolve
from shardwright.verification import Case, parity
from shardwright.verification.cut_case import cut_spec
from dataclasses import replace

spec = replace(cut_spec(resolve("debug"), 2), max_seq_len=16)
print(parity(Case(spec, seq_len=16, global_batch=4, steps=1), Layout(dp_replicate=2)).equal)
"""


@prove
def test_a_script_needs_no_guard_and_nothing_is_warned_of(tmp_path: Path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")
