"""Proves that text is read from Zstandard files and URLs of fsspec as from the disk, or refused with the reason."""

import gzip
import json
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardwright.data.prepare import prepare
from shardwright.data.sources import Meter, documents
from shardwright.data.token_manifest import DataManifest
from shardwright.system.errors import DataError

LINES = [json.dumps({"text": f"line {i}: " + "word " * (i % 7)}) + "\n" for i in range(3000)]
TEXTS = [json.loads(line)["text"] for line in LINES]


def texts(source: object, **options: object) -> list[str]:
    return ["".join(document.pieces) for document in documents(source, **options)]  # type: ignore[arg-type]


def zstd(content: bytes) -> bytes:
    return pa.compress(content, codec="zstd", asbytes=True)


@pytest.fixture
def memory():
    """An empty memory:// file system."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    yield system
    system.store.clear()


@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.ndjson.zst"])
def test_lines_of_a_zstandard_file_are_documents(tmp_path: Path, name: str) -> None:
    whole = "".join(LINES).encode()
    (tmp_path / name).write_bytes(zstd(whole))
    meter = Meter()
    assert texts(tmp_path / name, meter=meter) == TEXTS
    assert meter.read_bytes == (tmp_path / name).stat().st_size


def test_a_zstandard_file_of_several_frames_is_read_to_its_end(tmp_path: Path) -> None:
    half = len(LINES) // 2
    frames = zstd("".join(LINES[:half]).encode()) + zstd("".join(LINES[half:]).encode())
    (tmp_path / "a.jsonl.zst").write_bytes(frames)
    assert texts(tmp_path / "a.jsonl.zst") == TEXTS


def test_a_damaged_zstandard_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.zst").write_bytes(b"no such thing" * 20)
    with pytest.raises(DataError, match=r"a\.jsonl\.zst: cannot be read: "):
        texts(tmp_path / "a.jsonl.zst")
    whole = zstd("".join(LINES).encode())
    (tmp_path / "b.jsonl.zst").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"b\.jsonl\.zst"):
        texts(tmp_path / "b.jsonl.zst")


def filled(memory, tmp_path: Path) -> None:
    memory.pipe("/corpus/a.txt", b"one\ntwo\n")
    memory.pipe("/corpus/b/lines.jsonl", "".join(LINES[:3]).encode())
    memory.pipe("/corpus/b/more.jsonl.gz", gzip.compress("".join(LINES[3:5]).encode()))
    memory.pipe("/corpus/c.jsonl.zst", zstd("".join(LINES[5:7]).encode()))
    memory.pipe("/corpus/.hidden", b"hidden")
    pq.write_table(pa.table({"text": TEXTS[7:9]}), tmp_path / "rows.parquet")
    memory.pipe("/corpus/d.parquet", (tmp_path / "rows.parquet").read_bytes())


def test_a_folder_at_a_url_is_read_in_sorted_order_whatever_its_files_are(memory, tmp_path: Path) -> None:
    filled(memory, tmp_path)
    assert texts("memory://corpus") == ["one\ntwo\n", *TEXTS[:9]]
    assert texts("memory://corpus", glob="*.jsonl") == TEXTS[:3]
    assert texts("memory://corpus", glob="b/*") == TEXTS[:5]
    assert texts("memory://corpus/a.txt") == ["one\ntwo\n"]
    assert next(documents("memory://corpus/b/lines.jsonl")).name.endswith("lines.jsonl:1")


def test_a_file_url_is_prepared_to_the_same_tokens_as_its_path(tmp_path: Path) -> None:
    source = tmp_path / "corpus"
    source.mkdir()
    (source / "a.jsonl").write_text("".join(LINES[:400]))
    by_path = prepare(source, tmp_path / "by-path", vocab_size=300)
    by_url = prepare(f"file://{source}", tmp_path / "by-url", vocab_size=300)
    assert by_url.fingerprint == by_path.fingerprint
    assert DataManifest.read(tmp_path / "by-url").source["read_bytes"] == by_path.source["read_bytes"]


@pytest.mark.parametrize(
    ("source", "options", "said"),
    [
        ("memory://nowhere", {}, "there is no such file, and no files below it"),
        ("memory://corpus", {"glob": "*.rs"}, r"no files that match --glob '\*\.rs'"),
        ("memory://corpus/a.txt", {"glob": "*.txt"}, "chooses files of a folder"),
        ("nosuch://bucket/x", {}, "fsspec has no access to nosuch://: Protocol not known"),
    ],
)
def test_a_url_that_gives_nothing_is_refused(memory, tmp_path: Path, source: str, options: dict, said: str) -> None:
    filled(memory, tmp_path)
    with pytest.raises(DataError, match=said):
        texts(source, **options)


def test_a_place_whose_package_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "url_to_fs", missing)
    with pytest.raises(DataError, match="fsspec has no access to s3://: Install s3fs to access S3"):
        texts("s3://bucket/corpus")
