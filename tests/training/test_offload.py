"""Proves that with optimizer states on a disk a run computes the same bits in less memory, that checkpoints hold them,
and that a disk that is full, gone or broken costs nothing that was saved."""

import ctypes
import errno
import functools
import gc
import os
import resource
import shutil
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwright.config import OptimizerSection, parse
from shardwright.layout.layout import Layout
from shardwright.model.spec import ModelSpec
from shardwright.system.errors import ConfigError, InputError
from shardwright.system.units import MiB
from shardwright.training.offload.on_disk import OptimizerOnDisk
from shardwright.training.offload.scratch import BLOCK
from shardwright.training.offload.states import CUT, OffloadedParameter, StatePiece, in_chunks
from shardwright.training.step import Trainer
from shardwright.verification import rank as verify_rank
from tests.distributed import run_ranks
from tests.marks import prove, rest_prove
from tests.mutation import Mutation, mutated
from tests.training.bugs.bug import EVEN, EXPERTS
from tests.training.checkpoints import Logical, equal, hop, logical
from tests.training.runs import checkpoints, train, training, trajectory, write_run_file
from tests.training.test_resume import killed_in_step_13, same_run
from tests.training.worlds import CASE, OPTIMIZER

ON_DISK = {"offload_optimizer": "disk"}
LAYOUTS = {
    "one rank": Layout(),
    "zero 0": Layout(dp_replicate=2),
    "zero 1": Layout(dp_shard=2, zero=1),
    "zero 2": Layout(dp_shard=2, zero=2),
    "zero 3": Layout(dp_shard=2, zero=3),
    "hybrid": Layout(dp_replicate=2, dp_shard=2, zero=3),
    "tp": Layout(tp=2),
    "cp": Layout(cp=2, zero=1),
    "pp": Layout(pp=2, pp_schedule="zb-v"),
    "ep": Layout(dp_shard=2, zero=2, ep=2),
    "tp, ep, zero 3": Layout(dp_shard=2, tp=2, zero=3, ep=4),
}
RUNS = {
    "adamw": OPTIMIZER,
    "bf16 states": OPTIMIZER.model_copy(update={"state_dtype": "bf16"}),
    "lion": OptimizerSection(name="lion", lr=1e-3),
    "sgd": OptimizerSection(name="sgd", lr=1e-2),
}


def trained(layout: Layout, run: OptimizerSection, dtype: str, mutations: Sequence[Mutation] = ()) -> Logical:
    """The training state of a rank after three steps."""
    spec = replace(EVEN, moe=EXPERTS if layout.ep > 1 else None, n_layers=2 * layout.pp)
    with ExitStack() as stack:
        stack.enter_context(mutated(*mutations))
        case = replace(CASE, spec=spec, seq_len=12, dtype=dtype, optimizer=run)
        trainer = verify_rank.build_trainer(case, layout, run.name)
        if layout.offload_optimizer == "disk":
            assert isinstance(trainer.optimizer, OptimizerOnDisk)
            assert len(trainer.optimizer.chunks) > 2
        for step in range(3):
            trainer.forward_backward(verify_rank.local_batch(case, layout, dist.get_rank(), step), step)
            trainer.update(run.lr)
        return logical(trainer)


def check(layout: Layout, run: OptimizerSection = OPTIMIZER, dtype: str = "float32") -> None:
    expected = run_ranks(trained, layout.world_size, layout, run, dtype)
    found = run_ranks(trained, layout.world_size, layout.changed(**ON_DISK), run, dtype)
    assert all(equal(*each) for each in zip(found, expected, strict=True))


SOME = ("one rank", "pp", "tp, ep, zero 3")  # the matrix of verify has every axis


@pytest.mark.parametrize("name", rest_prove(SOME, "one rank"))
def test_states_on_a_disk_give_the_bits_of_states_in_memory_on_every_layout(name: str):
    check(LAYOUTS[name])


@pytest.mark.parametrize("name", rest_prove(("bf16 states", "lion", "sgd")))
def test_states_on_a_disk_give_the_bits_of_states_in_memory_for_every_optimizer(name: str):
    check(LAYOUTS["one rank"], RUNS[name], "bfloat16")


def member(numel: int, dtype: torch.dtype) -> OffloadedParameter:
    return OffloadedParameter({}, nn.Parameter(torch.zeros(numel)), {"mean": dtype, "square": dtype}, {})


