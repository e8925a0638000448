"""Proves that durable copies of checkpoints are the checkpoints to the last bit, that none passes for complete before
it is, and that a run whose folder is lost goes on from the newest of them."""

import functools
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from shardwright.config import parse
from shardwright.runs.folder import checkpoint_name, published
from shardwright.runs.records import read_events
from shardwright.system.errors import CheckpointError, ConfigError, WorkerError
from shardwright.training import resuming
from shardwright.training.checkpoint import durable
from shardwright.training.checkpoint.durable import DurableFolder
from shardwright.training.checkpoint.store import CheckpointStore
from tests.distributed import run_ranks
from tests.marks import prove
from tests.mutation import Mutation, mutated
from tests.training.bugs.durable import STALE
from tests.training.object_store import s3
from tests.training.runs import Run, checkpoints, checksums, kill_itself, train, training, trajectory


def make(folder: Path, step: int, text: str, manifest: bool = True, n_ranks: int = 2) -> Path:
    """A folder like that of a checkpoint."""
    path = folder / checkpoint_name(step)
    path.mkdir(parents=True)
    for rank in range(n_ranks):
        (path / f"rank-{rank:05d}.safetensors").write_text(f"{text} of rank {rank}")
    (path / "run.toml").write_text(text)
    if manifest:
        (path / "manifest.json").write_text(text)
    return path


def contents(path: Path) -> dict[str, bytes]:
    return {str(each.relative_to(path)): each.read_bytes() for each in path.rglob("*") if each.is_file()}


def leave() -> bool:
    """What a rank does that need not wait for others."""
    return False


def copies_are_complete_in_order(folder: Path) -> None:
    """Ranks one after another; what is there before the last of them is not complete."""
    there, old = DurableFolder(str(folder / "there")), make(folder / "old", 7, "old")
    assert not durable.copy(there, old, 0, 2, leave)
    assert durable.copy(there, old, 1, 2, leave)
    new = make(folder / "new", 7, "new")
    assert not durable.copy(there, new, 0, 2, leave)  # the part of rank 1 that is there is of the old one
    assert there.steps() == [7]
    assert not there.is_complete(7)
    assert durable.copy(there, new, 1, 2, leave)
    assert not there.is_complete(7)
    assert durable.copy(there, new, 0, 2, leave)
    assert there.is_complete(7)
    assert contents(folder / "there/step-00000007") == contents(new)


def a_checkpoint_is_there_as_long_as_it_is_copied(folder: Path) -> None:
    store = CheckpointStore(folder, keep_last=1)
    store.keep(1)
    for step in (1, 2, 3):
        store.begin(step, 0)
        store.publish(step)
    assert [path.name for path in published(folder)] == [checkpoint_name(1), checkpoint_name(3)]
    store.keep(0)
    store.begin(4, 0)
    store.publish(4)
    assert [path.name for path in published(folder)] == [checkpoint_name(4)]


def taken(folder: Path, mutations: Sequence[Mutation]) -> list[tuple[str, str]]:
    """To be run on 2 ranks: the checkpoints that a run would go on from, by name and what is in them."""
    with mutated(*mutations):
        store, remarks = CheckpointStore(folder / "here"), list[str]()
        found = resuming.newest_first(store, DurableFolder(str(folder / "there")), remarks)
        return [(path.name, (path / "manifest.json").read_text()) for path in found]


def the_newest_comes_first(folder: Path, mutations: Sequence[Mutation] = ()) -> None:
    for step in (5, 10):
        make(folder / "here", step, "here")
    for step in (5, 15, 20):
        make(folder / "there", step, f"copy of {step}", manifest=step != 20, n_ranks=3)
    try:
        both = run_ranks(taken, 2, folder, mutations)
    except WorkerError as error:
        raise AssertionError(str(error)) from None
    expected = [
        (checkpoint_name(15), "copy of 15"),
        (checkpoint_name(10), "here"),
        (checkpoint_name(5), "here"),
        (checkpoint_name(5), "copy of 5"),
    ]
    assert both == [expected, expected]
    assert contents(folder / "here/step-00000015") == contents(folder / "there/step-00000015")
    assert sorted(path.name for path in (folder / "here").iterdir()) == [checkpoint_name(step) for step in (5, 10, 15)]


def all_of_them(folder: Path, mutations: Sequence[Mutation]) -> None:
    copies_are_complete_in_order(folder / "order")
    a_checkpoint_is_there_as_long_as_it_is_copied(folder / "held")
    the_newest_comes_first(folder / "newest", mutations)


def test_a_copy_is_complete_when_all_ranks_have_copied_this_very_checkpoint(tmp_path):
    copies_are_complete_in_order(tmp_path)


def test_a_checkpoint_that_is_being_copied_is_not_deleted(tmp_path):
    a_checkpoint_is_there_as_long_as_it_is_copied(tmp_path)


def test_a_run_goes_on_from_the_newest_checkpoint_or_complete_copy(tmp_path):
    the_newest_comes_first(tmp_path)


