"""Proves that a flipped bit in one rank's weights is found by the next comparison of copies, and the rank named."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardwright.layout import Layout
from shardwright.parallel.model import ParallelModel
from shardwright.parallel.norm import local_part
from shardwright.training.copies import Differing, checksum, differing_copies, groups_of_copies, in_words
from shardwright.verification import rank as verify_rank
from tests.distributed import run_ranks
from tests.marks import prove, rest_prove
from tests.mutation import Mutation, mutated
from tests.training.runs import checkpoints, checksums, train, trajectory, write_run_file
from tests.training.worlds import CASE, EVEN, LONG, RATE

WEIGHT, NORM = "layers.0.ffn.up.weight", "norm.weight"
LAYOUTS = {
    "zero 0": (Layout(dp_replicate=4), WEIGHT, 3),
    "hybrid": (Layout(dp_replicate=2, dp_shard=2, zero=2), WEIGHT, 1),
    "tp": (Layout(tp=2, sequence_parallel=True), NORM, 1),
    "dualpipe": (Layout(pp=2, pp_schedule="dualpipe"), WEIGHT, 0),
}


def test_any_flipped_bit_changes_the_checksum():
    for dtype, view in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16), (torch.float64, torch.int64)):
        x = torch.randn(50, dtype=dtype)
        before = checksum(x)
        for bit in range(8 * x.element_size()):
            flipped = x.clone()
            one = torch.tensor(1, dtype=torch.int64) << bit
            flipped.view(view)[17] ^= one.to(view)
            assert checksum(flipped) != before, (dtype, bit)
            assert checksum(flipped.t()) == checksum(flipped)


def said(model: ParallelModel) -> str:
    found = differing_copies(model)
    return found.text if found else ""


def flipped(layout: Layout, name: str, at: int, mutations: tuple[Mutation, ...]) -> tuple[str, str, int]:
    """What is said after a step, and after a bit of a weight of rank `at` was flipped; groups of copies."""
    with mutated(*mutations):
        base = LONG if layout.tp > 1 else CASE
        accumulation = 4 if layout.pp > 1 else 2
        micro_batch = base.global_batch // (accumulation * layout.data_ranks)
        case = replace(base, spec=EVEN, micro_batch=micro_batch, dtype="float32")
        trainer = verify_rank.build_trainer(case, layout, "adamw")
        trainer.step(verify_rank.local_batch(case, layout, dist.get_rank(), 0), 0, RATE)
        before = said(trainer.model)
        if dist.get_rank() == at:
            shard = local_part(trainer.model.named_parameters[name].detach())
            shard.view(torch.int32).flatten()[-1] ^= 1 << 30
        return before, said(trainer.model), len(groups_of_copies(trainer.model))


def check_flip(name: str, mutations: tuple[Mutation, ...] = ()) -> None:
    layout, weight, at = LAYOUTS[name]
    found = run_ranks(flipped, layout.world_size, layout, weight, at, mutations)
    assert {before for before, *_ in found} == {""}
    (told,) = {told for _, told, _ in found}
    assert told.startswith(f"copies of {weight} differ: "), told
    if name == "zero 0":
        assert told.endswith("differ: rank 3 holds other bits than the 3 others, ranks 0, 1, 2")
    else:
        assert f"rank {at}" in told


@pytest.mark.parametrize("name", rest_prove(LAYOUTS, "hybrid"))
def test_a_flipped_bit_is_found_and_the_rank_named(name: str):
    check_flip(name)


def test_the_ranks_that_differ_from_most_are_named():
    found = {rank: (7 if rank < 4 else 9, 0, 5 if rank == 2 else 1) for rank in range(6)}
    assert in_words(found, ["w"] * 10) == Differing(
        "copies of w differ: rank 2 holds other bits than the 3 others, ranks 0, 1, 3", 2
    )
    assert in_words({0: (0, 0, 1), 1: (0, 0, 2)}, ["w"]) == Differing(
        "copies of w differ: rank 0 and rank 1 hold other bits, and so few copies do not tell which are right"
    )


def flips_after_step_6(rank: int, once: Path = Path("none")) -> None:
    """`once`: where it is not done again, once there is such a folder."""
    from shardwright.training.step import Trainer

    step = Trainer.step

    def flip(self, batch, at, rate):
        result = step(self, batch, at, rate)
        if rank == 1 and at == 5 and not once.exists():
            local_part(next(iter(self.model.named_parameters.values())).detach()).view(torch.int32)[0, 0] ^= 1
        return result

    Trainer.step = flip


@prove
def test_a_run_ends_at_the_first_check_after_a_bit_was_flipped(tokens: Path, tmp_path: Path):
    run_file = write_run_file(tmp_path, tokens)
    layout = ("--set", "layout.dp_shard=1", "--set", "layout.dp_replicate=2", "--set", "layout.zero=0")
    settings = ("--set", "faults.check_copies_every=4", "--set", "checkpoint.every=4")
    run = train(run_file, *layout, *settings, fault=flips_after_step_6, expect=3)
    assert run.stderr.startswith("error: after step 8 copies of embedding.weight differ: rank 0 and rank 1 hold other")
    assert "the check before, after step 4, found no difference" in run.stderr
    assert checkpoints(run_file) == ["step-00000004"]


@prove
def test_a_run_whose_copies_differ_starts_again_from_a_checkpoint_in_which_they_did_not(tokens: Path, tmp_path: Path):
    """Steps 3, 6, 9, ... are saved: without a check before each, step 6 would hold the wrong bit."""
    run_file = write_run_file(tmp_path, tokens)
    layout = ("--set", "layout.dp_shard=1", "--set", "layout.dp_replicate=2", "--set", "layout.zero=0")
    settings = (*layout, "--set", "checkpoint.every=3", "--set", "faults.check_copies_every=4")
    train(run_file, *settings, "--set", f"out={tmp_path}/quiet")
    fault = partial(flips_after_step_6, once=tmp_path / "out/logs/restart-1")
    run = train(run_file, *settings, "--max-restarts", "1", fault=fault)
    assert (
        "restart 1 of 1, from step-00000003, on 2 ranks: after step 6 copies of embedding.weight differ" in run.stderr
    )
    assert trajectory(run_file) == trajectory(run_file, "quiet")
    assert checksums(run_file, 20) == checksums(run_file, 20, "quiet")


BUGS = {
    "copies of weights are compared with themselves": (
        partial(check_flip, "hybrid"),
        Mutation(
            "tests.training.test_copies:differing_copies",
            "dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)",
            "pass",
        ),
    ),
    "copies over the ranks of a pipeline are not compared": (
        partial(check_flip, "dualpipe"),
        Mutation("shardwright.training.copies:_groups", "model.tied.group_of(model.held_on[name])", "None"),
    ),
}


@prove
@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_seen(name: str):
    check, mutation = BUGS[name]
    with pytest.raises(AssertionError):
        check(mutations=(mutation,))
