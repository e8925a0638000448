"""Proves that prepare writes the corpus, the same each time, in bounded memory, all of it or nothing."""

import errno
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwright.data.prepare import PrepareProgress, prepare
from shardwright.data.shards import TokenSplit, open_split, verify_checksums
from shardwright.data.token_manifest import DataManifest
from shardwright.data.tokenizer import load_tokenizer, train_bpe
from shardwright.system.errors import DataError, FullError
from tests.marks import prove


def decoded(folder: Path, split: str) -> list[str]:
    """The documents of a split as text; each must end with the separator and have no other."""
    tokens = open_split(folder, split)
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    documents = [tokens.document(i) for i in range(tokens.n_documents)]
    assert all((ids == tokens.separator_id).sum() == 1 and ids[-1] == tokens.separator_id for ids in documents)
    return [tokenizer.decode(ids[:-1].tolist()) for ids in documents]


def jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    path.write_bytes(train_bpe(["some text of words and numbers 12345\n"] * 10, 300).json_bytes)
    return path


def test_a_folder_of_text_becomes_documents_of_tokens(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.txt").write_text("first\n")
    (tmp_path / "a" / "2.txt").write_text("second")
    manifest = prepare(tmp_path / "a", tmp_path / "out", vocab_size=300)
    assert decoded(tmp_path / "out", "train") == ["first\n"]
    assert decoded(tmp_path / "out", "validation") == ["second"]
    assert manifest == DataManifest.read(tmp_path / "out")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a", "out"]


def test_real_source_code_comes_back_exactly(prepared: Path, corpus: Path) -> None:
    files = sorted(path for path in corpus.rglob("*.py") if path.stat().st_size)
    documents = decoded(prepared, "train") + decoded(prepared, "validation")
    assert sorted(documents) == sorted(path.read_text() for path in files)
    assert len(open_split(prepared, "train").manifest.splits["train"].shards) > 3
    assert verify_checksums(prepared) == []


def test_the_same_call_writes_the_same_bytes(prepared: Path, corpus: Path, tmp_path: Path) -> None:
    options = {"glob": "*.py", "vocab_size": 512, "validation": 0.2, "shard_tokens": 20_000}
    again = prepare(corpus, tmp_path / "email", **options)  # type: ignore[arg-type]
    for path in prepared.iterdir():
        assert (tmp_path / "email" / path.name).read_bytes() == path.read_bytes()
    assert again.fingerprint == DataManifest.read(prepared).fingerprint
    other = prepare(corpus, tmp_path / "other", **options | {"seed": 1})  # type: ignore[arg-type]
    assert other.fingerprint != again.fingerprint


def test_no_document_below_the_shard_size_lies_in_two_shards(tmp_path: Path, tokenizer: Path) -> None:
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list("xyzw"), rng.integers(1, 90))) for _ in range(200)] + ["q" * 500, "end"]
    source = jsonl(tmp_path / "x.jsonl", texts)
    prepare(source, tmp_path / "out", tokenizer=tokenizer, validation=0, shard_tokens=100)
    split = open_split(tmp_path / "out", "train")
    assert decoded(tmp_path / "out", "train") == texts
    ends = np.cumsum([shard.tokens for shard in split.manifest.splits["train"].shards])
    for i in range(split.n_documents):
        first, last = split.document_start(i), split.document_start(i + 1) - 1
        shards = np.searchsorted(ends, [first, last], side="right")
        assert shards[0] == shards[1] or last - first + 1 > 100
    assert max(shard.tokens for shard in split.manifest.splits["train"].shards) <= 200


@pytest.mark.parametrize("n", [1, 2, 3, 50, 3000])
def test_each_split_has_a_document_from_two_on_and_about_its_fraction(tmp_path: Path, tokenizer: Path, n: int) -> None:
    source = jsonl(tmp_path / "x.jsonl", [f"text {i}" for i in range(n)])
    splits = prepare(source, tmp_path / "out", tokenizer=tokenizer, validation=0.05).splits
    assert splits["train"].documents >= 1
    assert splits["validation"].documents >= (n >= 2)
    assert splits["train"].documents + splits["validation"].documents == n
    if n == 3000:
        assert 120 < splits["validation"].documents < 180
    assert decoded(tmp_path / "out", "train")[0] == "text 0"