@pytest.mark.parametrize("name", STALE)
def test_a_bug_of_copies_is_seen(name, tmp_path):
    mutations = STALE[name].mutations
    with mutated(*mutations), pytest.raises((AssertionError, CheckpointError)):
        all_of_them(tmp_path, mutations)


def test_an_equal_copy_is_not_written_again(tmp_path):
    there, checkpoint = DurableFolder(str(tmp_path / "there")), make(tmp_path, 3, "x", n_ranks=1)
    assert durable.copy(there, checkpoint, 0, 1, leave)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "there").rglob("*")}
    assert durable.copy(there, checkpoint, 0, 1, leave)
    assert durable.copy(there, checkpoint, 1, 2, leave)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "there").rglob("*")} == before


def test_older_complete_copies_are_deleted_and_others_left(tmp_path):
    there = DurableFolder(str(tmp_path / "there"), keep_last=2)
    (tmp_path / "there/notes").mkdir(parents=True)
    make(tmp_path / "there", 2, "not complete", manifest=False)
    for step in (1, 3, 4, 5):
        assert durable.copy(there, make(tmp_path, step, str(step), n_ranks=1), 0, 1, leave)
    assert sorted(os.listdir(tmp_path / "there")) == ["notes", *map(checkpoint_name, (2, 4, 5))]


@pytest.mark.parametrize(("keep_last", "kept"), [(0, (1, 3, 4)), (1, (4,)), (4, (1, 3, 4))])
def test_so_many_complete_copies_are_kept(keep_last, kept, tmp_path):
    there = DurableFolder(str(tmp_path / "there"), keep_last)
    for step in (1, 3, 4):
        assert durable.copy(there, make(tmp_path, step, str(step), n_ranks=1), 0, 1, leave)
    assert sorted(os.listdir(tmp_path / "there")) == [*map(checkpoint_name, kept)]


def given(place: object, **more: object) -> tuple[str, ...]:
    """Options of a run with durable copies."""
    keys = {"durable": place, "durable_every": 10} | more
    return tuple(part for key, value in keys.items() for part in ("--set", f"checkpoint.{key}={value}"))


def killed_once_it_is_copied(place: Path, rank: int) -> None:
    """Rank 1 dies in step 13, when the copy of step 10 is complete."""
    from shardwright.training.step import Trainer

    update, calls = Trainer.update, list[float]()

    def update_or_die(self, rate):
        calls.append(rate)
        if rank == 1 and len(calls) == 13:
            until = time.monotonic() + 60
            while not (place / "step-00000010/manifest.json").exists() and time.monotonic() < until:
                time.sleep(0.01)
            kill_itself()
        return update(self, rate)

    Trainer.update = update_or_die


@prove
@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_run_whose_folder_is_lost_goes_on_from_its_durable_copy_to_the_same_last_bit(
    mode, run_file, uninterrupted, tmp_path
):
    place = tmp_path / "place"
    options = given(place, async_mode=mode)
    train(run_file, *options, fault=functools.partial(killed_once_it_is_copied, place), expect=3)
    shutil.rmtree(run_file.parent / "out")
    refused = train(run_file, *options, expect=2)
    assert "already holds checkpoints of a run, up to step-00000010; add --resume" in refused.stderr
    resumed = train(run_file, *options, "--resume")
    assert f"fetching {place}/step-00000010" in resumed.stdout
    assert trajectory(run_file) == trajectory(uninterrupted)[10:]
    assert checksums(run_file, 20) == checksums(uninterrupted, 20)
    assert contents(place / "step-00000020") == contents(run_file.parent / "out/checkpoints/step-00000020")
    assert f"copied to {place}/step-00000020 in" in resumed.stdout
    events = [each for each in read_events(run_file.parent / "out") if "copied" in each.text]
    assert [(each.kind, each.step) for each in events] == [("save", 20)]


def fails(times: int, step: int, rank: int) -> None:
    """Copying fails on rank 1 so many times at a step."""
    from shardwright.training.checkpoint import background, durable

    put, failed = durable.DurableFolder.put, list[int]()
    background.RETRY_AFTER_S = 0.01

    def fail_or_put(self: Any, at: int, file: Path) -> None:
        if rank == 1 and at == step and len(failed) < times:
            failed.append(at)
            raise CheckpointError(f"{self.url_of(at)}: no route to host")
        put(self, at, file)

    durable.DurableFolder.put = fail_or_put  # type: ignore[method-assign]


def test_a_copy_that_fails_is_told_and_the_run_goes_on_but_for_the_last(run_file, tmp_path):
    place = tmp_path / "place"
    run = train(run_file, *given(place, on_error="continue"), fault=functools.partial(fails, 9, 10))
    assert "the checkpoint after step 10 is not copied: copying" in run.stdout
    assert f"rank 1: {place}/step-00000010: no route to host; the run continues, the last good one is" in run.stdout
    assert DurableFolder(str(place)).is_complete(20)
    assert not DurableFolder(str(place)).is_complete(10)
    faults = [each for each in read_events(run_file.parent / "out") if each.kind == "fault"]
    assert [each.step for each in faults] == [10]


