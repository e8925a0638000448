"""Tokens, and a checkpoint of a trainer in plain PyTorch."""

from pathlib import Path

import pytest

from shardwright.conversion import dcp, own
from shardwright.training import importing
from tests.conversion.torchtitan_loop import train_ranks
from tests.distributed import run_ranks
from tests.training.conftest import ragged_tokens

__all__ = ["ragged_tokens"]
SAVED = 5


@pytest.fixture(scope="session")
def two_ranks(ragged_tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, float]]:
    """The checkpoint after SAVED steps of a run on 2 ranks, and the loss of each step of the whole run."""
    folder = tmp_path_factory.mktemp("torchtitan") / "step-5"
    return folder, run_ranks(train_ranks, 2, ragged_tokens, None, {SAVED: folder})[0]


@pytest.fixture(autouse=True)
def _small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints in several files, with tensors in several blocks."""
    monkeypatch.setattr(importing, "BLOCK_BYTES", 512)
    for module in (importing, own, dcp):
        monkeypatch.setattr(module, "FILE_BYTES", 8192)
