"""Proves that a split reads as one row of tokens across its shards, and a wrong folder is a clear error."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.data import blocks, token_manifest
from shardwright.data.prepare import prepare
from shardwright.data.shards import TokenSplit, open_split, verify_checksums
from shardwright.data.token_manifest import DataManifest
from shardwright.system.errors import DataError
from tests.data.conftest import as_version_1


@pytest.fixture
def copy(prepared: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(prepared, tmp_path / "copy"))


def edit(folder: Path, change: Callable[[dict], None]) -> None:
    path = folder / "manifest.json"
    raw = json.loads(path.read_text())
    change(raw)
    if "sha256" in raw:
        raw["sha256"] = token_manifest._digest(raw)
    path.write_text(json.dumps(raw))


def test_a_split_is_the_shards_one_after_another(train: TokenSplit, prepared: Path) -> None:
    whole = np.concatenate([np.fromfile(path, "<u2") for path in sorted(prepared.glob("train-*.bin"))])
    assert train.n_tokens == len(whole)
    assert np.array_equal(train.tokens(0, train.n_tokens), whole)


def test_any_range_is_read_across_shard_borders(train: TokenSplit) -> None:
    whole = train.tokens(0, train.n_tokens)
    rng = np.random.default_rng(0)
    borders = np.cumsum([shard.tokens for shard in train.manifest.splits["train"].shards])
    starts = [*rng.integers(0, train.n_tokens, 50), *borders, *(borders - 1), 0]
    for start in starts:
        for length in (0, 1, 2, int(rng.integers(0, 70_000))):
            length = min(length, train.n_tokens - int(start))
            assert np.array_equal(train.tokens(int(start), length), whole[start : start + length])
    with pytest.raises(IndexError):
        train.tokens(train.n_tokens, 1)


def test_documents_partition_the_split(train: TokenSplit) -> None:
    documents = [train.document(i) for i in range(train.n_documents)]
    assert np.array_equal(np.concatenate(documents), train.tokens(0, train.n_tokens))
    assert train.document_lengths().tolist() == [len(document) for document in documents]
    with pytest.raises(IndexError):
        train.document(train.n_documents)


def test_a_place_is_named_by_shard_and_offset(train: TokenSplit) -> None:
    first = train.manifest.splits["train"].shards[0].tokens
    assert train.where(first - 1).endswith(f"train-00000.bin, token {first - 1} of it")
    assert train.where(first + 2).endswith("train-00001.bin, token 2 of it")


def test_the_fingerprint_is_of_the_tokens(copy: Path, manifest: DataManifest) -> None:
    assert DataManifest.read(copy).fingerprint == manifest.fingerprint
    edit(copy, lambda raw: raw["splits"]["train"]["shards"][0].update(sha256="0" * 64))
    assert DataManifest.read(copy).fingerprint != manifest.fingerprint


def test_a_model_needs_a_row_for_every_id_in_the_data_and_not_for_every_token_of_the_tokenizer(
    copy: Path, manifest: DataManifest
) -> None:
    splits = [open_split(copy, name) for name in ("train", "validation")]
    largest = max(int(split.tokens(0, split.n_tokens).max()) for split in splits)
    assert manifest.largest_id == largest == 511
    edit(copy, lambda raw: raw.update(vocab_size=514))  # a tokenizer with two tokens that the data has not
    data = DataManifest.read(copy)
    data.check_vocabulary(640)
    assert data.remarks(640) == []
    data.check_vocabulary(512)
    assert "the tokenizer has 514 tokens and the model 512 rows; the data fits" in data.remarks(512)[0]
    with pytest.raises(DataError, match="vocab_size=511 has no row for token id 511, the largest in the data"):
        data.check_vocabulary(511)
    older = DataManifest.read(as_version_1(copy))
    with pytest.raises(DataError, match=r"is smaller than the 514 tokens of the data's tokenizer; .* prepare the data"):
        older.check_vocabulary(512)


def test_a_folder_that_is_not_of_tokens_says_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no such data folder; make it with `shardwright data prepare"):
        DataManifest.read(tmp_path / "absent")
    (tmp_path / "tokens").mkdir()
    with pytest.raises(DataError, match=r"no such data folder; did you mean .*/tokens\?"):
        DataManifest.read(tmp_path / "token")
    (tmp_path / "tokens").rmdir()
    with pytest.raises(DataError, match=r"the folder is empty: no manifest\.json"):
        DataManifest.read(tmp_path)
    (tmp_path / "photo.jpg").write_text("x")
    with pytest.raises(DataError, match=r"the folder holds photo\.jpg, but no manifest\.json"):
        DataManifest.read(tmp_path)
    with pytest.raises(DataError, match="a file, not a folder"):
        DataManifest.read(tmp_path / "photo.jpg")
    (tmp_path / "manifest.json").write_text('{"name": "a web app"}')
    with pytest.raises(DataError, match=r"its manifest\.json is not of token shards"):
        DataManifest.read(tmp_path)
    (tmp_path / "manifest.json").write_text('{"na')
    with pytest.raises(DataError, match="not JSON"):
        DataManifest.read(tmp_path)


def test_a_newer_format_names_its_writer(copy: Path) -> None:
    edit(copy, lambda raw: raw.update(format_version=9, created_by="shardwright 7.0"))
    with pytest.raises(DataError, match=r"format version 9, but .* up to 6; it was written by shardwright 7\.0"):
        DataManifest.read(copy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw.pop("dtype"), "damaged at dtype: Field required"),
        (lambda raw: raw["splits"]["train"].update(tokens=5), "contradicts itself: train has 5 tokens"),
        (
            lambda raw: raw["splits"]["train"]["shards"][0].update(tokens=5),
            "contradicts itself: train-00000.bin",
        ),
        (lambda raw: raw["splits"]["train"]["shards"][0].update(file="../x"), "'../x' is no name of a file in this"),
        (lambda raw: raw["splits"]["train"]["shards"][0].update(index_file="a/../../x"), "is no name of a file in"),
        (lambda raw: raw.update(tokenizer_file="/etc/passwd"), "'/etc/passwd' is no name of a file in this folder"),
        (lambda raw: raw.update(tokenizer_file="\ud800"), "is no name of a file in this folder"),
        (
            lambda raw: raw.update(separator_id=-1),
            "damaged at separator_id: Input should be greater than or equal to 0",
        ),
        (lambda raw: raw.update(separator_id=raw["vocab_size"]), "separator_id=\\d+ is no id of a vocabulary of "),
        (lambda raw: raw.update(largest_id=10**30), "damaged at largest_id"),
        (lambda raw: raw.update(vocab_size=-1), "damaged at vocab_size"),
        (lambda raw: raw.update(block_bytes=10**30), "damaged at block_bytes"),
        (lambda raw: raw.update(format_version=True), "format version True, but this Shardwright reads up to 6"),
        (lambda raw: raw.update(format_version=0), "format version 0, but this Shardwright reads up to 6"),
    ],
)
def test_a_damaged_manifest_is_an_error(copy: Path, change: Callable[[dict], None], message: str) -> None:
    edit(copy, change)
    with pytest.raises(DataError, match=message):
        DataManifest.read(copy)


@pytest.mark.parametrize("name", ["manifest.json", "tokenizer.json", "train-00000.bin", "chat_template.jinja"])
def test_a_file_of_the_folder_that_is_a_link_out_of_it_is_not_read(copy: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "elsewhere").write_bytes((copy / name).read_bytes() if (copy / name).exists() else b"")
    (copy / name).unlink(missing_ok=True)
    (copy / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=f"'{name}' is a link out of this folder"):
        DataManifest.read(copy)


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_separator_that_no_document_ends_with_is_refused(copy: Path, split: str) -> None:
    edit(copy, lambda raw: raw.update(separator_id=7))
    with pytest.raises(DataError, match=f"separator_id=7, and a document of {split} ends with token 0"):
        open_split(copy, split)


def test_a_folder_without_splits_says_so(copy: Path) -> None:
    edit(copy, lambda raw: raw.update(splits={}))
    with pytest.raises(DataError, match="no split 'train'; it has none; prepare the data again"):
        open_split(copy, "train")


def test_every_short_or_missing_file_is_named(copy: Path) -> None:
    path = copy / "train-00001.bin"
    size = path.stat().st_size
    with open(path, "r+b") as file:
        file.truncate(size - 10)
    (copy / "train-00000.idx").unlink()
    with pytest.raises(DataError) as caught:
        open_split(copy, "train")
    assert len(caught.value.problems) == 2
    assert f"train-00001.bin has {size - 10} bytes, the manifest says {size}: cut short" in str(caught.value)
    assert "train-00000.idx is missing" in str(caught.value)
    assert len(verify_checksums(copy)) == 2


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b'{"version": "1.0"}'])
def test_a_tokenizer_other_than_the_one_that_made_the_ids_is_refused(prepared: Path, tmp_path: Path, content: bytes):
    folder = tmp_path / "copy"
    shutil.copytree(prepared, folder)
    (folder / "tokenizer.json").write_bytes(content)
    with pytest.raises(DataError, match=r"tokenizer\.json is not the tokenizer that made the token ids"):
        DataManifest.read(folder)


def test_one_flipped_bit_is_found_by_the_checksums(copy: Path) -> None:
    raw = bytearray((copy / "train-00001.bin").read_bytes())
    raw[100] ^= 1
    (copy / "train-00001.bin").write_bytes(raw)
    open_split(copy, "train")
    seen: list[str] = []
    (problem,) = verify_checksums(copy, seen.append)
    assert problem.startswith("train-00001.bin has the checksum")
    assert set(seen) == {path.name for path in copy.iterdir()} - {"manifest.json"}


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Several shards of many blocks of 1 KiB, the last one short."""
    folder = tmp_path_factory.mktemp("blocks")
    records = [{"prompt": f"{i} and {i} make ", "completion": f"{2 * i}. " * (i % 7 + 1)} for i in range(900)]
    (folder / "x.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK_BYTES", 1024)
        prepare(folder / "x.jsonl", folder / "x", format="chat", vocab_size=300, validation=0.1, shard_tokens=6000)
    return folder / "x"


