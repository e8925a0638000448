"""Data and a run file that bad input is tried on, and the plan that several tests read."""

from pathlib import Path
from typing import Any

import pytest

from shardwright.data.prepare import prepare
from tests.cli.plans import REAL, document

RUN = """
out = "{out}"
steps = 4
[model]
preset = "debug"
[data]
path = "{data}"
[batch]
seq_len = 64
global_batch = 8
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "text").mkdir()
    for name in "abc":
        (folder / "text" / f"{name}.txt").write_text(f"the {name} of all things is not known. " * 200)
    prepare(folder / "text", folder / "tokens", vocab_size=300, validation=0.3)
    return folder / "tokens"


@pytest.fixture
def run_file(tmp_path: Path, data: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN.format(out=tmp_path / "out", data=data))
    return path


@pytest.fixture(scope="session")
def told() -> Any:
    return document(*REAL, "--budget-tokens", "15e12")
