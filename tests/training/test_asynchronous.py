"""Proves that checkpoints which are written beside training are those that standing still would have written, and that
a run which is killed or whose disk fails at any moment has the last or the last but one whole."""

import errno
import functools
import os
import random
import signal
import threading
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwright.config import parse
from shardwright.layout.layout import Layout
from shardwright.runs.folder import published
from shardwright.system.errors import CheckpointError, ConfigError, WorkerError
from shardwright.training.checkpoint import saver as saver_module
from shardwright.training.checkpoint.manifest import TrainingProgress, read_manifest
from shardwright.training.checkpoint.saver import Saver, Snapshot
from shardwright.training.checkpoint.shards import file_name
from shardwright.training.checkpoint.storage import read_shard
from shardwright.training.checkpoint.store import CheckpointStore
from shardwright.training.resilience.spikes import SpikeState
from tests.distributed import run_ranks
from tests.marks import prove
from tests.mutation import Mutation, mutated
from tests.training.bugs.saving import IN_STEPS, STALE
from tests.training.checkpoints import DATA, ONE, ZERO_3, take_step
from tests.training.runs import checkpoints, checksums, events, lines, train, trajectory, write_run_file
from tests.training.worlds import SEED, build

ASYNC = ("--set", "checkpoint.async_mode=async")


def save_both_ways(folder: Path, mutations: Sequence[Mutation] = ()) -> str | None:
    """To be run on 2 ranks: save standing still; save beside a step, rank 1 writing only when that is taken. Returns
    what went wrong."""
    with mutated(*mutations):
        trainer = build(ZERO_3, torch.float32)
        take_step(trainer, ZERO_3, 0)
        guard: Any = types.SimpleNamespace(state=SpikeState([1.0], [2.0]))
        go, write = threading.Event(), saver_module.write_shards

        def later(*arguments: Any) -> Any:
            assert go.wait(60)
            return write(*arguments)

        progress, store = TrainingProgress(1, 12, SEED), CheckpointStore(folder / "beside", keep_last=9)
        trainer.spikes = guard
        Saver(CheckpointStore(folder / "still"), trainer).save(progress, DATA, "")
        saver = Saver(store, trainer, asynchronous=True)
        saver_module.write_shards = later
        try:
            saver.save(progress, DATA, "")
            trainer.spikes = None
            if dist.get_rank() == 0:  # its shards are complete, and the checkpoint is not
                go.set()
                partial = store.partial_of(1)
                while partial.exists() and not (partial / "written/rank-00000.json").exists():
                    time.sleep(0.01)
                time.sleep(0.1)
            early = store.path_of(1).exists()
            guard.state.losses.append(3.0)
            take_step(trainer, ZERO_3, 1)
            if saver.step != 1:
                return "it is not under way"
            threading.Timer(0.2, go.set).start()
            saver.save(TrainingProgress(2, 24, SEED), DATA, "")
            missing = not store.path_of(1).exists()
            saver.settle()
        except CheckpointError as error:
            return str(error)
        return "published early" if early else "begun early" if missing else None


def different(folder: Path, mutations: Sequence[Mutation] = ()) -> list[str]:
    """What is wrong with the checkpoint that was written beside training."""
    wrong = [each for each in run_ranks(save_both_ways, 2, folder, mutations) if each]
    if wrong:
        return wrong
    still, beside = folder / "still/step-00000001", folder / "beside/step-00000001"
    if not beside.is_dir():  # the second one took its place
        return ["it is gone"]
    names = [file_name(rank) for rank in range(2)]
    if read_manifest(still) != read_manifest(beside):
        return ["other manifests"]
    return [name for name in names if (still / name).read_bytes() != (beside / name).read_bytes()]


def test_a_checkpoint_written_beside_training_is_the_one_that_standing_still_writes_to_the_last_bit(tmp_path):
    assert different(tmp_path) == []


@prove
@pytest.mark.parametrize("name", [name for name in STALE if name not in IN_STEPS])
def test_a_bug_of_saving_beside_training_is_seen(name, tmp_path):
    try:
        seen = different(tmp_path, STALE[name].mutations)
    except WorkerError as error:  # rank 0 finds a gap as it publishes
        seen = [line for line in str(error).splitlines() if "would be saved with a gap" in line]
    assert seen


COMPRESSED = Layout(dp_replicate=2, compress_gradients="powersgd-2")


