"""Proves that tokens at a URL are those of the folder, that a mirror on the local disk keeps its bound, that damage is
fetched again or named, and that a hostile manifest writes nowhere else."""

import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem

from shardwright.config import parse
from shardwright.config.sections import TokenCache
from shardwright.data import blocks, mirror
from shardwright.data.mirror import occupied_bytes
from shardwright.data.prepare import prepare
from shardwright.data.samples import PackedSamples, fetch_samples
from shardwright.data.shards import TokenSplit, data_folder, open_split
from shardwright.system.errors import ConfigError, DataError
from shardwright.system.units import GiB, KiB
from tests.data.conftest import as_version_1


class Counted(LocalFileSystem):
    """A file system, `counted://`, that counts the reads of a part of a file; the first of `failures` reads fail."""

    protocol = "counted"
    parts: ClassVar[list[tuple[str, int, int]]] = []
    failures = 0

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **more: Any) -> bytes:
        if Counted.failures > 0:
            Counted.failures -= 1
            raise ConnectionError("the peer reset the connection")
        if path.endswith((".bin", ".trained")):
            assert start is not None
            assert end is not None, "a file of tokens is not read whole"
            Counted.parts.append((path, start, end))
        content: bytes = super().cat_file(path, start=start, end=end, **more)
        return content


fsspec.register_implementation("counted", Counted)


def conversations(folder: Path) -> Path:
    """Tokens of conversations in several shards of many blocks of 4 KiB, which is a block of the disk."""
    words = np.random.default_rng(0).integers(0, 26, (400, 300))
    lines = [
        {"prompt": f"say {i}:", "completion": " ".join(chr(97 + letter) for letter in row)}
        for i, row in enumerate(words)
    ]
    (folder / "chat.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK_BYTES", 4 * KiB)
        source = folder / "chat.jsonl"
        prepare(source, folder / "tokens", format="chat", vocab_size=300, validation=0.0, shard_tokens=30_000)
    return folder / "tokens"


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return conversations(tmp_path_factory.mktemp("stored"))


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[TokenCache]:
    Counted.parts.clear()
    yield TokenCache(str(tmp_path / "cache"))
    Counted.failures = 0


def opened(folder: Path, cache: TokenCache) -> TokenSplit:
    """The split as another process of the node opens it: a process checks the small files of a mirror once."""
    mirror._mirror_of_this_process.cache_clear()
    return open_split(f"counted://{folder}", "train", cache)


def test_a_mirror_has_the_tokens_of_the_folder_and_keeps_its_bound():
    with TemporaryDirectory() as folder:
        stored = conversations(Path(folder))
        expect_tokens_of_the_folder(stored, TokenCache(f"{folder}/cache"))
        shutil.rmtree(f"{folder}/cache")
        expect_the_bound(stored, TokenCache(f"{folder}/cache"))


def expect_tokens_of_the_folder(stored: Path, cache: TokenCache) -> None:
    Counted.parts.clear()
    here, there = open_split(stored, "train"), opened(stored, cache)
    assert there.manifest.block_bytes == 4 * KiB
    assert len(there.manifest.splits["train"].shards) > 2
    there.check_index()
    assert not Counted.parts[1:], "opening reads one block: the end of the first document"
    for start in range(0, here.n_tokens, 4999):
        n = min(5000, here.n_tokens - start)
        for read in ("tokens", "trained"):
            mine, theirs = getattr(there, read)(start, n), getattr(here, read)(start, n)
            assert (mine == theirs).all()
            assert mine.dtype == theirs.dtype
    assert not there.tokens(0, 10).flags.writeable
    n_bytes = sum(end - start for _, start, end in Counted.parts)
    assert n_bytes == 3 * here.n_tokens, "each byte of tokens and masks is fetched once"
    Counted.parts.clear()
    assert (opened(stored, cache).tokens(0, here.n_tokens) == here.tokens(0, here.n_tokens)).all()
    assert not Counted.parts, "another rank of the node reads the mirror"