def read_everything(folder: Path, name: str) -> None:
    split = open_split(folder, name)
    for start in range(0, split.n_tokens, 700):
        length = min(700, split.n_tokens - start)
        split.tokens(start, length)
        split.trained(start, length)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_changed_byte_anywhere_is_named_with_its_file_and_block(conversations: Path, data: st.DataObject) -> None:
    files = sorted(path for path in conversations.iterdir() if path.suffix in (".bin", ".idx", ".trained", ".sums"))
    path = data.draw(st.sampled_from(files))
    whole = path.read_bytes()
    at, bits = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(1, 255))
    split = path.name.split("-")[0]
    try:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ bits]) + whole[at + 1 :])
        with pytest.raises(DataError) as caught:
            read_everything(conversations, split)
        where = f"{path} is damaged" + ("" if path.suffix == ".sums" else f" in block {at // 1024} (bytes ")
        assert str(caught.value).startswith(where)
    finally:
        path.write_bytes(whole)


def test_a_block_is_compared_once_and_only_if_it_is_read(conversations: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    checksum = blocks.xxhash.xxh3_64_intdigest
    monkeypatch.setattr(blocks.xxhash, "xxh3_64_intdigest", lambda raw: compared.append(len(raw)) or checksum(raw))
    split = open_split(conversations, "train")
    compared.clear()
    for _ in range(2):
        split.tokens(600, 100)  # 2 bytes each
    assert compared == [1024]
    split.tokens(600, 1000)
    assert compared == [1024] * 3


def test_a_folder_without_checksums_of_blocks_still_has_a_checked_index(copy: Path) -> None:
    assert "no checksums of blocks" in DataManifest.read(as_version_1(copy)).remarks(512)[0]
    split = open_split(copy, "train")
    assert split.tokens(0, split.n_tokens).max() > 0
    index = copy / "train-00000.idx"
    index.write_bytes(index.read_bytes()[:-1] + b"\1")
    with pytest.raises(DataError, match=r"train-00000\.idx is damaged: its sha256 differs"):
        open_split(copy, "train")


def test_a_misspelt_split_is_an_error(prepared: Path) -> None:
    with pytest.raises(DataError, match="no split 'valid'; did you mean 'validation'"):
        open_split(prepared, "valid")


@pytest.mark.parametrize("pattern", ["train-*.bin", "train-*.idx"])
def test_a_file_that_is_cut_short_after_it_was_opened_is_named(copy: Path, pattern: str) -> None:
    """Read behind its end, a mapped file would end the process by SIGBUS."""
    split = open_split(copy, "train")
    path = sorted(copy.glob(pattern))[-1]
    os.truncate(path, 0)
    with pytest.raises(DataError, match=f"{path.name} has 0 bytes, and had [0-9]+ when it was opened"):
        split.document(split.n_documents - 1)


def test_a_flipped_byte_of_the_manifest_is_named_or_changes_no_value(prepared: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(prepared, copy)
    path, whole = copy / "manifest.json", DataManifest.read(prepared)
    content = path.read_bytes()
    n_named = 0
    places = range(0, len(content), 11)
    for at in places:
        path.write_bytes(content[:at] + bytes([content[at] ^ (1 << at % 7)]) + content[at + 1 :])
        try:
            assert DataManifest.read(copy) == whole, f"byte {at}: {content[max(0, at - 20) : at + 20]!r}"
        except DataError as error:
            assert str(copy) in str(error)  # noqa: PT017 - whether there is an error is what differs
            n_named += 1
    assert n_named > len(places) / 2
