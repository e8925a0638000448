"""Proves that a folder that `prepare --publish` adds shards to can be read at any time, that a prepare that is killed
continues to the same tokens, and that the order of samples does not depend on how many shards were published."""

import os
import re
import shutil
from bisect import bisect_left
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from tokenizers import Tokenizer

from shardwright.config.sections import TokenCache
from shardwright.data.corpus_writer import VALIDATION
from shardwright.data.mirror import occupied_bytes
from shardwright.data.prepare import PrepareProgress, prepare
from shardwright.data.publication import STAGING, write_first_needed
from shardwright.data.samples import DocumentSamples, PackedSamples, SplitSamples
from shardwright.data.shard_order import ShardOrder
from shardwright.data.shards import TokenSplit, open_split, verify_checksums
from shardwright.data.token_manifest import DataManifest, UnfinishedPrepare
from shardwright.system.errors import DataError, InputError
from shardwright.system.units import GiB
from tests.data.publications import OPTIONS, corpus, prepare_killed


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that one prepare published from the first document to the last."""
    folder = tmp_path_factory.mktemp("whole")
    prepare(corpus(folder / "x.jsonl"), folder / "tokens", **OPTIONS)
    return folder / "tokens"


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose prepare was killed after some shards, and its source."""
    folder = tmp_path_factory.mktemp("begun")
    prepare_killed(corpus(folder / "x.jsonl"), folder / "tokens")
    return folder


def samples_of_all_kinds(split: TokenSplit) -> list[SplitSamples]:
    return [PackedSamples(split, 16), DocumentSamples(split, 16)]


@pytest.mark.parametrize("change", ["text", "fewer"])
def test_a_source_that_has_changed_is_refused(killed: Path, tmp_path: Path, change: str) -> None:
    source, kept = killed / "x.jsonl", (killed / "x.jsonl").read_text()
    tokens = shutil.copytree(killed / "tokens", tmp_path / "tokens")
    lines = kept.splitlines(keepends=True)
    source.write_text("".join(lines[:20] if change == "fewer" else [lines[0].replace("a", "b"), *lines[1:]]))
    with pytest.raises(DataError, match=r"are published, and (it has 20 documents now|their text has changed); give"):
        prepare(source, tokens, **OPTIONS)
    source.write_text(kept)


def test_a_prepare_that_was_killed_continues_to_the_tokens_of_one_that_was_not(
    killed: Path, whole: Path, tmp_path: Path
) -> None:
    tokens = shutil.copytree(killed / "tokens", tmp_path / "tokens")
    before = DataManifest.read(tokens)
    n_shards = len(before.splits["train"].shards)
    assert before.unfinished is not None
    assert 1 < n_shards < len(DataManifest.read(whole).splits["train"].shards)
    assert len(before.splits[VALIDATION].shards) == n_shards, "both splits have the same documents"
    reader = open_split(tokens, "train")
    readers = samples_of_all_kinds(reader)
    orders = [ShardOrder(7, samples) for samples in readers]
    early = [order(np.arange(order.published)) for order in orders]
    contents = [[samples.read(int(i)) for i in indices] for samples, indices in zip(readers, early, strict=True)]
    assert not reader.grow()

    after = prepare(killed / "x.jsonl", tokens, **OPTIONS)
    assert after.unfinished is None
    assert after.publication == before.publication
    complete = DataManifest.read(whole)
    assert after.fingerprint == complete.fingerprint
    for name in after.sha256_of_files:
        assert (tokens / name).read_bytes() == (whole / name).read_bytes(), name
    assert verify_checksums(tokens) == []
    assert sorted(os.listdir(tokens)) == sorted(["manifest.json", ".lock", *after.sha256_of_files])

    assert reader.grow()
    assert not reader.grow()
    assert (reader.tokens(0, reader.n_tokens) == open_split(whole, "train").tokens(0, reader.n_tokens)).all()
    for order, samples, indices, read in zip(orders, readers, early, contents, strict=True):
        order.grow()
        fresh = ShardOrder(7, type(samples)(open_split(whole, "train"), 16))  # type: ignore[call-arg]
        g = np.arange(2 * fresh.n)
        assert (order(g) == fresh(g)).all(), "the order does not depend on when the listing was read"
        assert (fresh(g[: len(indices)]) == indices).all()
        assert sorted(fresh(g[: fresh.n])) == sorted(fresh(g[fresh.n :])) == list(range(len(samples)))
        assert (fresh(g[: fresh.n]) != fresh(g[fresh.n :])).any()
        for i, (ids, mask) in zip(indices, read, strict=True):
            assert all((one == other).all() for one, other in zip(fresh.samples.read(int(i)), (ids, mask), strict=True))
    assert prepare(killed / "x.jsonl", tokens, **OPTIONS) == after, "a complete folder stays as it is"