def test_blocks_that_are_missing_side_by_side_are_one_request(stored: Path, cache: TokenCache):
    split = opened(stored, cache)
    Counted.parts.clear()
    split.tokens(3 * 2048, 2048)
    split.tokens(2048, 5 * 2048)
    assert [(start // 4096, end // 4096) for _, start, end in Counted.parts] == [(3, 4), (1, 3), (4, 6)]


def test_samples_are_fetched_at_once_and_then_read_locally(stored: Path, cache: TokenCache):
    samples = PackedSamples(opened(stored, cache), 512)
    fetch_samples(samples, [5, 3, 40])
    Counted.parts.clear()
    expected = PackedSamples(open_split(stored, "train"), 512)
    for i in (3, 5, 40):
        assert all((mine == theirs).all() for mine, theirs in zip(samples.read(i), expected.read(i), strict=True))
    assert not Counted.parts


def expect_the_bound(stored: Path, cache: TokenCache) -> None:
    limit = 64 * KiB
    here, there = open_split(stored, "train"), opened(stored, cache._replace(n_bytes=limit))
    most = 0
    for _ in range(2):  # in the second epoch the blocks of the first were evicted
        for start in range(0, here.n_tokens - 512, 512):
            assert (there.tokens(start, 512) == here.tokens(start, 512)).all()
            most = max(most, occupied_bytes(there.folder))
    assert here.n_tokens * 3 > 2 * limit, "the tokens do not fit"
    assert limit // 2 < most <= limit + limit // 4 + 8 * KiB
    full = opened(stored, cache)
    full.tokens(0, full.n_tokens)
    full.trained(0, full.n_tokens)
    later = opened(stored, cache._replace(n_bytes=limit))
    make_room_for = [path for path in later.folder.iterdir() if path.suffix == ".bin"]
    for path in make_room_for:
        mirror.make_hole(path, 0, 4 * KiB)
    assert (later.tokens(0, later.n_tokens) == here.tokens(0, here.n_tokens)).all()


def test_what_is_damaged_in_the_mirror_is_fetched_again(stored: Path, cache: TokenCache):
    split, here = opened(stored, cache), open_split(stored, "train")
    split.tokens(0, split.n_tokens)
    file, offset = split.place(7000)
    with file.open("r+b") as raw:
        raw.seek(2 * offset)
        raw.write(b"\xff\xff")
    assert (split.tokens(6900, 200) == here.tokens(6900, 200)).all()
    assert file.read_bytes() == (stored / file.name).read_bytes()


@pytest.mark.parametrize("suffix", [".bin", ".trained"])
def test_what_is_damaged_at_the_url_is_named(stored: Path, cache: TokenCache, tmp_path: Path, suffix: str):
    copy = shutil.copytree(stored, tmp_path / "copy")
    path = copy / f"train-00001{suffix}"
    raw = bytearray(path.read_bytes())
    raw[3 * 4096 + 17] ^= 4
    path.write_bytes(raw)
    split = opened(copy, cache)
    read = split.tokens if suffix == ".bin" else split.trained
    with pytest.raises(DataError, match=rf"counted://.*{path.name} is damaged in block 3 \(from byte 12288 on\)"):
        read(0, split.n_tokens)


def test_a_file_of_the_mirror_that_was_cut_short_is_copied_again(stored: Path, cache: TokenCache):
    folder = opened(stored, cache).folder
    (folder / "train-00000.idx").write_bytes(b"")
    assert (opened(stored, cache).document_lengths() == open_split(stored, "train").document_lengths()).all()


def test_a_disk_without_room_is_no_reason_to_end(stored: Path, cache: TokenCache, monkeypatch: pytest.MonkeyPatch):
    split, here = opened(stored, cache), open_split(stored, "train")

    def no_room(*_: object) -> int:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "pwrite", no_room)
    assert (split.tokens(0, split.n_tokens) == here.tokens(0, here.n_tokens)).all()


def test_a_file_system_without_holes_is_refused_at_the_start(
    stored: Path, cache: TokenCache, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(mirror.ctypes, "CDLL", lambda *_, **__: SimpleNamespace(fallocate64=WithoutHoles()))
    opened(stored, cache)  # all tokens fit
    with pytest.raises(DataError, match=r"cannot delete a part of a file.*set data\.cache to another folder"):
        opened(stored, cache._replace(n_bytes=64 * KiB))


class WithoutHoles:
    argtypes: tuple[type, ...] = ()

    def __call__(self, *_: object) -> int:
        mirror.ctypes.set_errno(errno.EOPNOTSUPP)
        return -1


def test_requests_that_fail_are_repeated(stored: Path, cache: TokenCache, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mirror, "PAUSE_S", 0.0)
    split = opened(stored, cache)
    Counted.failures = mirror.ATTEMPTS - 1
    assert (split.tokens(0, 99) == open_split(stored, "train").tokens(0, 99)).all()
    Counted.failures = mirror.ATTEMPTS
    with pytest.raises(DataError, match=r"train-00000\.bin: cannot be read after 4 tries: .*reset the connection"):
        split.tokens(9000, 5)


def test_a_manifest_that_names_other_places_writes_nothing(stored: Path, cache: TokenCache, tmp_path: Path):
    copy = shutil.copytree(stored, tmp_path / "copy")
    raw = json.loads((copy / "manifest.json").read_text())
    raw["splits"]["train"]["shards"][0]["index_file"] = "../../outside.idx"
    (copy / "manifest.json").write_text(json.dumps(raw))
    shutil.copy(stored / "train-00000.idx", tmp_path / "outside.idx")
    with pytest.raises(DataError, match=r"^counted://.*\.\./\.\./outside\.idx"):
        opened(copy, cache)
    assert not Path(str(cache.folder)).exists()


@pytest.mark.parametrize("name", ["../../outside", "/outside", "0" * 31, "A" * 32])
def test_a_publication_that_names_another_folder_writes_nothing(
    name: str, stored: Path, cache: TokenCache, tmp_path: Path
):
    copy = shutil.copytree(stored, tmp_path / "copy")
    raw = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps(raw | {"publication": name}))
    with pytest.raises(DataError, match="publication"):
        opened(copy, cache)
    assert not Path(str(cache.folder)).exists()


def test_what_cannot_be_read_is_one_sentence(stored: Path, cache: TokenCache, tmp_path: Path):
    with pytest.raises(DataError, match=r"counted:///nowhere/manifest.json: there is no such file"):
        opened(Path("/nowhere"), cache)
    with pytest.raises(DataError, match=r"fsspec has no access to s4://"):
        data_folder("s4://bucket/tokens", cache)
    with pytest.raises(DataError, match="format version 1 has no checksums of blocks"):
        opened(as_version_1(shutil.copytree(stored, tmp_path / "old")), cache)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"file/.*: cannot be made: Not a directory; set data.cache to another folder"):
        opened(stored, TokenCache(str(tmp_path / "file")))


def test_a_cache_without_tokens_at_a_url_is_refused():
    table = {
        "out": "out",
        "steps": 1,
        "batch": {"seq_len": 8, "global_batch": 1},
        "data": {"path": "tokens", "cache_gib": 3.0},
    }
    with pytest.raises(ConfigError, match=r"data\.cache and data\.cache_gib are for tokens at a URL"):
        parse(table)
    assert parse(table | {"data": {"path": "s3://bucket/tokens", "cache_gib": 3.0}}).data.token_cache.n_bytes == 3 * GiB
