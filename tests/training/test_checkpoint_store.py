"""Proves what happens to the folder of checkpoints: full disks, `keep_last`, sweeping, publishing by a rename."""

import errno
import os
import shutil
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwright.system.errors import CheckpointError
from shardwright.training.checkpoint import shards, storage
from shardwright.training.checkpoint.manifest import TrainingProgress
from shardwright.training.checkpoint.parts import PartReport, confirmations, good_report
from shardwright.training.checkpoint.saver import save
from shardwright.training.checkpoint.store import CheckpointStore
from tests.distributed import run_ranks
from tests.training.checkpoints import DATA, ONE, ZERO_3, load_ranks, take_step
from tests.training.worlds import SEED, build


def save_on_a_full_disk(folder: Path, free_bytes: int | None) -> str:
    """Save once; then with `free_bytes` on the disk, or where the disk fills up while rank 1 writes (None)."""
    trainer, store = build(ZERO_3, torch.float32), CheckpointStore(folder)
    save(store, trainer, TrainingProgress(1, 12, SEED), DATA, "")
    take_step(trainer, ZERO_3, 0)
    if free_bytes is not None:
        shutil.disk_usage = lambda path: types.SimpleNamespace(free=free_bytes)  # type: ignore[assignment]
    elif dist.get_rank() == 1:
        shards.write_safetensors = write_half
    with pytest.raises(CheckpointError) as caught:
        save(store, trainer, TrainingProgress(2, 24, SEED), DATA, "")
    dist.barrier()
    assert caught.value.exit_code == 2
    return str(caught.value)


def write_half(path: Path, *_: Any) -> None:
    """What Python does and raises when the disk is full."""
    path.write_bytes(b"half")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_the_problem_of_any_rank_ends_the_wait_for_the_others(tmp_path: Path):
    store = CheckpointStore(tmp_path)
    store.begin(1, 0)
    store.confirm(1, 0, PartReport().text())
    store.confirm(1, 2, PartReport(problem="rank 2: no space left").text())
    with pytest.raises(CheckpointError, match="rank 2: no space left"):
        confirmations(store, 1, 3, lambda: False, good_report)
    store.confirm(1, 2, PartReport().text())
    assert confirmations(store, 1, 3, lambda: False, good_report) is None
    store.confirm(1, 1, PartReport().text())
    reports = confirmations(store, 1, 3, lambda: False, good_report) or ()
    assert [report.text() for report in reports] == [PartReport().text()] * 3


def test_a_disk_without_room_for_the_next_checkpoint_is_noticed_before_anything_is_written(tmp_path):
    for message in run_ranks(save_on_a_full_disk, 2, tmp_path / "run", 2**16):
        needed, free = "the next checkpoint takes 125 KiB", "has 64 KiB free; free 60.9 KiB more"
        assert needed in message, message
        assert free in message, message
        assert f"the last good one is {tmp_path / 'run' / 'step-00000001'}" in message
    assert os.listdir(tmp_path / "run") == ["step-00000001"]
    assert isinstance(run_ranks(load_ranks, 1, tmp_path / "run" / "step-00000001", ONE)[0], dict)


def test_a_disk_that_fills_up_during_a_save_leaves_the_checkpoint_before_it(tmp_path):
    for message in run_ranks(save_on_a_full_disk, 2, tmp_path, None):
        doing = f"writing {tmp_path / 'step-00000002.partial'} (earlier checkpoints are untouched): rank "
        assert doing in message
        assert "no room to write (No space left on device); free some, or write to another disk" in message
        assert "Traceback" not in message
    assert os.listdir(tmp_path) == ["step-00000001"]
    assert isinstance(run_ranks(load_ranks, 1, tmp_path / "step-00000001", ONE)[0], dict)


def load_where_rank_1_raises(folder: Path, error: Exception) -> tuple[str, str]:
    """What a rank raises where reading fails on rank 1."""

    def fail(self: Any, *_: Any) -> None:
        raise error

    if dist.get_rank() == 1:
        storage.SafetensorsReader.read = fail  # type: ignore[method-assign]
    try:
        found = load_ranks(folder, ZERO_3)
        return type(found).__name__, str(found)
    except Exception as raised:
        return type(raised).__name__, str(raised)


def test_a_bug_in_loading_is_not_passed_off_as_bad_input(pristine):
    for error, kind in ((KeyError("x"), "WorkerError"), (PermissionError(13, "no"), "CheckpointError")):
        for found, told in run_ranks(load_where_rank_1_raises, 2, pristine, error):
            assert found == kind
            assert f"reading {pristine}: rank 1: " in told
            assert ("Traceback" in told) == (kind == "WorkerError")


def publish(store: CheckpointStore, step: int) -> None:
    store.begin(step, 0)
    (store.partial_of(step) / "manifest.json").write_text(str(step))
    store.publish(step)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_last_checkpoints_are_kept(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2)
    for step in (5, 10, 100_000_000):
        publish(store, step)
    assert names(tmp_path) == ["step-00000010", "step-100000000"]
    assert store.published() == [tmp_path / "step-00000010", tmp_path / "step-100000000"]


def test_a_new_checkpoint_is_never_deleted_for_damaged_ones_of_later_steps(tmp_path):
    for step in (5, 10, 15):
        publish(CheckpointStore(tmp_path, keep_last=3), step)
    publish(CheckpointStore(tmp_path, keep_last=1), 7)
    assert names(tmp_path) == ["step-00000007"]


def test_what_a_killed_process_left_is_swept_and_what_it_had_moved_aside_is_put_back(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2)
    publish(store, 5)
    store.begin(10, 0)
    (tmp_path / "step-00000005").rename(tmp_path / "step-00000005.replaced.partial")
    assert store.published() == []
    store.sweep()
    assert names(tmp_path) == ["step-00000005"]
    publish(store, 5)
    assert names(tmp_path) == ["step-00000005"]


def test_a_checkpoint_has_its_name_only_while_it_is_whole(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    seen = []
    rename = Path.rename

    def watch(self, target):
        seen.append((names(tmp_path), self.name, Path(target).name))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", watch)
    publish(store, 5)
    assert seen == [(["step-00000005.partial"], "step-00000005.partial", "step-00000005")]
    monkeypatch.setattr(shutil, "rmtree", lambda path, **how: None)  # killed before anything is deleted
    publish(store, 10)
    assert names(tmp_path) == ["step-00000005.deleted.partial", "step-00000010"]
    monkeypatch.undo()
    store.sweep()
    assert names(tmp_path) == ["step-00000010"]
