"""Proves that a host which is lost takes no local checkpoint with it: what the others have of it is the whole, to the
last bit, and what is not whole is passed over."""

import functools
import itertools
import os
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardwright.config import parse
from shardwright.layout.layout import Layout
from shardwright.runs.folder import published
from shardwright.system.errors import CheckpointError, ConfigError, WorkerError
from shardwright.training.checkpoint import messages
from shardwright.training.checkpoint.local import FileTransfer, Hosts, LocalLevel, transfers
from shardwright.training.checkpoint.manifest import TrainingProgress
from shardwright.training.checkpoint.saver import Saver
from shardwright.training.checkpoint.state import load, named_tensors
from shardwright.training.checkpoint.store import CheckpointStore
from shardwright.training.resuming import newest_first
from shardwright.verification.ranks import TIMEOUT_S
from tests.distributed import run_ranks
from tests.marks import prove
from tests.mutation import Mutation, mutated
from tests.training.bugs.local import STALE
from tests.training.checkpoints import DATA, Logical, equal, logical, take_step
from tests.training.runs import checksums, kill_itself, lines, train, training, trajectory
from tests.training.worlds import SEED, build

LAYOUT, OTHER = Layout(dp_shard=3, zero=3), Layout(dp_replicate=3)
"""One rank on each of three hosts."""


def level_of(folder: Path, layout: Layout) -> LocalLevel:
    """That of this rank, which is alone on its host."""
    return LocalLevel(folder / f"host-{dist.get_rank()}", folder / "out", build(layout, torch.float32))


def save_on_hosts(folder: Path, mutations: Sequence[Mutation], fails: bool = False) -> list[Logical] | str:
    """To be run on every rank: the states after three steps, each saved; or why the last could not be."""
    with mutated(*mutations):
        level = level_of(folder, LAYOUT)
        saver, states = Saver(CheckpointStore(folder / "out"), level.trainer, local=level), []
        for step in range(1, 4):
            take_step(level.trainer, LAYOUT, step - 1)
            if fails and step == 3 and dist.get_rank() == 1:
                (folder / "host-1/step-00000003.partial/rank-00000.safetensors.tmp").mkdir(parents=True)
            saver.save_locally(TrainingProgress(step, 12 * step, SEED), DATA, f"rank = {dist.get_rank()}\n")
            states.append(logical(level.trainer))
        try:
            saver.settle()
        except CheckpointError as error:
            return str(error)
        return states


@dataclass(frozen=True)
class Lost:
    """What is left of a run that has saved on three hosts, and the step that is whole there."""

    name: str
    step: int
    change: Callable[[Path], None]
    remarks: tuple[str, ...] = ()


def lost(*hosts: int) -> Callable[[Path], None]:
    """These hosts with all that they have."""
    return lambda folder: [shutil.rmtree(folder / f"host-{host}") for host in hosts] and None


def on_one(folder: Path) -> None:
    """One host has published, and all processes are killed before another has."""
    for host in (1, 2):
        (folder / f"host-{host}/step-00000003").rename(folder / f"host-{host}/step-00000003.partial")


def on_one_and_lost(folder: Path) -> None:
    on_one(folder)
    lost(1)(folder)


def bring_older_steps(folder: Path) -> None:
    """A host that was away comes back with another checkpoint after as many steps."""
    shutil.rmtree(folder / "host-2/step-00000003")
    shutil.copytree(folder / "host-2/step-00000002", folder / "host-2/step-00000003")


NOT_WHOLE = ("the local checkpoint after step 3 is not whole on the hosts that are here",)
CASES = (
    Lost("nothing", 3, lambda folder: None),
    Lost("host 0", 3, lost(0)),
    Lost("host 2", 3, lost(2)),
    Lost("published on one host", 2, on_one, NOT_WHOLE),
    Lost("published on one host, another lost", 2, on_one_and_lost, NOT_WHOLE),
    Lost("another time", 3, bring_older_steps),
)


def take_up(folder: Path, states: list[Logical], mutations: Sequence[Mutation]) -> list[str]:
    """To be run on every rank: what is wrong with the newest checkpoint that is whole, in each case, loaded."""
    wrong = []
    with mutated(*mutations):
        for case, layout in zip(CASES, itertools.cycle((OTHER, LAYOUT)), strict=False):
            level, remarks = level_of(folder / case.name, layout), list[str]()
            for tensor in named_tensors(level.trainer).values():
                tensor.detach().zero_()
            path = next(newest_first(CheckpointStore(folder / "none"), None, remarks, level))
            step = load(path, level.trainer, DATA).progress.step
            if (step, tuple(remarks)) != (case.step, case.remarks) or not equal(
                logical(level.trainer), states[case.step - 1]
            ):
                wrong.append(f"{case.name}: step {step}, {remarks}")
    return wrong