def test_what_is_not_the_same_prepare_is_refused(whole: Path, tmp_path: Path) -> None:
    source, tokens = whole.parent / "x.jsonl", whole
    with pytest.raises(DataError, match=r"written with shard_tokens=3000, not 4000; give the same options to continue"):
        prepare(source, tokens, **OPTIONS | {"shard_tokens": 4_000})
    for given, said in (
        ({"vocab_size": 301}, "vocab_size=300, not 301"),
        ({"tokenizer_sample": 10_000}, "tokenizer_sample=268435456, not 10000"),
        ({"max_tokens": 10_000}, "no max_tokens, not 10000"),
        ({"tokenizer": tokens / "tokenizer.json"}, "vocab_size=300, not none; tokenizer_sample=268435456, not none"),
    ):
        with pytest.raises(DataError, match=said):
            prepare(source, tokens, **OPTIONS | given)
    with pytest.raises(DataError, match=r"--overwrite replaces .* leave one out"):
        prepare(source, tokens, overwrite=True, **OPTIONS)
    prepare(source, tmp_path / "plain", **OPTIONS | {"publish": False})
    with pytest.raises(DataError, match="was not made with --publish"):
        prepare(source, tmp_path / "plain", **OPTIONS)


@pytest.mark.parametrize("locked", [False, True])
@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "train-00000.bin", "letter.txt", ".x.1.tmp"])
def test_a_file_that_prepare_did_not_make_stays(whole: Path, tmp_path: Path, name: str, locked: bool) -> None:
    """Also with the lock that a prepare has left that was killed before its first shard."""
    out = tmp_path / "own"
    out.mkdir()
    if locked:
        (out / ".lock").write_text("process 1 on elsewhere\n")
    (out / name).write_text("{}")
    before = sorted(os.listdir(out))
    with pytest.raises(DataError, match=rf"files that prepare did not make: {re.escape(name)}"):
        prepare(whole.parent / "x.jsonl", out, **OPTIONS)
    assert (out / name).read_text() == "{}"
    assert sorted(os.listdir(out)) == before


