"""Compares, by checksum, tensors of which several ranks hold the same shard: a faulty device changes one of them in
silence.

Copies are bit-equal by construction: weights, optimizer states and what compressed gradients keep are updated alike by
every rank that holds them. `shardwright verify` proves that of each layout. Of a tensor there are copies

- along each axis of the mesh over which it is not sharded: dp_replicate, data ranks without ZeRO, norms over tp, the
  mean over the rows of a matrix whose rows are sharded, a counter of steps over all ranks of a stage;
- over the ranks of pp that hold a tied parameter, or the same stage.

Equal along each axis, they are equal over all of them. A checkpoint has one of the copies.

Checksum of a shard: the sum, modulo 2^64, of its bytes read as integers of 8 bytes, and of the last ones as integers of
one. A flipped bit changes it by a power of 2, so one is always found; two may cancel each other.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright.model.modules import row_of
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
    """That of a tensor, an int64 scalar on its device."""
    flat = tensor.detach().contiguous().flatten()
    if flat.storage_offset() * flat.element_size() % _WORD_BYTES:
        flat = flat.clone()
    content = flat.view(torch.uint8)
    n = len(content) // _WORD_BYTES * _WORD_BYTES
    return content[:n].view(torch.int64).sum() + content[n:].sum(dtype=torch.int64)


class CopyGroup(NamedTuple):
    """A process group of this rank whose ranks hold the same shards, and the names of the tensors, as in a
    checkpoint."""

    group: dist.ProcessGroup
    names: list[str]


def groups_of_copies(model: ParallelModel, tensors: Mapping[str, Tensor]) -> dict[Ranks, CopyGroup]:
    """By its ranks each group of this rank with copies; in an order that is the same on all ranks of the world, as
    each group means a collective. `tensors`: those of `named_tensors`."""
    found: dict[Ranks, CopyGroup] = {}
    ranks_of: dict[dist.ProcessGroup, Ranks] = {}
    for name, tensor in sorted(tensors.items()):  # ranks of pp have them in other orders
        for ranks, group in _groups(model, name, tensor, ranks_of):
            found.setdefault(ranks, CopyGroup(group, [])).names.append(name)
    return dict(sorted(found.items()))


def _groups(
    model: ParallelModel, name: str, tensor: Tensor, ranks_of: dict[dist.ProcessGroup, Ranks]
) -> Iterator[tuple[Ranks, dist.ProcessGroup]]:
    """The groups of this rank that hold the same shard of a tensor. `ranks_of`: those of groups that are known."""

    def ranks(group: dist.ProcessGroup) -> Ranks:
        if group not in ranks_of:
            ranks_of[group] = tuple(sorted(dist.get_process_group_ranks(group)))
        return ranks_of[group]

    here, parameter = dist.get_rank(), name.rpartition("/")[2]
    others: set[int] = set()
    """Ranks with other shards, along any axis."""
    if isinstance(tensor, DTensor):
        for axis, placement in enumerate(tensor.placements):
            if not placement.is_replicate():
                others |= {*ranks(tensor.device_mesh.get_group(axis))} - {here}
    experts = isinstance(tensor, DTensor) and row_of(model.spec, parameter).kind == "expert"
    mesh = model.mesh if not experts or model.expert_mesh is None else model.expert_mesh
    for name_of_axis in mesh.mesh_dim_names or ():
        group = mesh.get_group(name_of_axis)
        if name_of_axis != "pp" and group.size() > 1 and others.isdisjoint(ranks(group)):
            yield ranks(group), group
    if tied := model.tied.group_of(model.held_on[parameter]):
        yield ranks(tied), tied


@dataclass(frozen=True)
class DifferingCopies:
    """Copies that differ, in words, and the rank whose copy is wrong, where it is one and known."""

    text: str
    rank: int | None = None


@dataclass(frozen=True, order=True)
class CopyDifference:
    """What a rank found first of its copies: the tensor, weights before states and then as the model has them; the
    first ranks of the groups in which it differs; and the checksum of this rank's copy."""

    is_state: bool
    place: int
    name: str
    groups: Ranks
    total: int


