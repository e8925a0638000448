"""Proves that a run on a stream of the datasets library, which it prepares in the background, takes the steps of a run
on the folder prepared before, also if both are killed."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from shardwright.config import parse
from shardwright.data.mirror import occupied_bytes
from shardwright.data.prepare import prepare
from shardwright.data.token_manifest import DataManifest
from shardwright.system.errors import ConfigError, DataError
from shardwright.system.owner import sole_owner
from shardwright.system.signals import send_signal
from shardwright.system.units import GiB
from shardwright.training.preparing import _Prepare, prepare_failure
from tests.data.publications import OPTIONS, corpus
from tests.training.runs import checkpoints, train, training, trajectory, write_run_file

STREAM_OPTIONS = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items() if name != "publish"]
SETTINGS = ("--set", "data.order=shards", "--set", "steps=32", "--set", "batch.global_batch=32")


def streamed(run_file: Path, source: str) -> tuple[str, ...]:
    return (*SETTINGS, "--set", f"data.prepare={json.dumps([source, *STREAM_OPTIONS])}")


def prepares(folder: Path) -> list[int]:
    """The processes that prepare below a folder."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            words = (process / "cmdline").read_bytes().decode().split("\0")
        except (OSError, UnicodeDecodeError):
            continue
        if "prepare" in words and any(word.startswith(str(folder)) for word in words):
            found.append(int(process.name))
    return found


@pytest.mark.prove
def test_a_run_on_a_stream_takes_the_steps_of_one_on_the_folder(tmp_path: Path):
    pytest.importorskip("datasets")
    (tmp_path / "stream").mkdir()
    corpus(tmp_path / "stream" / "train.jsonl")
    source = f"hf:{tmp_path}/stream"
    (tmp_path / "before").mkdir()
    before = write_run_file(tmp_path / "before", tmp_path / "before" / "tokens")
    prepare(source, tmp_path / "before" / "tokens", **OPTIONS)
    train(before, *SETTINGS)

    run_file = write_run_file(tmp_path, tmp_path / "tokens")
    with training(run_file, *streamed(run_file, source)) as run:
        run.wait_for(lambda: bool(prepares(tmp_path)), 300)
        os.kill(prepares(tmp_path)[0], signal.SIGKILL)
        run.wait_for(lambda: (tmp_path / "out" / "checkpoints").exists() and len(checkpoints(run_file)) > 1, 300)
        for pid in (run.process.pid, *run.workers()):
            assert pid is not None
            send_signal(pid, signal.SIGKILL)
    train(run_file, *streamed(run_file, source), "--resume")
    assert DataManifest.read(tmp_path / "tokens").unfinished is None
    assert trajectory(run_file) == trajectory(before)
    assert prepares(tmp_path) == []


KEPT = 56_000
"""Bytes that the shards may occupy: about half of them."""


@pytest.mark.prove
def test_a_run_with_room_for_half_of_its_shards_takes_the_same_steps_and_refuses_to_go_back(tmp_path: Path):
    source = corpus(tmp_path / "x.jsonl", 600)
    (tmp_path / "before").mkdir()
    before = write_run_file(tmp_path / "before", tmp_path / "before" / "tokens")
    prepare(source, tmp_path / "before" / "tokens", **OPTIONS)
    few = (
        "--set",
        "checkpoint.every=2",
        "--set",
        "checkpoint.keep_last=20",
        "--set",
        "batch.micro_batch=16",
        "--set",
        "steps=64",
    )
    train(before, *SETTINGS, *few)

    run_file = write_run_file(tmp_path, tokens := tmp_path / "tokens")
    options = (*streamed(run_file, str(source)), *few, "--set", f"data.keep_gib={KEPT / GiB}")
    for room, said in (("0.00001", "up to 2 x --shard-tokens=3,000"), ("0.00003", "4 steps of 512 tokens up to a")):
        refused = train(run_file, *options, "--set", f"data.keep_gib={room}", expect=2)
        assert said in " ".join(refused.stderr.split())
    with training(run_file, *options) as run:
        run.wait_for(lambda: (tmp_path / "out" / "checkpoints").exists() and len(checkpoints(run_file)) > 2, 300)
        for pid in (run.process.pid, *run.workers()):
            assert pid is not None
            send_signal(pid, signal.SIGKILL)
    ended = train(run_file, *options, "--resume", expect=2)
    assert "its shards were trained on once and the first are deleted (data.keep_gib)" in ended.stderr
    assert f"delete {tokens} and raise data.keep_gib" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert occupied_bytes(tokens) <= KEPT < occupied_bytes(tmp_path / "before" / "tokens")
    done = trajectory(run_file)
    assert 10 < len(done) < 64
    assert done == trajectory(before)[: len(done)]

    first = tmp_path / "out" / "checkpoints" / checkpoints(run_file)[0]
    options = (*options, "--set", f"out={tmp_path / 'other'}", "--set", f"checkpoint.resume={first}")
    late = train(run_file, *options, expect=2)
    assert f"{first} is too old: it needs train-0000" in late.stderr
    shutil.rmtree(tokens)
    again = train(run_file, *options, "--set", "steps=34")
    assert "resumed from" in again.stdout


@pytest.mark.prove
def test_a_prepare_that_fails_ends_the_run_with_its_sentence(tmp_path: Path):
    run_file = write_run_file(tmp_path, tmp_path / "tokens")
    failed = train(run_file, *streamed(run_file, str(tmp_path / "absent.jsonl")), expect=2)
    assert "absent.jsonl: there is no such file or folder" in failed.stderr
    assert "Traceback" not in failed.stderr


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"path": "t", "prepare": ["x"]}, "set it to 'shards'"),
        ({"path": "s3://b/t", "order": "shards", "prepare": ["x"]}, "give a local path"),
        ({"path": "t", "order": "shards", "prepare": ["--glob", "*"]}, "its first element is SRC"),
        ({"path": "t", "order": "shards", "prepare": ["x", "--out=y"]}, "remove --out"),
        ({"sources": [{"path": "t", "weight": 1.0}], "prepare": ["x"]}, "data.prepare needs data.path"),
        ({"path": "t", "keep_gib": 1.0}, "no source has it; leave it out"),
    ],
)
def test_a_prepare_that_a_run_cannot_run_is_refused(data: dict[str, object], message: str):
    with pytest.raises(ConfigError, match=message):
        parse({"out": "out", "steps": 1, "batch": {"seq_len": 8, "global_batch": 1}, "data": data})


def test_the_wait_for_the_first_shard_of_another_process_has_an_end(tmp_path: Path):
    log = tmp_path / "logs" / "prepare-0.log"
    with (
        sole_owner(tmp_path / "tokens"),
        _Prepare(["absent"], tmp_path / "tokens", log, starts=True) as waits,
        pytest.raises(DataError, match=r"no shard after data\.wait_s=0 s: "),
    ):
        waits.wait_for_shard(lambda text: None, 0)
    assert not log.exists()


def test_every_process_of_the_run_can_read_why_a_prepare_failed(tmp_path: Path):
    assert prepare_failure(tmp_path) is None
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "prepare-0.failed").write_text("ended with code 2")
    assert prepare_failure(tmp_path) == "ended with code 2"