@pytest.mark.parametrize("chunk_bytes", [1, 5_000, 40_000, 10**9])
def test_every_element_is_in_one_piece_that_is_cut_at_whole_vectors(chunk_bytes: int):
    members = [member(numel, dtype) for numel in (7, 0, 3 * CUT, 5001, 1) for dtype in (torch.float32, torch.bfloat16)]
    chunks = in_chunks(members, chunk_bytes)
    of_member: dict[int, list[StatePiece]] = {id(each): [] for each in members}
    end = 0
    for chunk in chunks:
        assert (chunk.begin, chunk.n_bytes % BLOCK) == (end, 0)
        assert chunk.used <= max(chunk_bytes, 8 * CUT) + 64 * 2 * len(chunk.pieces)
        end += chunk.n_bytes
        places = [
            (at, at + piece.count * piece.member.dtypes[name].itemsize)
            for piece in chunk.pieces
            for name, at in piece.at.items()
        ]
        assert all(before <= after for (_, before), (after, _) in pairwise(places)), "no two states share a byte"
        assert places[-1][1] <= chunk.n_bytes
        for piece in chunk.pieces:
            of_member[id(piece.member)].append(piece)
    for each in members:
        pieces = of_member[id(each)]
        assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        assert all(piece.first % CUT == 0 for piece in pieces)
        assert [piece.first for piece in pieces[1:]] == [piece.first + piece.count for piece in pieces[:-1]]
        assert pieces[-1].first + pieces[-1].count == each.parameter.numel()


HOPS = [Layout(**ON_DISK), Layout(dp_shard=2, zero=3, **ON_DISK), Layout(), Layout(dp_shard=2, zero=1, **ON_DISK)]


@prove
def test_states_on_a_disk_are_saved_and_taken_up_bit_for_bit_by_any_layout_with_or_without(tmp_path: Path):
    expected: Logical = {}
    for step, layout in enumerate(HOPS):
        outcomes = run_ranks(hop, layout.world_size, tmp_path, layout, step)
        for loaded, saved in outcomes:
            assert not step or (loaded is not None and equal(loaded, expected)), layout
            assert not equal(saved, expected)
        expected = outcomes[0][1]


linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc, and asks glibc for its memory")
LARGE = replace(EVEN, vocab_size=400_000)
"""25.6M parameters in embedding and head: 205 MB of states, of which what the C library keeps is a few per cent."""


def status_bytes(name: str) -> int:
    """A line of what the kernel says of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def live_bytes() -> int:
    """The resident memory of this process without what it has freed and the C library keeps."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return status_bytes("VmRSS")


def two_steps(spec: ModelSpec, layout: Layout, folder: Path) -> Trainer:
    case = replace(CASE, spec=spec, seq_len=8, global_batch=2, micro_batch=2, dtype="float32")
    trainer = verify_rank.build_trainer(case, layout, "adamw", folder)
    for step in range(2):
        trainer.forward_backward(verify_rank.local_batch(case, layout, 0, step), step)
        trainer.update(1e-3)
    return trainer


def steps_of_large(layout: Layout, folder: Path, limit_bytes: int | None = None) -> tuple[int, int, float] | str:
    """Bytes by which the resident memory of this process has grown after two steps, bytes of optimizer states, and the
    norm of a parameter; or the error. `limit_bytes`: by how much its data may grow."""
    verify_rank.CHUNK_BYTES = MiB
    two_steps(EVEN, layout, folder)  # what the first step of a process alone takes
    before = live_bytes()
    if limit_bytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (status_bytes("VmData") + limit_bytes, resource.RLIM_INFINITY))
    try:
        trainer = two_steps(LARGE, layout, folder)
    except RuntimeError as error:
        return str(error)
    n_bytes = sum(each.nbytes for states in trainer.optimizer.state.values() for each in states.values())
    return live_bytes() - before, n_bytes, float(trainer.model.named_parameters["embedding.weight"].detach().norm())


@prove
@linux
def test_resident_memory_falls_by_the_bytes_of_the_states(tmp_path: Path):
    (in_memory,) = run_ranks(steps_of_large, 1, Layout(), tmp_path)
    (on_disk,) = run_ranks(steps_of_large, 1, Layout(**ON_DISK), tmp_path)
    assert in_memory[1:] == on_disk[1:]
    assert in_memory[0] - on_disk[0] == pytest.approx(in_memory[1], rel=0.1)


@prove
@linux
def test_a_model_whose_states_do_not_fit_into_memory_trains_with_a_disk(tmp_path: Path):
    # Weights, gradients and what a step allocates besides are 3 times the weights, and both states are 2 more.
    limit_bytes = 14 * LARGE.n_parameters
    (in_memory,) = run_ranks(steps_of_large, 1, Layout(), tmp_path, limit_bytes)
    assert "can't allocate memory" in in_memory
    (on_disk,) = run_ranks(steps_of_large, 1, Layout(**ON_DISK), tmp_path, limit_bytes)
    assert isinstance(on_disk, tuple), on_disk


def refused(folder: Path) -> list[str]:
    """What a rank says of a folder below a file, of one with a name that is too long, of files that may not grow so
    large, and of a disk without room."""
    (folder / f"file-{dist.get_rank()}").touch()
    statvfs, said = os.statvfs, []

    def full(path: Path) -> SimpleNamespace:
        return SimpleNamespace(f_bavail=statvfs(path).f_bavail and 3, f_frsize=4096)

    def build(path: Path) -> None:
        case = replace(CASE, spec=EVEN, dtype="float32")
        with pytest.raises(InputError) as caught:
            verify_rank.build_trainer(case, Layout(dp_replicate=2, **ON_DISK), "adamw", path)
        dist.barrier()
        said.append(str(caught.value))

    build(folder / f"file-{dist.get_rank()}" / "states")
    build(folder / ("a" * 300))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
    build(folder / "states")
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    os.statvfs = full  # type: ignore[assignment]
    build(folder / "states")
    return said