def save_while_a_step_is_taken(folder: Path, mutations: Sequence[Mutation] = ()) -> bool:
    """To be run on 2 ranks: save standing still; save beside a step, in which the tensors are copied as late as it
    lets them: when it is about to change weights. Returns whether it waited then."""
    with mutated(*mutations):
        trainer = build(COMPRESSED, torch.float32)
        take_step(trainer, COMPRESSED, 0)
        progress = TrainingProgress(1, 12, SEED)
        Saver(CheckpointStore(folder / "still"), trainer).save(progress, DATA, "")
        saver = Saver(CheckpointStore(folder / "beside"), trainer, asynchronous=True)
        late, make, wait, waited = threading.Event(), Snapshot.make, Snapshot.wait, []

        def make_late(self: Snapshot) -> Any:
            assert late.wait(60)
            return make(self)

        def wait_for_it(self: Snapshot) -> None:
            threading.Timer(0.2, late.set).start()
            began_s = time.monotonic()
            wait(self)
            waited.append(time.monotonic() - began_s)

        Snapshot.make, Snapshot.wait = make_late, wait_for_it
        saver.save(progress, DATA, "")
        take_step(trainer, COMPRESSED, 1)
        late.set()
        saver.settle()
        (saved,) = saver.news()
        return bool(waited) and 0.1 < waited[0] < saved.blocked_s + 0.1


def different_after_a_step(folder: Path, mutations: Sequence[Mutation] = ()) -> bool:
    """Whether the checkpoint that was written beside a step is another, or the step did not wait for it."""
    waited = run_ranks(save_while_a_step_is_taken, 2, folder, mutations)
    still, beside = folder / "still/step-00000001", folder / "beside/step-00000001"
    files = [file_name(rank) for rank in range(2)]
    return not all(waited) or any((still / name).read_bytes() != (beside / name).read_bytes() for name in files)


def test_a_step_waits_with_its_change_until_the_tensors_before_it_are_copied(tmp_path):
    assert not different_after_a_step(tmp_path)


@prove
@pytest.mark.parametrize("name", IN_STEPS)
def test_a_bug_of_copying_beside_a_step_is_seen(name, tmp_path):
    assert different_after_a_step(tmp_path, (IN_STEPS[name],))


def save_each_step_until_killed(folder: Path, after_s: float, killed: int) -> None:
    """To be run on 2 ranks, of which one dies in the middle of whatever it does."""
    trainer = build(ZERO_3, torch.float32)
    saver = Saver(CheckpointStore(folder, keep_last=2), trainer, asynchronous=True)
    for step in range(1, 10_000):
        if step == 2 and dist.get_rank() == killed:
            threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
        take_step(trainer, ZERO_3, step - 1)
        saver.settle()
        if dist.get_rank() == 0:
            with (folder.parent / f"{folder.name}.begun").open("a") as file:
                file.write(f"{step}\n")
        dist.barrier()
        saver.save(TrainingProgress(step, 12 * step, SEED), DATA, "")


@prove
def test_killed_at_any_moment_the_last_or_the_last_but_one_checkpoint_is_whole(tmp_path):
    draw, digests, newest_at = random.Random(3), {}, []
    for trial in range(10):
        folder = tmp_path / f"trial-{trial}"
        with pytest.raises(WorkerError, match="SIGKILL"):
            run_ranks(save_each_step_until_killed, 2, folder, draw.uniform(0.0, 0.5), trial % 2)
        begun = [int(line) for line in (tmp_path / f"trial-{trial}.begun").read_text().split()]
        saved = published(folder)
        newest = int(saved[-1].name.removeprefix("step-")) if saved else 0
        assert newest in (begun[-1] - 1, begun[-1]), (newest, begun[-1])
        newest_at.append(newest)
        for path in saved:
            manifest = read_manifest(path)
            step = manifest.progress.step
            assert manifest.progress == TrainingProgress(step, 12 * step, SEED)
            for name, tensor in manifest.tensors.items():
                for shard in tensor.shards:
                    read_shard(path, name, tensor.dtype, shard)
                    # The same run each time, so the same bits after as many steps.
                    assert digests.setdefault((step, name, shard.offsets), shard.xxh3_128) == shard.xxh3_128
        CheckpointStore(folder).sweep()
        assert sorted(folder.iterdir()) == saved
    assert len(set(newest_at)) > 1, "all were killed at the same step"