def test_a_lock_of_another_program_stays(whole: Path, tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("held by dpkg")
    with pytest.raises(InputError, match=r"\.lock is no lock of Shardwright; move it away"):
        prepare(whole.parent / "x.jsonl", tmp_path, **OPTIONS)
    assert (tmp_path / ".lock").read_text() == "held by dpkg"


def test_a_file_with_the_name_of_the_next_shard_is_not_replaced(killed: Path, whole: Path, tmp_path: Path) -> None:
    """Neither a file that is there at the start, nor one that appears while shards are written."""
    tokens = shutil.copytree(killed / "tokens", tmp_path / "tokens")
    n_shards = len(DataManifest.read(tokens).splits["train"].shards)
    own = tokens / f"train-{n_shards:05d}.idx"
    own.write_text("mine")
    with pytest.raises(DataError, match=rf"files that prepare did not make: {own.name}"):
        prepare(killed / "x.jsonl", tokens, **OPTIONS)
    own.unlink()

    with pytest.raises(DataError, match=rf"{own.name} is not of this publication; move it away, then start the same"):
        prepare(killed / "x.jsonl", tokens, **OPTIONS, progress=lambda now: write(own))
    assert own.read_text() == "mine"
    own.unlink()
    assert prepare(killed / "x.jsonl", tokens, **OPTIONS).fingerprint == DataManifest.read(whole).fingerprint


def write(own: Path) -> None:
    own.write_text("mine")


@pytest.mark.parametrize("moved", [0, 3, 99])
def test_a_prepare_that_was_killed_while_it_moved_files_finishes_their_publication(
    killed: Path, whole: Path, tmp_path: Path, moved: int
) -> None:
    tokens = shutil.copytree(killed / "tokens", tmp_path / "tokens")
    before, complete = DataManifest.read(tokens), DataManifest.read(whole)
    staging = tokens / STAGING
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    fresh = sorted(set(complete.sha256_of_files) - set(before.sha256_of_files))
    for i, name in enumerate(fresh):
        shutil.copy(whole / name, (tokens if i < moved else staging) / name)
    complete.model_copy(update={"publication": before.publication, "source": before.source}).written(staging)
    after = prepare(killed / "x.jsonl", tokens, **OPTIONS)
    assert after.unfinished is None
    assert after.fingerprint == complete.fingerprint
    assert sorted(os.listdir(tokens)) == sorted(["manifest.json", ".lock", *after.sha256_of_files])
    assert verify_checksums(tokens) == []


def test_shards_that_were_trained_on_are_deleted_when_others_need_the_room(whole: Path, tmp_path: Path) -> None:
    tokens, source = tmp_path / "tokens", whole.parent / "x.jsonl"
    keep_bytes, occupied = 44_000, [0]
    options = OPTIONS | {"keep_gib": keep_bytes / GiB}

    def trains(now: PrepareProgress) -> None:
        """A run that has trained on all but the last shard when prepare waits."""
        if (tokens / "manifest.json").exists():
            occupied.append(occupied_bytes(tokens))
        if now.stage == "room":
            write_first_needed(tokens, len(DataManifest.read(tokens).splits["train"].shards) - 1)

    made = prepare(source, tokens, **options, progress=trains)
    assert made.fingerprint == DataManifest.read(whole).fingerprint
    assert keep_bytes / 2 < max(occupied) <= keep_bytes < occupied_bytes(whole)
    shards = made.splits["train"].shards
    n_deleted = sum(shard.deleted for shard in shards)
    assert 0 < n_deleted < len(shards)
    assert [shard.deleted for shard in shards] == [i < n_deleted for i in range(len(shards))], "the oldest first"
    assert verify_checksums(tokens) == []
    here, there = open_split(tokens, "train"), open_split(whole, "train")
    assert here.n_deleted == n_deleted
    assert (here.document_lengths() == there.document_lengths()).all(), "the index is kept"
    kept = here.token_ends[n_deleted - 1]
    assert (here.tokens(kept, here.n_tokens - kept) == there.tokens(kept, here.n_tokens - kept)).all()
    with pytest.raises(DataError, match="its tokens are deleted, because a run with"):
        here.tokens(kept - 1, 1)
    [order, every] = [ShardOrder(7, PackedSamples(split, 16)) for split in (here, there)]
    assert order.ended
    assert (order(np.arange(order.published)) == every(np.arange(order.published))).all()
    assert order.published == order.n < every.published
    for position in (0, order.n // 3, order.n - 1):
        first = order.first_shard(position)
        starts = [order.samples.span(int(i))[0] for i in order(np.arange(position, order.n))]
        assert first <= here.shard_at(min(starts))
        assert first == min(
            here.shard_at(order.samples.span(i)[0]) for i in range(ends_before(order, position), order.n)
        )


def ends_before(order: ShardOrder, position: int) -> int:
    """The samples of the shards before the shard of a position."""
    return max([end for end in order.samples.shard_ends() if end <= position], default=0)


def test_a_complete_folder_is_refused_for_another_tokenizer_separator_or_end(whole: Path, tmp_path: Path) -> None:
    source, tokens = whole.parent / "x.jsonl", tmp_path / "tokens"
    file = Tokenizer.from_file(str(whole / "tokenizer.json"))
    file.add_special_tokens(["<|end|>"])
    file.save(str(tmp_path / "tokenizer.json"))
    options = OPTIONS | {"tokenizer": tmp_path / "tokenizer.json", "max_tokens": 2_000}
    complete = prepare(source, tokens, **options)
    assert complete.unfinished is None
    for given, said in (
        ({"max_tokens": None}, "max_tokens=2000, not none"),
        (
            {"separator": "<|end|>"},
            "another separator: '<|endoftext|>', not '<|end|>'; give the separator of that folder",
        ),
        ({"tokenizer": whole / "tokenizer.json"}, "another tokenizer.json"),
        ({"tokenizer": None}, "no vocab_size, not 300"),
    ):
        with pytest.raises(DataError, match=re.escape(said)):
            prepare(source, tokens, **options | given)
    assert prepare(source, tokens, **options | {"vocab_size": 400}) == complete, "only a tokenizer trained here has it"


def test_the_order_does_not_depend_on_the_number_of_published_shards() -> None:
    check_order_across_listings()


def check_order_across_listings() -> None:
    with TemporaryDirectory() as folder:
        whole, part = Path(folder, "tokens"), Path(folder, "part")
        complete = prepare(corpus(Path(folder, "x.jsonl"), 90), whole, **OPTIONS | {"shard_tokens": 1_000})
        shutil.copytree(whole, part)
        first(complete, 2).written(part)
        for kind in (PackedSamples, DocumentSamples):
            early, late = (ShardOrder(5, kind(open_split(each, "train"), 16)) for each in (part, whole))
            assert 0 < early.published == early.n < late.n
            assert late.published > 10 * late.n
            g = np.arange(early.n)
            assert (early(g) == late(g)).all()
            epochs = late(np.arange(3 * late.n)).reshape(3, -1)
            assert (np.sort(epochs) == np.arange(len(late.samples))).all()
            assert (epochs[0] != epochs[1]).any()
            assert (epochs[0] != np.arange(late.n)).any()
            ends = late.samples.split.token_ends
            shards = [bisect_left(ends, sum(late.samples.span(int(i)))) for i in epochs[0]]
            assert shards == sorted(shards), "the samples of a shard come before those of the next"


def test_a_mirror_grows_with_the_folder_at_the_url(whole: Path, tmp_path: Path) -> None:
    growing = tmp_path / "growing"
    shutil.copytree(whole, growing)
    complete = DataManifest.read(whole)
    first(complete, 2).written(growing)
    cache = TokenCache(str(tmp_path / "cache"))
    there = open_split(f"file://{growing}", "train", cache)
    assert there.n_tokens == sum(shard.tokens for shard in complete.splits["train"].shards[:2])
    there.tokens(0, there.n_tokens)
    first(complete, 3).written(growing)
    assert there.grow()
    complete.written(growing)
    assert there.grow()
    assert not there.grow()
    here = open_split(whole, "train")
    assert (there.tokens(0, there.n_tokens) == here.tokens(0, here.n_tokens)).all()
    [mirror] = Path(str(cache.folder)).iterdir()
    assert {path.name for path in mirror.iterdir()} == {"manifest.json", *complete.sha256_of_files}
    again = open_split(f"file://{growing}", "train", cache)
    assert again.folder == there.folder, "the complete folder has the same mirror"


def test_a_first_shard_that_is_too_short_is_named(whole: Path) -> None:
    shard = open_split(whole, VALIDATION, first_only=True)
    assert shard.n_tokens < open_split(whole, VALIDATION).n_tokens
    said = f"the first shard of the validation split, .* has {shard.n_tokens} tokens, .* or --shard-tokens"
    with pytest.raises(DataError, match=said):
        PackedSamples(shard, shard.n_tokens)


def first(manifest: DataManifest, n_shards: int) -> DataManifest:
    """The manifest as it was after the first shards."""
    splits = {
        name: split.model_copy(
            update={
                "shards": split.shards[:n_shards],
                "tokens": sum(shard.tokens for shard in split.shards[:n_shards]),
                "documents": sum(shard.documents for shard in split.shards[:n_shards]),
            }
        )
        for name, split in manifest.splits.items()
    }
    return manifest.model_copy(update={"splits": splits, "unfinished": UnfinishedPrepare(documents=1, text_xxh3="")})


def test_a_folder_that_was_replaced_is_not_read_on(whole: Path, tmp_path: Path) -> None:
    growing = shutil.copytree(whole, tmp_path / "growing")
    complete = DataManifest.read(whole)
    first(complete, 2).written(growing)
    split = open_split(growing, "train")
    complete.model_copy(update={"publication": "f" * 32}).written(growing)
    with pytest.raises(DataError, match="it was replaced while this process reads it"):
        split.grow()


def test_a_part_of_a_source_is_its_first_documents(whole: Path, tmp_path: Path) -> None:
    options = OPTIONS | {"tokenizer": whole / "tokenizer.json", "max_tokens": 5_000}
    part = prepare(whole.parent / "x.jsonl", tmp_path / "part", **options)
    assert part.unfinished is None
    lengths = np.concatenate([open_split(tmp_path / "part", name).document_lengths() for name in part.splits])
    assert 5_000 <= lengths.sum() < 5_000 + lengths.max() + 1
    for name in part.splits:
        here, there = open_split(tmp_path / "part", name), open_split(whole, name)
        assert (here.tokens(0, here.n_tokens) == there.tokens(0, here.n_tokens)).all()
    with pytest.raises(DataError, match="max_tokens=0 must be at least 1"):
        prepare(whole.parent / "x.jsonl", tmp_path / "none", **OPTIONS | {"max_tokens": 0})
