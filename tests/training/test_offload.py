"""Proves that with optimizer states on a disk a run computes the same bits in less memory, that checkpoints hold them,
and that a disk that is full, gone or broken costs nothing that was saved."""

import resource
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from shardwright.config import OptimizerSection
from shardwright.layout import Layout
from shardwright.training.offload.on_disk import OnDisk
from shardwright.training.offload.scratch import BLOCK
from shardwright.training.offload.states import CUT, Member, Piece, in_chunks
from shardwright.verification import rank as verify_rank
from tests.distributed import run_ranks
from tests.marks import prove, rest_prove
from tests.mutation import Mutation, mutated
from tests.training.bugs.bug import EVEN, EXPERTS
from tests.training.checkpoints import Logical, equal, hop, logical
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
            assert isinstance(trainer.optimizer, OnDisk)
            assert len(trainer.optimizer.chunks) > 2
        for step in range(3):
            trainer.forward_backward(verify_rank.local_batch(case, layout, torch.distributed.get_rank(), step), step)
            trainer.update(run.lr)
        return logical(trainer)


def check(layout: Layout, run: OptimizerSection = OPTIMIZER, dtype: str = "float32") -> None:
    expected = run_ranks(trained, layout.world_size, layout, run, dtype)
    found = run_ranks(trained, layout.world_size, layout.changed(**ON_DISK), run, dtype)
    assert all(equal(*each) for each in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", rest_prove(LAYOUTS, "zero 3"))
def test_states_on_a_disk_give_the_bits_of_states_in_memory_on_every_layout(name: str):
    check(LAYOUTS[name])


@pytest.mark.parametrize("name", rest_prove(RUNS, "bf16 states"))
def test_states_on_a_disk_give_the_bits_of_states_in_memory_for_every_optimizer(name: str):
    check(LAYOUTS["one rank"], RUNS[name], "bfloat16")


def member(numel: int, dtype: torch.dtype) -> Member:
    return Member({}, nn.Parameter(torch.zeros(numel)), {"mean": dtype, "square": dtype}, {})


@pytest.mark.parametrize("chunk_bytes", [1, 5_000, 40_000, 10**9])
def test_every_element_is_in_one_piece_that_is_cut_at_whole_vectors(chunk_bytes: int):
    members = [member(numel, dtype) for numel in (7, 0, 3 * CUT, 5001, 1) for dtype in (torch.float32, torch.bfloat16)]
    chunks = in_chunks(members, chunk_bytes)
    of_member: dict[int, list[Piece]] = {id(each): [] for each in members}
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


LARGE = replace(EVEN, vocab_size=200_000)
"""12.8M parameters in embedding and head."""


def status_bytes(name: str) -> int:
    """A line of what the kernel says of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def steps_of_large(layout: Layout, folder: Path, limit_bytes: int | None = None) -> tuple[int, int, float] | str:
    """Bytes by which the resident memory of this process has grown after two steps, bytes of optimizer states, and the
    norm of a parameter; or the error. `limit_bytes`: by how much its data may grow."""
    case = replace(CASE, spec=LARGE, seq_len=8, global_batch=2, micro_batch=2, dtype="float32")
    before = status_bytes("VmRSS")
    if limit_bytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (status_bytes("VmData") + limit_bytes, resource.RLIM_INFINITY))
    try:
        trainer = verify_rank.build_trainer(case, layout, "adamw", folder)
        for step in range(2):
            trainer.forward_backward(verify_rank.local_batch(case, layout, 0, step), step)
            trainer.update(1e-3)
    except RuntimeError as error:
        return str(error)
    n_bytes = sum(each.nbytes for states in trainer.optimizer.state.values() for each in states.values())
    embedding = trainer.model.named_parameters["embedding.weight"]
    return status_bytes("VmRSS") - before, n_bytes, float(embedding.double().norm())


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_resident_memory_falls_by_the_bytes_of_the_states(tmp_path: Path):
    (in_memory,) = run_ranks(steps_of_large, 1, Layout(), tmp_path)
    (on_disk,) = run_ranks(steps_of_large, 1, Layout(**ON_DISK), tmp_path)
    assert in_memory[1:] == on_disk[1:]
    assert in_memory[0] - on_disk[0] == pytest.approx(in_memory[1], rel=0.1)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_a_model_whose_states_do_not_fit_into_memory_trains_with_a_disk(tmp_path: Path):
    weights_bytes = 4 * LARGE.n_parameters
    (in_memory,) = run_ranks(steps_of_large, 1, Layout(), tmp_path, 3 * weights_bytes)
    assert "can't allocate memory" in in_memory
    (on_disk,) = run_ranks(steps_of_large, 1, Layout(**ON_DISK), tmp_path, 3 * weights_bytes)
    assert isinstance(on_disk, tuple), on_disk
