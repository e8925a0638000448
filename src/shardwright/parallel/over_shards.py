"""Sums and maxima over the ranks that hold shards of one dim of a parameter, those of many parameters together."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

Groups = tuple[dist.ProcessGroup, ...]


def groups_that_shard(parameter: Tensor, dim: int) -> Groups:
    """The groups of ranks that have shards of a dim, counted from the last: -1 of columns."""
    if not isinstance(parameter, DTensor):
        return ()
    mesh, wanted = parameter.device_mesh, parameter.dim() + dim
    over = [i for i, place in enumerate(parameter.placements) if getattr(place, "dim", None) == wanted]
    return tuple(mesh.get_group(i) for i in over if mesh.size(i) > 1)


def first_column(parameter: Tensor) -> int:
    """The column of the whole parameter at which this rank's shard begins. Reads no tensor, so that a dry run can ask;
    columns are sharded along one axis at most."""
    if not isinstance(parameter, DTensor):
        return 0
    mesh, last = parameter.device_mesh, parameter.dim() - 1
    over = [i for i, place in enumerate(parameter.placements) if getattr(place, "dim", None) == last]
    assert len(over) <= 1
    coordinates = mesh.get_coordinate()
    assert coordinates is not None
    return sum(coordinates[i] * -(-parameter.shape[-1] // mesh.size(i)) for i in over)


def reduce_together(parts: Iterable[tuple[Tensor, Groups]], op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
    """All-reduce each tensor, in place, over the ranks of its groups; those with the same groups in one message. Every
    rank of a group gives tensors of the same shapes in the same order."""
    together: dict[Groups, list[Tensor]] = {}
    for part, groups in parts:
        together.setdefault(groups, []).append(part)
    for groups, tensors in together.items():
        if not groups:
            continue
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        for group in groups:
            dist.all_reduce(flat, op=op, group=group)
        for tensor, found in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(found.view(tensor.shape))
