"""Compares by checksum the copies of tensors on different ranks, to detect a faulty device that silently changes one.

Copies are bit-equal by construction: every rank that has a copy of weights, optimizer states or state of compressed
gradients updates it in the same way. `shardwright verify` proves this for each layout. A tensor has copies

- along each axis of the mesh over which it is not sharded: dp_replicate, data ranks without ZeRO, norms over tp, the
  mean over the rows of a matrix whose rows are sharded, a counter of steps over all ranks of a stage;
- over the ranks of pp that have a tied parameter, or the same stage.

If copies are equal along each axis, all copies are equal. A checkpoint contains one of the copies.

Checksum of a shard: the sum, modulo 2^64, of its bytes read as 8-byte integers, plus the remaining bytes read as 1-byte
integers. One flipped bit changes the sum by a power of 2 and is always detected; two flipped bits may cancel.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright.model.modules import parameter_of, row_of
from shardwright.parallel.model import ParallelModel
from shardwright.parallel.norm import local_part
from shardwright.parallel.objects import gathered
from shardwright.system.errors import CopiesError
from shardwright.system.processes import ranks_in_words
from shardwright.training.checkpoint.state import named_tensors, stored_tensors
from shardwright.training.hooks import Hook, RunStart, TakenStep, due
from shardwright.training.run_log import RunLog
from shardwright.training.step import Trainer

_WORD_BYTES = 8
Ranks = tuple[int, ...]


def checksum(tensor: Tensor) -> Tensor:
    """Return the checksum of a tensor, an int64 scalar on its device."""
    flat = tensor.detach().contiguous().flatten()
    if flat.storage_offset() * flat.element_size() % _WORD_BYTES:
        flat = flat.clone()
    content = flat.view(torch.uint8)
    n = len(content) // _WORD_BYTES * _WORD_BYTES
    return content[:n].view(torch.int64).sum() + content[n:].sum(dtype=torch.int64)


class CopyGroup(NamedTuple):
    """A process group of this rank whose ranks have the same shards, and the tensors' names as in a checkpoint."""

    group: dist.ProcessGroup
    names: list[str]


def groups_of_copies(model: ParallelModel, tensors: Mapping[str, Tensor]) -> dict[Ranks, CopyGroup]:
    """Return the groups of this rank that have copies, by their ranks. Each group means a collective, so the order
    is the same on all ranks of the world. `tensors`: from `named_tensors`."""
    groups: dict[Ranks, CopyGroup] = {}
    ranks_of: dict[dist.ProcessGroup, Ranks] = {}
    for name, tensor in sorted(tensors.items()):  # ranks of pp have them in different orders
        for ranks, group in _groups(model, name, tensor, ranks_of):
            groups.setdefault(ranks, CopyGroup(group, [])).names.append(name)
    return dict(sorted(groups.items()))


def _groups(
    model: ParallelModel, name: str, tensor: Tensor, ranks_of: dict[dist.ProcessGroup, Ranks]
) -> Iterator[tuple[Ranks, dist.ProcessGroup]]:
    """Yield this rank's groups that have the same shard of a tensor. `ranks_of`: cache of each group's ranks."""

    def ranks(group: dist.ProcessGroup) -> Ranks:
        if group not in ranks_of:
            ranks_of[group] = tuple(sorted(dist.get_process_group_ranks(group)))
        return ranks_of[group]

    rank, parameter = dist.get_rank(), parameter_of(name)
    others: set[int] = set()
    """Ranks with other shards, along any axis."""
    if isinstance(tensor, DTensor):
        for axis, placement in enumerate(tensor.placements):
            if not placement.is_replicate():
                others |= {*ranks(tensor.device_mesh.get_group(axis))} - {rank}
    experts = isinstance(tensor, DTensor) and row_of(model.spec, parameter).split == "experts"
    mesh = model.mesh if not experts or model.expert_mesh is None else model.expert_mesh
    for name_of_axis in mesh.mesh_dim_names or ():
        group = mesh.get_group(name_of_axis)
        if name_of_axis != "pp" and group.size() > 1 and others.isdisjoint(ranks(group)):
            yield ranks(group), group
    if tied := model.tied.group_of(model.held_on[parameter]):
        yield ranks(tied), tied


@dataclass(frozen=True)
class DifferingCopies:
    """A description of copies that differ, and the rank whose copy is wrong, or None if unknown or more than one."""

    text: str
    rank: int | None = None


@dataclass(frozen=True, order=True)
class CopyDifference:
    """The first difference that a rank found, ordered weights before states and then as in the model: the tensor,
    the first ranks of the groups in which it differs, and the checksum of this rank's copy."""

    is_state: bool
    place: int
    name: str
    groups: Ranks
    total: int


