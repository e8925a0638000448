"""Proves that a flipped bit in one rank's weights or optimizer states is found by the next comparison of copies, and
the rank named; and that all is compared of which several ranks hold copies."""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan

from shardwright.config import OptimizerSection
from shardwright.layout.layout import Layout
from shardwright.model.spec import ModelSpec
from shardwright.parallel.norm import local_part
from shardwright.training.checkpoint.state import named_tensors, stored_tensors
from shardwright.training.resilience.copies import (
    CopyDifference,
    DifferingCopies,
    checksum,
    differing_copies,
    groups_of_copies,
    in_words,
)
from shardwright.training.step import Trainer
from shardwright.verification import rank as verify_rank
from shardwright.verification.case import cut_optimizer
from shardwright.verification.matrix import layouts
from tests.distributed import run_ranks
from tests.marks import prove, rest_prove
from tests.mutation import Mutation, mutated
from tests.training.bugs.bug import EXPERTS
from tests.training.bugs.copies import BUGS, NOT_BEFORE_A_CHECKPOINT
from tests.training.runs import checkpoints, checksums, train, trajectory, write_run_file
from tests.training.worlds import CASE, EVEN, LONG, RATE

WEIGHT, NORM, EXPERT = "layers.0.ffn.up.weight", "norm.weight", "layers.1.ffn.experts.up"
OF_EXPERTS = replace(EVEN, moe=EXPERTS)


@dataclass(frozen=True)
class Flip:
    """A bit of a tensor, as a checkpoint names it, is flipped on one rank of a layout."""

    layout: Layout
    tensor: str
    rank: int
    spec: ModelSpec = EVEN
    optimizer: str = "adamw"
    dtype: str = "float32"
    among: tuple[int, ...] = ()
    """The ranks that hold a copy, of which some are to be named."""

    def trainer(self) -> Trainer:
        """That of this rank, after a step."""
        base = LONG if self.layout.tp * self.layout.cp > 1 else CASE
        accumulation = 4 if self.layout.pp > 1 else 2
        case = replace(
            base,
            spec=self.spec,
            micro_batch=base.global_batch // (accumulation * self.layout.data_ranks),
            dtype=self.dtype,
            optimizer=cut_optimizer(OptimizerSection(name=self.optimizer)),
        )
        trainer = verify_rank.build_trainer(case, self.layout, self.optimizer)
        trainer.step(verify_rank.local_batch(case, self.layout, dist.get_rank(), 0), 0, RATE)
        return trainer