@torch.no_grad()
def differing_copies(trainer: Trainer) -> DifferingCopies | None:
    """What differs between the copies of tensors, the same on every rank; None where all are equal. Every rank calls
    this; it waits for the device, and reads states that are on a disk."""
    model, tensors, stored = trainer.model, named_tensors(trainer), stored_tensors(trainer)
    groups = groups_of_copies(model, tensors)
    sums: dict[str, Tensor] = {}
    for name in {name for compared in groups.values() for name in compared.names}:
        held = stored[name].read() if name in stored else local_part(tensors[name])
        sums[name] = checksum(held).to(model.mesh.device_type)
    places = {name: place for place, name in enumerate(model.held_on)}
    differs_in: defaultdict[str, list[int]] = defaultdict(list)
    for ranks, (group, names) in groups.items():
        mine = torch.stack([sums[name] for name in names])
        # The least and the largest by one all-reduce: ~x falls as x rises.
        extremes = torch.cat([mine, ~mine])
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
        largest, least = extremes.chunk(2)
        for name, differs in zip(names, (largest != ~least).tolist(), strict=True):
            if differs:
                differs_in[name].append(ranks[0])
    found = []
    for name, groups_of_it in differs_in.items():
        kind, _, parameter = name.rpartition("/")
        found.append(CopyDifference(kind != "model", places[parameter], name, tuple(groups_of_it), int(sums[name])))
    everyone = gathered(min(found, default=None), CopyDifference | None)
    told = {rank: each for rank, each in enumerate(everyone) if each is not None}
    return in_words(told) if told else None


def in_words(found: Mapping[int, CopyDifference]) -> DifferingCopies:
    """Which copies differ. `found`: of each rank that has copies which do."""
    first = min(found.values())
    alike = {rank: each for rank, each in found.items() if each.name == first.name}
    groups: set[int] = set()
    reached = {*first.groups}
    while reached - groups:  # groups that share a rank hold copies of one shard
        groups |= reached
        reached = {group for each in alike.values() if groups & {*each.groups} for group in each.groups}
    by_sum: defaultdict[int, list[int]] = defaultdict(list)
    for rank, each in alike.items():
        if groups & {*each.groups}:
            by_sum[each.total].append(rank)
    parties = sorted(by_sum.values(), key=lambda ranks: (len(ranks), ranks))
    *kind, parameter = first.name.split("/")[1:]
    told = f"copies of {''.join(f'{each} of ' for each in kind)}{parameter} differ: "
    if len(parties) > 1 and len(parties[-1]) > len(parties[-2]):
        odd = sorted(rank for ranks in parties[:-1] for rank in ranks)
        told += f"{ranks_in_words(odd)} {'holds' if len(odd) == 1 else 'hold'} other bits than the "
        told += f"{len(parties[-1])} others, {ranks_in_words(parties[-1])}"
        return DifferingCopies(told, odd[0] if len(odd) == 1 else None)
    sides = " and ".join(ranks_in_words(ranks) for ranks in parties)
    return DifferingCopies(f"{told}{sides} hold other bits, and so few copies do not tell which are right")


class CompareCopies(Hook):
    """Compares copies of weights and states every faults.check_copies_every steps, and before they are saved: no
    checkpoint is to contain a wrong one."""

    def __init__(self, every: int, trainer: Trainer, log: RunLog) -> None:
        self.every, self.trainer, self.log = every, trainer, log
        self._equal_at = 0
        """Steps after which the copies were equal."""

    def on_start(self, start: RunStart) -> None:
        self._equal_at = start.step

    def on_save(self, taken: TakenStep) -> None:
        if self.every:
            self._compare(taken.step)

    def end_step(self, taken: TakenStep) -> None:
        if due(taken.step, self.every):
            self._compare(taken.step)

    def _compare(self, step: int) -> None:
        """Raise CopiesError, on every rank, where copies differ."""
        if step == self._equal_at:
            return
        if differing := differing_copies(self.trainer):
            self.log.event("fault", step, f"after step {step} {differing.text}", differing.rank)
            raise CopiesError(
                f"after step {step} {differing.text}; the check before, after step {self._equal_at}, found no "
                f"difference: checkpoints up to that step hold equal copies"
            ).of_rank(differing.rank)
        self._equal_at = step