def check_lost(folder: Path, mutations: Sequence[Mutation] = ()) -> None:
    states = run_ranks(save_on_hosts, 3, folder / "saved", mutations)[0]
    assert isinstance(states, list), states
    names = ["host.json", "step-00000002", "step-00000003"]
    assert sorted(path.name for path in (folder / "saved/host-1").iterdir()) == names
    for case in CASES:
        shutil.copytree(folder / "saved", folder / case.name)
        case.change(folder / case.name)
        for each in (folder / case.name).glob("host-*/host.json"):  # the path of `out` is in it
            each.unlink()
    # With a bug ranks may wait for one another for ever, which is seen sooner than in a test of healthy code.
    waited_s = 40.0 if mutations else TIMEOUT_S
    assert run_ranks(take_up, 3, folder, states, mutations, timeout_s=waited_s) == [[]] * 3


def check_failed_copy(folder: Path, mutations: Sequence[Mutation] = ()) -> None:
    (folder / "failed").mkdir()
    told = run_ranks(save_on_hosts, 3, folder / "failed", mutations, True)
    assert all(isinstance(each, str) and "rank 1 on " in each and "Is a directory" in each for each in told), told
    for host in range(3):
        assert [path.name for path in published(folder / f"failed/host-{host}")] == ["step-00000001", "step-00000002"]


def clear_after(folder: Path, mutations: Sequence[Mutation]) -> list[bool]:
    """To be run on one rank: whether the folder is there after a run that has saved 6 steps elsewhere, and 7."""
    with mutated(*mutations):
        level, there = level_of(folder, Layout()), []
        level.store.path_of(7).mkdir(parents=True)
        for step in (6, 7):
            level.clear(step)
            there.append(level.folder.exists())
        return there


def check_cleared(folder: Path, mutations: Sequence[Mutation] = ()) -> None:
    assert run_ranks(clear_after, 1, folder / "cleared", mutations) == [[True, False]]


@pytest.mark.prove
def test_a_lost_host_takes_nothing_with_it_and_what_is_not_whole_is_passed_over(tmp_path):
    check_lost(tmp_path)


def test_a_copy_that_fails_is_told_by_every_rank_and_nothing_is_published(tmp_path):
    check_failed_copy(tmp_path)


def test_folders_are_deleted_at_the_end_of_a_run_that_has_saved_as_much_elsewhere(tmp_path):
    check_cleared(tmp_path)


def check_all(folder: Path, mutations: Sequence[Mutation]) -> None:
    for check in (check_failed_copy, check_cleared, check_lost):
        check(folder, mutations)


@prove
@pytest.mark.parametrize("name", STALE)
def test_a_bug_of_local_checkpoints_is_seen(name, tmp_path):
    with pytest.raises((AssertionError, WorkerError, CheckpointError)):
        check_all(tmp_path, STALE[name].mutations)


def test_every_rank_has_a_keeper_on_another_host_and_files_come_from_who_has_them():
    hosts = Hosts.by_name(["a", "a", "b", "c", "c", "c"])
    assert hosts.host_of_rank == (0, 0, 1, 2, 2, 2)
    assert [hosts.keeper(rank) for rank in range(6)] == [2, 2, 3, 0, 1, 0]
    assert sorted(of for rank in range(6) for of in hosts.kept_by(rank)) == list(range(6))
    assert Hosts.by_name(["a", "a"]).keeper(0) is None
    there = {0: [0, 1, 3, 4, 5], 1: [2, 0, 1]}
    needed = [[0], [1], [2], [3, 0], [4], [5, 2]]
    assert transfers(hosts, there, needed) == [
        FileTransfer(0, 0, 3),
        FileTransfer(2, 2, 4),
        FileTransfer(3, 0, 5),
        FileTransfer(4, 1, 3),
        FileTransfer(5, 0, 4),
    ]


def long_files(folder: Path) -> bytes:
    """To be run on two ranks, each of which sends the other a file of many parts before it receives one."""
    messages._CHUNK_BYTES = 1000
    rank, sender = dist.get_rank(), messages.CheckpointMessages(60.0)
    (folder / f"{rank}").write_bytes(bytes([rank]) * 12345)
    sender.send_file(folder / f"{rank}", 1 - rank)
    sender.receive_file(folder / f"from-{1 - rank}", 1 - rank)
    sender.settle()
    return (folder / f"from-{1 - rank}").read_bytes()


