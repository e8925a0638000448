"""Compares, by checksum, weights of which several ranks hold the same shard: a faulty device changes one of them in
silence.

Copies are bit-equal by construction: along the axes of the mesh over which a parameter is replicated (dp_replicate,
data ranks without ZeRO, norms over tp), and over the ranks of pp that hold a tied parameter, every rank applies the
same update to them. `shardwright verify` proves that of each layout. Not compared: experts with ZeRO 0 and ep or tp.

Checksum of a shard: the sum, modulo 2^64, of its bits read as integers of the size of an element. A flipped bit changes
it by a power of 2, so one is always found; two may cancel each other.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright.model.modules import row_of
from shardwright.parallel.model import ParallelModel
from shardwright.parallel.norm import local_part
from shardwright.processes import ranks_in_words
from shardwright.split.tensor import summed_over

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: Tensor) -> Tensor:
    """That of a tensor, an int64 scalar on its device."""
    flat = tensor.detach().contiguous().flatten()
    return flat.view(_INTEGERS[flat.element_size()]).sum(dtype=torch.int64)


def groups_of_copies(model: ParallelModel) -> dict[dist.ProcessGroup, list[str]]:
    """Process groups of this rank whose ranks hold the same shards, and the names of the parameters."""
    found: defaultdict[dist.ProcessGroup, list[str]] = defaultdict(list)
    for name, parameter in sorted(model.named_parameters.items()):  # ranks of pp have them in other orders
        for group in _groups(model, name, parameter):
            if group.size() > 1:
                found[group].append(name)
    return dict(found)


def _groups(model: ParallelModel, name: str, parameter: Tensor) -> Iterator[dist.ProcessGroup]:
    if isinstance(parameter, DTensor):
        for axis, placement in enumerate(parameter.placements):
            if placement.is_replicate():
                yield parameter.device_mesh.get_group(axis)
    row, groups = row_of(model.spec, name), model.groups
    own_mesh = row.kind == "expert" and model.layout.ep * model.layout.tp > 1
    if groups.tp is not None and row.split_dim is None and not own_mesh:
        yield groups.tp
    if groups.tp_replicas is not None and summed_over(row, model.layout, model.spec.n_kv_heads) == "tp_replicas":
        yield groups.tp_replicas
    if model.layout.zero == 0 and not own_mesh and groups.tokens is not None:
        yield groups.tokens
    if group := model.tied.group_of(model.held_on[name]):
        yield group


@dataclass(frozen=True)
class Differing:
    """Copies that differ, in words, and the rank whose copy is wrong, where it is one and known."""

    text: str
    rank: int | None = None


@torch.no_grad()
def differing_copies(model: ParallelModel) -> Differing | None:
    """What differs between the copies of weights, the same on every rank; None where all are equal. Every rank calls
    this; it waits for the device."""
    sums = {name: checksum(local_part(parameter)) for name, parameter in model.named_parameters.items()}
    names = list(model.held_on)
    first: tuple[int, dist.ProcessGroup] | None = None
    for group, members in groups_of_copies(model).items():
        mine = torch.stack([sums[name] for name in members])
        # The least and the largest by one all-reduce: ~x falls as x rises.
        extremes = torch.cat([mine, ~mine])
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
        largest, least = extremes.chunk(2)
        bad = [
            names.index(name) for name, differs in zip(members, (largest != ~least).tolist(), strict=True) if differs
        ]
        if bad and (first is None or min(bad) < first[0]):
            first = min(bad), group
    # Of each rank: the first parameter that differs, a number of the group in which it does, and its checksum there.
    told = torch.full((3,), -1, dtype=torch.int64)
    if first is not None:
        at, group = first
        told = torch.tensor([at, min(dist.get_process_group_ranks(group)), int(sums[names[at]])], dtype=torch.int64)
    device = next(iter(sums.values())).device
    everyone = [torch.empty(3, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, told.to(device))
    found = {rank: (int(each[0]), int(each[1]), int(each[2])) for rank, each in enumerate(everyone) if each[0] >= 0}
    return in_words(found, names) if found else None


def in_words(found: Mapping[int, tuple[int, int, int]], names: list[str]) -> Differing:
    """`found`: of each rank with copies that differ the place of the parameter in `names`, a number of the group, and
    the checksum."""
    at, number = min((at, number) for at, number, _ in found.values())
    by_sum: defaultdict[int, list[int]] = defaultdict(list)
    for rank, (place, of, total) in found.items():
        if (place, of) == (at, number):
            by_sum[total].append(rank)
    parties = sorted(by_sum.values(), key=lambda ranks: (len(ranks), ranks))
    told = f"copies of {names[at]} differ: "
    if len(parties) > 1 and len(parties[-1]) > len(parties[-2]):
        odd = sorted(rank for ranks in parties[:-1] for rank in ranks)
        told += f"{ranks_in_words(odd)} {'holds' if len(odd) == 1 else 'hold'} other bits than the "
        told += f"{len(parties[-1])} others, {ranks_in_words(parties[-1])}"
        return Differing(told, odd[0] if len(odd) == 1 else None)
    sides = " and ".join(ranks_in_words(ranks) for ranks in parties)
    return Differing(f"{told}{sides} hold other bits, and so few copies do not tell which are right")
