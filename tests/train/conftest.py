"""Tokens that runs train on, once a session."""

from pathlib import Path

import pytest

from shardloom.data import prepare as module
from shardloom.data.prepare import prepare


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token shards of a source file, with a vocabulary of 300 and no validation split."""
    out = tmp_path_factory.mktemp("tokens") / "tokens"
    prepare(Path(module.__file__), out, vocab_size=300, validation=0.0)
    return out