def test_files_of_many_parts_cross_each_other(tmp_path):
    assert run_ranks(long_files, 2, tmp_path) == [b"\1" * 12345, b"\0" * 12345]


def killed_once_it_is_kept(folder: Path, rank: int) -> None:
    """Rank 1 dies in step 14, when the checkpoint of step 12 is published on both hosts. Rank 0, which tells of it at
    the end of a step, does so at that of step 13."""
    from shardwright.training.saving import SaveCheckpoints
    from shardwright.training.step import Trainer

    update, tell, calls = Trainer.update, SaveCheckpoints.tell, list[float]()

    def update_or_die(self, rate):
        calls.append(rate)
        if rank == 1 and len(calls) == 14:
            until = time.monotonic() + 60
            while not all((folder / f"host-{i}/step-00000012").exists() for i in (0, 1)) and time.monotonic() < until:
                time.sleep(0.01)
            kill_itself()
        return update(self, rate)

    def tell_of_it(self):
        tell(self)
        until = time.monotonic() + 60
        while (rank, len(calls)) == (0, 13) and 12 not in local_steps(folder.parent) and time.monotonic() < until:
            time.sleep(0.01)
            tell(self)

    Trainer.update, SaveCheckpoints.tell = update_or_die, tell_of_it


def local_steps(folder: Path) -> list[int]:
    """The local checkpoints that the run in a folder has told of."""
    told = lines(folder / "run.toml")
    return [each["step"] for each in told if each["kind"] == "checkpoint" and each.get("local")]


def on_two_hosts(run_file: Path, folder: Path, *arguments: str, fault=None) -> tuple[list[int], str]:
    """A run of two ranks, each of which is started by itself and has a local folder of its own; codes and output."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
    with ExitStack() as stack:
        runs = []
        for rank in range(2):
            environment = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            local = f"checkpoint.local={folder}/host-{rank}"
            given = ("--set", local, "--set", "checkpoint.local_every=3", "--set", "checkpoint.every=50", *arguments)
            runs.append(stack.enter_context(training(run_file, *given, fault=fault, environment=environment)))
        return [run.wait() for run in runs], "".join(run.stdout + run.stderr for run in runs)


@prove
def test_a_run_of_two_hosts_of_which_one_is_lost_goes_on_from_the_copy_to_the_same_last_bit(
    run_file, uninterrupted, tmp_path
):
    folder = tmp_path / "hosts"
    codes, _ = on_two_hosts(run_file, folder, fault=functools.partial(killed_once_it_is_kept, folder))
    assert codes == [3, -9]
    assert not published(run_file.parent / "out/checkpoints")
    shutil.rmtree(folder / "host-1")
    codes, said = on_two_hosts(run_file, folder)
    assert codes == [2, 2]
    assert "host-0' holds checkpoints of a run, up to step-00000012; add --resume" in said
    shutil.rmtree(folder / "host-1")
    codes, said = on_two_hosts(run_file, folder, "--resume")
    assert codes == [0, 0], said
    assert f"resumed from {folder}/host-0/step-00000012: step 12" in said
    assert trajectory(run_file) == trajectory(uninterrupted)
    assert checksums(run_file, 20) == checksums(uninterrupted, 20)
    assert not any(os.path.exists(folder / f"host-{i}") for i in (0, 1))
    assert local_steps(tmp_path) == [3, 6, 9, 12, 15, 18]


TABLE = {"steps": 1, "out": "x", "data": {"path": "y"}, "batch": {"seq_len": 8, "global_batch": 1}}


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"local_every": 10}, "checkpoint.local_every=10 is of checkpoints in checkpoint.local"),
        ({"local": "p"}, "set checkpoint.local_every, too"),
        ({"local": "s3://b/x", "local_every": 5}, "checkpoint.durable takes URLs"),
        ({"local": "p", "local_every": 10, "every": 5}, "is a multiple of checkpoint.every=5"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(section, told):
    with pytest.raises(ConfigError) as raised:
        parse(TABLE | {"checkpoint": section})
    assert told in str(raised.value)


@pytest.mark.parametrize(
    ("place", "told"),
    [("{out}/checkpoints", "is a folder of the run itself"), ("{out}/../run.toml/x", "cannot be written: ")],
)
def test_a_place_that_cannot_be_used_is_refused_before_the_run_begins(place, told, run_file):
    out = run_file.parent / "out"
    local = ("--set", f"checkpoint.local={place.format(out=out)}", "--set", "checkpoint.local_every=2")
    run = train(run_file, *local, expect=2)
    assert told in run.stderr
    assert "Traceback" not in run.stderr
    assert not (out / "metrics.jsonl").exists()