def test_a_vocabulary_above_65536_takes_four_bytes(tmp_path: Path, tokenizer: Path) -> None:
    large = json.loads(tokenizer.read_text())
    large["added_tokens"].append(large["added_tokens"][0] | {"id": 70_000, "content": "<|last|>"})
    large["model"]["vocab"]["<|last|>"] = 70_000
    (tmp_path / "large.json").write_text(json.dumps(large))
    source = jsonl(tmp_path / "x.jsonl", ["one", "two"])
    manifest = prepare(source, tmp_path / "out", tokenizer=tmp_path / "large.json", separator="<|last|>", validation=0)
    assert (manifest.dtype, manifest.vocab_size, manifest.separator_id) == ("uint32", 70_001, 70_000)
    assert decoded_with(tmp_path / "out", "<|last|>") == ["one", "two"]


def decoded_with(folder: Path, separator: str) -> list[str]:
    tokens, tokenizer = open_split(folder, "train"), load_tokenizer(folder / "tokenizer.json", separator)
    return [tokenizer.decode(tokens.document(i)[:-1].tolist()) for i in range(tokens.n_documents)]


def test_a_large_corpus_trains_its_tokenizer_on_a_sample_from_all_over(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "x.jsonl", ["early " * 50] * 500 + ["late " * 50] * 500)
    prepare(source, tmp_path / "out", vocab_size=280, tokenizer_sample=40_000)
    vocabulary = load_tokenizer(tmp_path / "out" / "tokenizer.json").tokenizer.get_vocab()
    assert {"early", "late"} <= {token.strip("Ġ") for token in vocabulary}


def test_progress_reaches_the_size_of_the_source(tmp_path: Path, corpus: Path) -> None:
    seen: list[PrepareProgress] = []
    manifest = prepare(corpus, tmp_path / "out", glob="*.py", vocab_size=300, progress=seen.append)
    assert {progress.stage for progress in seen} == {"tokenizer", "tokens"}
    assert seen[-1].read_bytes == seen[-1].total_bytes == manifest.source["read_bytes"]
    assert seen[-1].documents == sum(split.documents for split in manifest.splits.values())


def test_bad_input_leaves_nothing(tmp_path: Path, tokenizer: Path) -> None:
    source = tmp_path / "a"
    source.mkdir()
    (source / "1.txt").write_text("fine\n" * 1000)
    (source / "2.txt").write_bytes(b"caf\xe9")
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "byte 0xe9 at offset 3"),
        ({"validation": 1.0}, "validation=1.0 is not a fraction"),
        ({"shard_tokens": 0}, "shard_tokens=0 must be at least 1"),
        ({"tokenizer": source / "1.txt"}, "not a tokenizer.json"),
        ({"tokenizer": None, "vocab_size": 5}, "vocab_size=5 is below 257"),
        ({"glob": "*.md"}, "no files that match"),
    ]
    for options, message in cases:
        with pytest.raises(DataError) as caught:
            prepare(source, tmp_path / "out", **{"tokenizer": tokenizer, **options})
        assert message in str(caught.value)
        assert os.listdir(tmp_path) == ["a"]
    with pytest.raises(DataError, match="is inside the source"):
        prepare(source, source / "out", tokenizer=tokenizer)
    (source / "2.txt").write_bytes(b"")
    (source / "1.txt").write_bytes(b"")
    with pytest.raises(DataError, match="there is no text in it"):
        prepare(source, tmp_path / "out", tokenizer=tokenizer)


def test_an_existing_folder_is_replaced_only_on_request_and_only_if_prepare_made_it(
    tmp_path: Path, tokenizer: Path
) -> None:
    out = tmp_path / "out"
    one, two = (jsonl(tmp_path / name, [name] * 3) for name in ("one.jsonl", "two.jsonl"))
    prepare(one, out, tokenizer=tokenizer)
    with pytest.raises(DataError, match="exists already; choose another --out, or replace it with --overwrite"):
        prepare(two, out, tokenizer=tokenizer)
    (tmp_path / "bad.jsonl").write_text("nothing")
    with pytest.raises(DataError, match="not JSON"):
        prepare(tmp_path / "bad.jsonl", out, tokenizer=tokenizer, overwrite=True)
    assert decoded(out, "train")[0] == "one.jsonl"
    prepare(two, out, tokenizer=tokenizer, overwrite=True)
    assert decoded(out, "train")[0] == "two.jsonl"
    (out / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match=r"would delete files that prepare did not make: notes\.txt"):
        prepare(one, out, tokenizer=tokenizer, overwrite=True)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("years of work")
    with pytest.raises(DataError, match="--overwrite replaces only what prepare made"):
        prepare(one, foreign, tokenizer=tokenizer, overwrite=True)
    assert (foreign / "thesis.tex").exists()
    assert not [name for name in os.listdir(tmp_path) if "partial" in name or "replaced" in name]


