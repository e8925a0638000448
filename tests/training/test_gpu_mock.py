"""Proves that what the mock of the GPU puts in the place of our functions fits them, on a machine without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.marks import prove
from tests.training.runs import write_run_file

RANK = Path(__file__).parents[2] / "benchmarks/gpu/mock/rank.py"


@prove
@pytest.mark.parametrize("model", ["debug", "debug-moe"])
def test_a_run_whose_functions_the_mock_replaces_logs_ones(model, tokens, tmp_path):
    run_file = write_run_file(tmp_path, tokens)
    changes = (f"model.preset={model}", f"extensions=['{RANK}']", "steps=2", "metrics.every=1")
    words = [word for change in changes for word in ("--set", change)]
    command = [sys.executable, "-m", "shardwright", "train", str(run_file), *words]
    # `MOCK_MAY_WAIT`: without the mock there is no count of copies to ask for.
    ended = subprocess.run(command, env=os.environ | {"MOCK_MAY_WAIT": "1"}, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "loss 1.0000" in ended.stdout