def test_a_place_that_cannot_hold_the_states_is_refused_before_the_first_step_with_the_arithmetic(tmp_path: Path):
    for rank, (below_a_file, too_long, too_large, no_room) in enumerate(run_ranks(refused, 2, tmp_path)):
        assert f"offload_path='{tmp_path}/file-{rank}/states': a file of 140 KiB cannot be made there" in below_a_file
        assert "Not a directory; name a folder with that room on a local disk that can be written" in below_a_file
        assert "a file of 140 KiB cannot be made there: File name too long; name a folder" in too_long
        assert "a file of 140 KiB cannot be made there: File too large" in too_large
        assert f"offload_path='{tmp_path}/states': the optimizer states of 2 ranks on" in no_room
        assert "take 140 KiB + 140 KiB = 280 KiB, and 12 KiB are free there; free 268 KiB more" in no_room
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file-0", "file-1", "states"]


def test_an_optimizer_of_whole_matrices_is_refused():
    run = {"out": "o", "steps": 1, "data": {"path": "d"}, "batch": {"seq_len": 8, "global_batch": 8}}
    with pytest.raises(ConfigError, match=r"'muon': it updates whole matrices.*one of adamw, sgd, lion$"):
        parse(run | {"layout": ON_DISK, "optimizer": {"name": "muon"}})


@pytest.fixture(scope="module")
def in_memory(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run file of a run of 20 steps with states in memory that nothing happened to."""
    run_file = write_run_file(tmp_path_factory.mktemp("in-memory"), tokens)
    train(run_file)
    return run_file


def on_disk(folder: Path) -> list[str]:
    return ["--set", "layout.offload_optimizer=disk", "--set", f"offload_path={folder}"]


@prove
@pytest.mark.parametrize("resumed_on_disk", [True, False])
def test_a_run_with_a_disk_that_is_killed_leaves_no_file_and_goes_on_to_the_last_bit(
    tokens: Path, tmp_path: Path, in_memory: Path, resumed_on_disk: bool
):
    run_file, folder = write_run_file(tmp_path, tokens), tmp_path / "states"
    train(run_file, *on_disk(folder), fault=killed_in_step_13, expect=3)
    assert os.listdir(folder) == []
    train(run_file, "--resume", *(on_disk(folder) if resumed_on_disk else []))
    same_run(run_file, in_memory)
    assert os.listdir(folder) == []


def the_disk_of_rank_1_fills_up(rank: int) -> None:
    """In the write behind of step 13."""
    write, calls = os.pwritev, []

    def write_or_fail(*arguments: Any) -> int:
        calls.append(arguments)
        if rank == 1 and len(calls) == 13:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*arguments)

    os.pwritev = write_or_fail


@prove
def test_a_disk_that_fails_in_the_middle_ends_the_run_with_a_sentence_and_costs_no_checkpoint(
    tokens: Path, tmp_path: Path, in_memory: Path
):
    run_file, folder = write_run_file(tmp_path, tokens), tmp_path / "states"
    failed = train(run_file, *on_disk(folder), fault=the_disk_of_rank_1_fills_up, expect=3)
    assert f"offload_path='{folder}', cannot be written: No space left on device" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert checkpoints(run_file) == ["step-00000005", "step-00000010"]
    train(run_file, "--resume")
    same_run(run_file, in_memory)


def deletes_the_folder(folder: Path, rank: int) -> None:
    """Rank 0 deletes the folder of the states, and what is in it, after step 7."""
    from shardwright.training.step import Trainer

    step = Trainer.step

    def delete_after(self, batch, number, rate):
        if rank == 0 and number == 7:
            shutil.rmtree(folder)
        return step(self, batch, number, rate)

    Trainer.step = delete_after


@prove
def test_two_runs_in_one_folder_and_its_deletion_change_nothing(tokens: Path, tmp_path: Path, in_memory: Path):
    folder, files = tmp_path / "states", []
    for name in "ab":
        (tmp_path / name).mkdir()
        files.append(write_run_file(tmp_path / name, tokens))
    with training(files[0], *on_disk(folder)) as first:
        train(files[1], *on_disk(folder), fault=functools.partial(deletes_the_folder, folder))
        assert first.wait() == 0
    for run_file in files:
        same_run(run_file, in_memory)


@prove
def test_train_ends_before_its_first_step_where_the_folder_cannot_be_made(tokens: Path, tmp_path: Path):
    run_file = write_run_file(tmp_path, tokens)
    ended = train(run_file, *on_disk(run_file / "states"), expect=2)
    assert f"offload_path='{run_file}/states': a file of" in ended.stderr
    assert "cannot be made there: Not a directory; name a folder" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert trajectory(run_file) == []
