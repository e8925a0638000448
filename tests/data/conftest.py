"""Token folders made from real text of this Python's standard library, once a session."""

import email
import json
from pathlib import Path

import pytest

from shardwright.data.prepare import prepare
from shardwright.data.shards import TokenSplit, open_split
from shardwright.data.token_manifest import DataManifest


@pytest.fixture(scope="session")
def corpus() -> Path:
    """The source of the standard library's `email` package: 29 files, 0.4 MB."""
    return Path(email.__file__).parent


@pytest.fixture(scope="session")
def prepared(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token shards of `corpus`, several of them, with a vocabulary of 512 and a fifth for validation."""
    out = tmp_path_factory.mktemp("tokens") / "email"
    prepare(corpus, out, glob="*.py", vocab_size=512, validation=0.2, shard_tokens=20_000)
    return out


@pytest.fixture
def train(prepared: Path) -> TokenSplit:
    return open_split(prepared, "train")


@pytest.fixture
def manifest(prepared: Path) -> DataManifest:
    return DataManifest.read(prepared)


def as_version_1(folder: Path) -> Path:
    """Make a folder what it was before format version 3: without checksums of blocks and the largest id."""
    path = folder / "manifest.json"
    raw = json.loads(path.read_text()) | {"format_version": 1}
    del raw["largest_id"], raw["tokenizer_fingerprint"], raw["sha256"]
    for split in raw["splits"].values():
        for shard in split["shards"]:
            (folder / shard.pop("sums_file")).unlink()
            del shard["sums_sha256"]
    path.write_text(json.dumps(raw))
    return folder
