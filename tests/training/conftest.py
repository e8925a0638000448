"""Tokens that runs train on and a checkpoint to take up, made once."""

import json
import shutil
from pathlib import Path

import pytest

from shardwright.data import prepare as module
from shardwright.data.prepare import prepare
from tests.distributed import run_ranks
from tests.training.checkpoints import ZERO_3, save_ranks
from tests.training.runs import train, write_run_file


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token shards of a source file, with a vocabulary of 300 and no validation split."""
    out = tmp_path_factory.mktemp("tokens") / "tokens"
    prepare(Path(module.__file__), out, vocab_size=300, validation=0.0)
    return out


@pytest.fixture(scope="session")
def ragged_tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token shards, with a validation split, of documents of different lengths: the lines of a source file."""
    folder = tmp_path_factory.mktemp("ragged")
    lines = Path(module.__file__).read_text().splitlines()
    (folder / "lines.jsonl").write_text("".join(json.dumps({"text": line * 2}) + "\n" for line in lines))
    prepare(folder / "lines.jsonl", folder / "tokens", vocab_size=300, validation=0.2)
    return folder / "tokens"


@pytest.fixture
def run_file(tokens: Path, tmp_path: Path) -> Path:
    """The run file of a small run of two ranks on them."""
    return write_run_file(tmp_path, tokens)


@pytest.fixture(scope="session")
def uninterrupted(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run file of such a run that nothing happened to, after its 20 steps. Tests read it, and change nothing."""
    path = write_run_file(tmp_path_factory.mktemp("uninterrupted"), tokens)
    train(path)
    return path


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two ranks under ZeRO-3."""
    folder = tmp_path_factory.mktemp("pristine")
    run_ranks(save_ranks, 2, folder, ZERO_3)
    return folder / "step-00000001"


@pytest.fixture
def saved(pristine: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return shutil.copytree(pristine, tmp_path / pristine.name)