def test_a_full_disk_is_a_clear_error_and_leaves_nothing(
    tmp_path: Path, corpus: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FullError, match=r"no room to write it \(No space left on device; .* free now"):
        prepare(corpus, tmp_path / "out", glob="*.py", tokenizer=tokenizer)
    assert os.listdir(tmp_path) == []


PREPARE = "import sys; from shardwright.data.prepare import prepare; prepare(*sys.argv[1:3], tokenizer=sys.argv[3])"


def test_a_write_that_really_fails_is_a_clear_error_and_leaves_nothing(tmp_path: Path, tokenizer: Path) -> None:
    source = jsonl(tmp_path / "x.jsonl", ["some text " * 1000] * 200)

    def no_file_above_100_kb() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    done = subprocess.run(
        [sys.executable, "-c", PREPARE, str(source), str(tmp_path / "out"), str(tokenizer)],
        preexec_fn=no_file_above_100_kb,
        capture_output=True,
        text=True,
    )
    assert "no room to write it (File too large" in done.stderr
    assert os.listdir(tmp_path) == ["x.jsonl"]


def test_killed_in_the_middle_it_leaves_no_folder_and_the_next_one_clears_up(tmp_path: Path, tokenizer: Path) -> None:
    out = tmp_path / "out"
    source = jsonl(tmp_path / "x.jsonl", ["some text of words " * 5000] * 400)
    child = subprocess.Popen([sys.executable, "-c", PREPARE, str(source), str(out), str(tokenizer)])
    deadline_s = time.monotonic() + 30
    while not list(tmp_path.glob("out.partial-*/train-00000.bin")):
        assert time.monotonic() < deadline_s
        assert child.poll() is None
        time.sleep(0.01)
    small = jsonl(tmp_path / "small.jsonl", ["one", "two"])
    prepare(small, tmp_path / "out2", tokenizer=tokenizer)
    prepare(small, out, tokenizer=tokenizer)
    assert list(tmp_path.glob("out.partial-*")), "the folder of a living process was cleared"
    prepare_again = {"tokenizer": tokenizer, "overwrite": True}
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert list(tmp_path.glob("out.partial-*")), "it was killed too late to prove anything"
    prepare(small, out, **prepare_again)  # type: ignore[arg-type]
    assert decoded(out, "train") == ["one"]
    assert sorted(os.listdir(tmp_path)) == ["out", "out2", "small.jsonl", "x.jsonl"]


def test_a_process_killed_while_replacing_loses_neither_folder(tmp_path: Path, tokenizer: Path) -> None:
    source = jsonl(tmp_path / "x.jsonl", ["one", "two"])
    prepare(source, tmp_path / "out", tokenizer=tokenizer)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (tmp_path / "out").rename(tmp_path / f"out.replaced-{dead.pid}-{os.uname().nodename}")
    with pytest.raises(DataError, match="exists already"):
        prepare(source, tmp_path / "out", tokenizer=tokenizer)
    assert decoded(tmp_path / "out", "train") == ["one"]


@prove
def test_memory_does_not_grow_with_the_corpus(tmp_path: Path, tokenizer: Path) -> None:
    peaks = []
    for megabytes in (5, 20):
        source = tmp_path / f"{megabytes}.json"
        # One line without an end, one document: nothing to cut at.
        words = "word number 42, " * 65_536
        source.write_text(words * megabytes)
        # Small batches on any number of cores, so that both corpora are many.
        code = "import shardwright.data.corpus_writer as room; room.LARGEST_BATCH_BYTES = 2**20; "
        code += PREPARE + "; import resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
        out = str(tmp_path / f"out{megabytes}")
        done = subprocess.run(
            [sys.executable, "-c", code, str(source), out, str(tokenizer)],
            capture_output=True,
            text=True,
            check=True,
        )
        peaks.append(int(done.stdout))
    assert peaks[1] < 1.25 * peaks[0] + 20_000, f"peak KiB for 5 and 20 MiB: {peaks}"


def test_preparing_does_not_import_torch() -> None:
    rooms = ", ".join(f"shardwright.data.{name}" for name in ("prepare", "inspect", "samples", "order"))
    code = f"import sys, {rooms}; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_checksums_are_those_of_the_files(prepared: Path, manifest: DataManifest, train: TokenSplit) -> None:
    for shard in manifest.splits["train"].shards:
        assert hashlib.sha256((prepared / shard.file).read_bytes()).hexdigest() == shard.sha256
    assert train.n_tokens == sum(shard.tokens for shard in manifest.splits["train"].shards)