def fails_once(step: int, times: int, rank: int) -> None:
    """The disk of rank 1 fails so many times at a checkpoint."""
    from shardwright.training.checkpoint import background, saver, shards

    write, failed = shards.write_shards, []
    background.RETRY_AFTER_S = 0.01

    def fail_or_write(folder: Path, *arguments: Any) -> Any:
        if rank == 1 and folder.name.startswith(f"step-{step:08d}") and len(failed) < times:
            failed.append(folder)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return write(folder, *arguments)

    saver.write_shards = fail_or_write


def failing(times: int, step: int = 10) -> Any:
    return functools.partial(fails_once, step, times)


def test_a_checkpoint_that_cannot_be_written_is_told_and_the_run_goes_on(run_file):
    run = train(run_file, *ASYNC, "--set", "checkpoint.on_error=continue", fault=failing(9))
    told = "the checkpoint after step 10 is not written: "
    assert told in run.stdout
    assert "rank 1: [Errno 5] Input/output error; the run continues, the last good one is" in run.stdout
    assert checkpoints(run_file) == ["step-00000015", "step-00000020"]
    assert [(each.kind, each.step) for each in events(run_file)] == [
        ("start", 0),
        ("save", 5),
        ("fault", 10),
        ("save", 15),
        ("save", 20),
    ]
    saved = [line for line in lines(run_file) if line["kind"] == "checkpoint"]
    assert [line["step"] for line in saved] == [5, 15, 20]
    assert all(0 < line["blocked_s"] <= line["took_s"] and line["n_bytes"] > 10_000 for line in saved)
    assert [step for step, _, _ in trajectory(run_file)] == list(range(1, 21))


@prove
@pytest.mark.parametrize("mode", ["async", "disabled"])
def test_writing_is_tried_again_and_then_the_run_stops(run_file, mode):
    given = ("--set", f"checkpoint.async_mode={mode}")
    train(run_file, *given, "--set", "steps=15", fault=failing(2))
    assert checkpoints(run_file) == ["step-00000010", "step-00000015"]
    stopped = train(run_file, "--resume", *given, fault=failing(9, step=20), expect=3)
    assert "step-00000020.partial (earlier checkpoints are untouched): rank 1: [Errno 5]" in stopped.stderr
    assert "Traceback" not in stopped.stderr
    assert checkpoints(run_file) == ["step-00000010", "step-00000015"]


@prove
def test_the_last_checkpoint_of_a_run_has_to_be_written_whatever_the_policy(run_file):
    given = ("--set", "checkpoint.on_error=continue")
    stopped = train(run_file, *ASYNC, *given, fault=failing(9, step=20), expect=3)
    assert "rank 1: [Errno 5]" in stopped.stderr
    train(run_file, *ASYNC, *given, "--resume")
    assert checkpoints(run_file) == ["step-00000015", "step-00000020"]


@prove
def test_a_run_that_saves_beside_training_is_the_same_run(tokens, tmp_path):
    runs = []
    for name, given in (("still", ()), ("beside", ASYNC)):
        (tmp_path / name).mkdir()
        runs.append(write_run_file(tmp_path / name, tokens))
        train(runs[-1], *given)
    assert trajectory(runs[0]) == trajectory(runs[1])
    assert checksums(runs[0], 20) == checksums(runs[1], 20)
    assert checksums(runs[0], 15) == checksums(runs[1], 15)


def save_alone(folder: Path) -> list[int]:
    """To be run on 1 rank: the steps that `news` tells of, each once."""
    trainer = build(ONE, torch.float32)
    saver = Saver(CheckpointStore(folder, keep_last=9), trainer, asynchronous=True)
    told = []
    for step in (1, 2, 3):
        saver.save(TrainingProgress(step, 12 * step, SEED), DATA, "")
        told += [each.step for each in saver.news()]
    saver.settle()
    told += [each.step for each in saver.news()]
    return told + [each.step for each in saver.news()]


def test_each_checkpoint_is_told_of_once(tmp_path):
    assert run_ranks(save_alone, 1, tmp_path) == [[1, 2, 3]]
    assert [path.name for path in published(tmp_path)] == ["step-00000001", "step-00000002", "step-00000003"]


def test_states_on_a_disk_are_not_copied_to_memory():
    table = {
        "steps": 1,
        "out": "x",
        "data": {"path": "y"},
        "batch": {"seq_len": 8, "global_batch": 1},
        "layout": {"offload_optimizer": "disk"},
        "checkpoint": {"async_mode": "async"},
    }
    with pytest.raises(ConfigError, match=r"checkpoint\.async_mode='async' copies the optimizer's states to memory"):
        parse(table)