HYBRID = Layout(dp_replicate=2, dp_shard=2, zero=2)
COMPRESSED = HYBRID.changed(compress_gradients="bf16")
FLIPS = {
    "zero 0": Flip(Layout(dp_replicate=4), f"model/{WEIGHT}", 3, among=(0, 1, 2, 3)),
    "zero 0 in bf16": Flip(Layout(dp_replicate=2), f"model/{WEIGHT}", 1, dtype="bfloat16"),
    "hybrid": Flip(HYBRID, f"model/{WEIGHT}", 1, among=(1, 3)),
    "hybrid, a state": Flip(HYBRID, f"optimizer/exp_avg_sq/{WEIGHT}", 2, among=(0, 2)),
    "hybrid, compressed": Flip(COMPRESSED, f"model/{WEIGHT}", 1, among=(1, 3)),
    "products": Flip(Layout(dp_replicate=2, compress_gradients="powersgd-4"), f"compression/basis/{WEIGHT}", 1),
    "states on a disk": Flip(
        Layout(dp_replicate=2, offload_optimizer="disk"), f"optimizer/exp_avg/{WEIGHT}", 1, among=(0, 1)
    ),
    "states on the host": Flip(HYBRID.changed(offload_optimizer="cpu"), f"optimizer/exp_avg/{WEIGHT}", 1),
    "a counter of zero 3": Flip(Layout(dp_shard=4, zero=3), f"optimizer/step/{WEIGHT}", 2, among=(0, 1, 2, 3)),
    "means over rows of zero 3": Flip(
        Layout(dp_shard=4, zero=3), f"optimizer/column/{WEIGHT}", 2, optimizer="adafactor", among=(0, 1, 2, 3)
    ),
    "scales of blocks over tp": Flip(
        Layout(tp=2), "optimizer/exp_avg_scale/layers.0.ffn.down.weight", 1, optimizer="adamw-8bit", among=(0, 1)
    ),
    "momentum of hybrid": Flip(HYBRID, f"optimizer/momentum/{WEIGHT}", 3, optimizer="muon", among=(1, 3)),
    "tp": Flip(Layout(tp=2, sequence_parallel=True), f"model/{NORM}", 1, among=(0, 1)),
    "tp and data ranks": Flip(Layout(tp=2, dp_replicate=2), f"model/{NORM}", 2, among=(0, 1, 2, 3)),
    "dualpipe": Flip(Layout(pp=2, pp_schedule="dualpipe"), f"model/{WEIGHT}", 0, among=(0, 1)),
    "dualpipe, a state": Flip(Layout(pp=2, pp_schedule="dualpipe"), f"optimizer/exp_avg/{WEIGHT}", 0),
    "experts of zero 0 over ep": Flip(
        Layout(dp_replicate=2, tp=2, ep=2), f"model/{EXPERT}", 3, OF_EXPERTS, among=(1, 3)
    ),
    "experts of zero 0 over tp": Flip(
        Layout(dp_replicate=2, tp=2), f"optimizer/exp_avg/{EXPERT}", 1, OF_EXPERTS, among=(0, 1, 2, 3)
    ),
    "experts of zero 0 over cp": Flip(
        Layout(dp_replicate=2, cp=2, ep=2, zero=0, compress_gradients="bf16"),
        f"model/{EXPERT}",
        1,
        OF_EXPERTS,
        among=(1, 3),
    ),
    "experts of hybrid": Flip(HYBRID.changed(ep=2), f"optimizer/exp_avg/{EXPERT}", 0, OF_EXPERTS, among=(0, 2)),
    "experts of hybrid, compressed": Flip(COMPRESSED.changed(ep=2), f"model/{EXPERT}", 0, OF_EXPERTS, among=(0, 2)),
    "biases of routers of zero 3": Flip(
        Layout(dp_shard=4, zero=3, ep=2), "model/layers.1.ffn.router.bias", 3, OF_EXPERTS, among=(0, 1, 2, 3)
    ),
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


def flip_bit(trainer: Trainer, name: str) -> None:
    """Flip a bit of this rank's last element of a tensor."""
    stored = stored_tensors(trainer).get(name)
    shard = local_part(named_tensors(trainer)[name].detach()) if stored is None else stored.read()
    shard.view(-1).view(torch.uint8)[-1] ^= 1 << 3
    if stored is not None:
        stored.write([0] * shard.dim(), shard)


Box = tuple[str, tuple[int, ...]]


@dataclass
class Seen:
    """By a rank, after a step."""

    before: DifferingCopies | None
    """What is said of its copies."""
    after: DifferingCopies | None
    """The same once the bit was flipped."""
    boxes: list[Box]
    """The parts of tensors that it would write to a checkpoint."""
    groups: dict[tuple[int, ...], list[str]]
    """Its groups of copies, with the names of what they hold copies of."""


def seen(flip: Flip, mutations: tuple[Mutation, ...]) -> Seen:
    with mutated(*mutations):
        trainer = flip.trainer()
        tensors = named_tensors(trainer)
        items = create_default_local_save_plan(dict(tensors), is_coordinator=False).items
        boxes = [
            (item.index.fqn, tuple(item.tensor_data.chunk.offsets))
            for item in items
            if item.tensor_data is not None and item.tensor_data.chunk.sizes.numel()
        ]
        groups = {ranks: names for ranks, (_, names) in groups_of_copies(trainer.model, tensors).items()}
        before = differing_copies(trainer)
        if flip.tensor and dist.get_rank() == flip.rank:
            flip_bit(trainer, flip.tensor)
        return Seen(before, differing_copies(trainer) if flip.tensor else None, boxes, groups)


def seen_by_ranks(flip: Flip, *mutations: Mutation) -> list[Seen]:
    return run_ranks(seen, flip.layout.world_size, flip, mutations)


def check_flip(flip: Flip, found: list[Seen]) -> None:
    """That all ranks say of the flipped bit what they know."""
    assert {each.before for each in found} == {None}
    (told,) = {each.after for each in found}
    *kind, parameter = flip.tensor.split("/")[1:]
    assert told is not None
    assert told.text.startswith(f"copies of {''.join(f'{each} of ' for each in kind)}{parameter} differ: "), told
    if len(flip.among) > 2:
        found_by = told.text.partition(f"rank {flip.rank} holds other bits than the ")[2].partition("others, ranks ")[2]
        assert {int(rank) for rank in found_by.split(", ")} < {*flip.among}, told
        assert told.rank == flip.rank
    elif flip.among:
        first, second = flip.among
        assert told.text.endswith(
            f"rank {first} and rank {second} hold other bits, and the copies are too few to know which are right"
        ), told


def not_compared(found: list[Seen]) -> list[Box]:
    """The parts of tensors that several ranks hold, of which not all are compared with each other, or others are."""
    holders: dict[Box, set[int]] = {}
    for rank, each in enumerate(found):
        for box in each.boxes:
            holders.setdefault(box, set()).add(rank)
    wrong = []
    for (name, offsets), ranks in holders.items():
        together, before = {min(ranks)}, set[int]()
        while together != before:
            before = set(together)
            for rank in before:
                together.update(*(group for group, names in found[rank].groups.items() if name in names))
        if together != ranks:
            wrong.append((name, offsets))
    return wrong


@pytest.mark.parametrize("name", rest_prove(FLIPS, "hybrid, a state", "experts of zero 0 over ep"))
def test_a_flipped_bit_is_found_and_the_rank_named_and_all_that_several_ranks_hold_is_compared(name: str):
    found = seen_by_ranks(FLIPS[name])
    check_flip(FLIPS[name], found)
    assert not_compared(found) == []


@prove
def test_all_copies_are_compared_and_equal_on_every_fiftieth_layout_of_4_ranks():
    for layout in layouts(OF_EXPERTS, 4, LONG.seq_len)[::50]:
        found = seen_by_ranks(Flip(layout, "", 0, OF_EXPERTS))
        assert {each.before for each in found} == {None}, layout
        assert not_compared(found) == [], layout


def test_the_ranks_that_differ_from_most_are_named():
    found = {
        rank: CopyDifference(
            False, 7 if rank < 4 else 9, "model/w" if rank < 4 else "model/x", (0,), 5 if rank == 2 else 1
        )
        for rank in range(6)
    }
    assert in_words(found) == DifferingCopies(
        "copies of w differ: rank 2 holds other bits than the 3 others, ranks 0, 1, 3", 2
    )
    two = {rank: CopyDifference(True, 0, "optimizer/exp_avg/w", (0,), rank) for rank in range(2)}
    few = "hold other bits, and the copies are too few to know which are right"
    assert in_words(two) == DifferingCopies(f"copies of exp_avg of w differ: rank 0 and rank 1 {few}")
    weights = {rank: CopyDifference(False, 3, "model/x", (5,), rank) for rank in (5, 6)}
    assert in_words(two | weights) == DifferingCopies(f"copies of x differ: rank 5 and rank 6 {few}")


def test_groups_that_share_a_rank_hold_copies_of_one_shard_and_others_do_not():
    """Of 2 x 2 copies that of rank 2 is wrong: it differs from rank 0, along one axis, and from rank 3, along another.
    Ranks 4 and 6 have another shard, with a wrong copy, too."""
    found = {
        0: CopyDifference(False, 0, "model/w", (0,), 1),
        2: CopyDifference(False, 0, "model/w", (0, 2), 5),
        3: CopyDifference(False, 0, "model/w", (2,), 1),
        4: CopyDifference(False, 0, "model/w", (4,), 7),
        6: CopyDifference(False, 0, "model/w", (4,), 8),
    }
    assert in_words(found) == DifferingCopies(
        "copies of w differ: rank 2 holds other bits than the 2 others, ranks 0, 3", 2
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


def check_before_a_checkpoint(tokens: Path, folder: Path, *mutations: Mutation) -> None:
    """A bit is flipped after step 6, after which the run saves; copies are compared every 4 steps."""
    run_file = write_run_file(folder, tokens)
    layout = ("--set", "layout.dp_shard=1", "--set", "layout.dp_replicate=2", "--set", "layout.zero=0")
    settings = ("--set", "faults.check_copies_every=4", "--set", "checkpoint.every=3")
    run = train(run_file, *layout, *settings, fault=partial(flips_in, mutations), expect=3)
    assert run.stderr.startswith("error: after step 6 copies of embedding.weight differ: "), run.stderr
    assert checkpoints(run_file) == ["step-00000003"]


_IN_PLACE = ExitStack()
"""To the end of the process."""


def flips_in(mutations: tuple[Mutation, ...], rank: int) -> None:
    flips_after_step_6(rank)
    _IN_PLACE.enter_context(mutated(*mutations))


@prove
def test_that_copies_are_not_compared_before_a_checkpoint_would_be_seen(tokens: Path, tmp_path: Path):
    (tmp_path / "right").mkdir()
    check_before_a_checkpoint(tokens, tmp_path / "right")
    (tmp_path / "wrong").mkdir()
    with pytest.raises(AssertionError, match="after step 8 copies of"):
        check_before_a_checkpoint(tokens, tmp_path / "wrong", NOT_BEFORE_A_CHECKPOINT)


@prove
@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_seen(name: str):
    flip, mutation = BUGS[name]
    found = seen_by_ranks(FLIPS[flip], mutation)
    with pytest.raises(AssertionError):
        check_flip(FLIPS[flip], found)