@prove
def test_the_last_copy_has_to_be_complete_and_is_made_after_a_resume(run_file, tmp_path):
    options = given(tmp_path / "place", on_error="continue")
    stopped = train(run_file, *options, fault=functools.partial(fails, 9, 20), expect=3)
    assert "step-00000020: no route to host" in stopped.stderr
    assert checkpoints(run_file) == ["step-00000015", "step-00000020"]
    train(run_file, *options, "--resume", "--set", "steps=25", fault=functools.partial(fails, 2, 25))
    assert DurableFolder(str(tmp_path / "place")).is_complete(25)


def killed_in_a_copy(rank: int) -> None:
    """Rank 1 dies when it has copied the half of its part of step 10."""
    from shardwright.training.checkpoint import durable

    put = durable._copy_to_disk

    def put_half(file: Path, to: Path) -> None:
        if rank == 1 and to.parent.name == "step-00000010":
            to.parent.mkdir(parents=True, exist_ok=True)
            to.with_name(f"{to.name}.tmp").write_bytes(file.read_bytes()[:100])
            kill_itself()
        put(file, to)

    durable._copy_to_disk = put_half


@prove
def test_killed_in_the_middle_of_a_copy_it_is_none_and_the_run_goes_on(run_file, uninterrupted, tmp_path):
    place = tmp_path / "place"
    train(run_file, *given(place), fault=killed_in_a_copy, expect=3)
    assert not DurableFolder(str(place)).is_complete(10)
    train(run_file, *given(place), "--resume")
    assert DurableFolder(str(place)).is_complete(10)
    assert checksums(run_file, 20) == checksums(uninterrupted, 20)
    assert contents(place / "step-00000020") == contents(run_file.parent / "out/checkpoints/step-00000020")


@prove
def test_a_run_begins_with_the_copy_at_a_url(run_file, uninterrupted, tmp_path):
    train(run_file, *given(tmp_path / "place"), "--set", "steps=10")
    url = f"file://{tmp_path}/place/step-00000010"
    again = train(run_file, "--set", f"checkpoint.resume={url}", "--set", f"out={tmp_path}/other")
    assert "step 10, 40 samples seen" in again.stdout
    assert checksums(run_file, 20, "other") == checksums(uninterrupted, 20)


TABLE = {"steps": 1, "out": "x", "data": {"path": "y"}, "batch": {"seq_len": 8, "global_batch": 1}}


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"durable_every": 10, "every": 5}, "checkpoint.durable_every=10 is of the copies in checkpoint.durable"),
        ({"durable_keep_last": 1}, "checkpoint.durable_keep_last=1 is of the copies in checkpoint.durable"),
        ({"durable": "p", "durable_every": 7, "every": 5}, "is no multiple of checkpoint.every=5"),
        ({"durable": "p", "durable_every": 7}, "checkpoint.every=0 saves none before the end"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(section, told):
    with pytest.raises(ConfigError) as raised:
        parse(TABLE | {"checkpoint": section})
    assert told in str(raised.value)


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("durable", "nosuch://b/x", "cannot be written: nosuch://b/x: fsspec has no access to nosuch://"),
        ("durable", "{out}/../run.toml/x", "cannot be written: "),
        ("durable", "{out}/checkpoints", "is the folder that checkpoints are copied from"),
        ("resume", "s4://b/step-00000001", "fsspec has no access to s4://"),
        ("resume", "memory://b/last", "is not the URL of a checkpoint, which ends with /step-00000100"),
        ("resume", "memory://b/step-00000001", "there is no complete checkpoint"),
    ],
)
def test_a_place_that_cannot_be_used_is_refused_before_the_run_begins(key, value, told, run_file):
    out = run_file.parent / "out"
    run = train(run_file, "--set", f"checkpoint.{key}={value.format(out=out)}", expect=2)
    assert told in run.stderr
    assert "Traceback" not in run.stderr
    assert not (out / "metrics.jsonl").exists()


@prove
def test_copies_go_to_an_object_store_and_come_back(run_file, uninterrupted, monkeypatch):
    with s3(monkeypatch) as (system, environment):

        def trained(*arguments: str, expect: int = 0) -> Run:
            with training(run_file, *arguments, environment=environment) as run:
                assert run.wait() == expect, run.stderr
            return run

        options = given("s3://bucket/run")
        run = trained(*options, "--set", "steps=10")
        assert "copied to s3://bucket/run/step-00000010 in" in run.stdout
        files = (run_file.parent / "out/checkpoints/step-00000010").iterdir()
        there = {Path(path).name: system.size(path) for path in system.find("bucket")}
        assert there == {path.name: path.stat().st_size for path in files}
        shutil.rmtree(run_file.parent / "out")
        resumed = trained(*options, "--resume")
        assert "fetching s3://bucket/run/step-00000010" in resumed.stdout
        assert checksums(run_file, 20) == checksums(uninterrupted, 20)
        mistyped = trained(*given("s3://bukcet/run"), "--resume", expect=2)
        assert "checkpoint.durable='s3://bukcet/run' cannot be written" in mistyped.stderr
        assert "Traceback" not in mistyped.stderr
        assert system.ls("") == ["bucket"]