@torch.no_grad()
def differing_copies(trainer: Trainer) -> DifferingCopies | None:
    """Compare all copies. Return the same description of a difference on every rank, or None if all copies are
    equal. Every rank calls this. It synchronizes with the device and reads states that are on a disk."""
    model, tensors, stored = trainer.model, named_tensors(trainer), stored_tensors(trainer)
    groups = groups_of_copies(model, tensors)
    sums: dict[str, Tensor] = {}
    for name in {name for compared in groups.values() for name in compared.names}:
        local = stored[name].read() if name in stored else local_part(tensors[name])
        sums[name] = checksum(local).to(model.mesh.device_type)
    places = {name: place for place, name in enumerate(model.held_on)}
    differs_in: defaultdict[str, list[int]] = defaultdict(list)
    for ranks, (group, names) in groups.items():
        local_sums = torch.stack([sums[name] for name in names])
        # One all-reduce gives the maximum and the minimum, since ~x falls as x rises.
        extremes = torch.cat([local_sums, ~local_sums])
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
        largest, least = extremes.chunk(2)
        for name, differs in zip(names, (largest != ~least).tolist(), strict=True):
            if differs:
                differs_in[name].append(ranks[0])
    differing = []
    for name, groups_of_it in differs_in.items():
        kind, _, parameter = name.rpartition("/")
        differing.append(CopyDifference(kind != "model", places[parameter], name, tuple(groups_of_it), int(sums[name])))
    everyone = gathered(min(differing, default=None), CopyDifference | None)
    by_rank = {rank: difference for rank, difference in enumerate(everyone) if difference is not None}
    return in_words(by_rank) if by_rank else None


def in_words(by_rank: Mapping[int, CopyDifference]) -> DifferingCopies:
    """Describe the copies that differ. `by_rank`: the difference of each rank that found one."""
    first = min(by_rank.values())
    alike = {rank: diff for rank, diff in by_rank.items() if diff.name == first.name}
    groups: set[int] = set()
    reached = {*first.groups}
    while reached - groups:  # groups that share a rank have copies of the same shard
        groups |= reached
        reached = {group for diff in alike.values() if groups & {*diff.groups} for group in diff.groups}
    by_sum: defaultdict[int, list[int]] = defaultdict(list)
    for rank, diff in alike.items():
        if groups & {*diff.groups}:
            by_sum[diff.total].append(rank)
    parties = sorted(by_sum.values(), key=lambda ranks: (len(ranks), ranks))
    *kind, parameter = first.name.split("/")[1:]
    text = f"copies of {''.join(f'{part} of ' for part in kind)}{parameter} differ: "
    if len(parties) > 1 and len(parties[-1]) > len(parties[-2]):
        odd = sorted(rank for ranks in parties[:-1] for rank in ranks)
        text += f"{ranks_in_words(odd)} {'holds' if len(odd) == 1 else 'hold'} other bits than the "
        text += f"{len(parties[-1])} others, {ranks_in_words(parties[-1])}"
        return DifferingCopies(text, odd[0] if len(odd) == 1 else None)
    sides = " and ".join(ranks_in_words(ranks) for ranks in parties)
    return DifferingCopies(f"{text}{sides} hold other bits, and the copies are too few to know which are right")


class CompareCopies(Hook):
    """Compares the copies of weights and states every `faults.check_copies_every` steps and before each save, so
    that no checkpoint contains a wrong copy."""

    def __init__(self, every: int, trainer: Trainer, log: RunLog) -> None:
        self.every, self.trainer, self.log = every, trainer, log
        self._equal_at = 0
        """Number of steps after which the copies were last found equal."""

    def on_start(self, start: RunStart) -> None:
        self._equal_at = start.step

    def on_save(self, taken: TakenStep) -> None:
        if self.every:
            self._compare(taken.step)

    def end_step(self, taken: TakenStep) -> None:
        if due(taken.step, self.every):
            self._compare(taken.step)

    def _compare(self, step: int) -> None:
        """Raise CopiesError on every rank if copies differ."""
        if step == self._equal_at:
            return
        if differing := differing_copies(self.trainer):
            self.log.event("fault", step, f"after step {step} {differing.text}", differing.rank)
            raise CopiesError(
                f"after step {step} {differing.text}; the check before, after step {self._equal_at}, found no "
                f"difference: checkpoints up to that step hold equal copies"
            ).with_rank(differing.rank)
        self._equal_at = step
