"""Sums and maxima over the ranks that hold shards of one dim of a parameter, for many parameters in one message."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

Groups = tuple[dist.ProcessGroup, ...]


def groups_that_shard(parameter: Tensor, dim: int) -> Groups:
    """Return the groups of ranks over which `dim`, a negative index such as -1 for columns, is sharded."""
    if not isinstance(parameter, DTensor):
        return ()
    mesh, wanted = parameter.device_mesh, parameter.dim() + dim
    over = [i for i, place in enumerate(parameter.placements) if getattr(place, "dim", None) == wanted]
    return tuple(mesh.get_group(i) for i in over if mesh.size(i) > 1)


def reduce_together(parts: Iterable[tuple[Tensor, Groups]], op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
    """All-reduce each tensor, in place, over the ranks of its groups; tensors with equal groups share one message.

    Every rank of a group passes tensors of the same shapes in the same order."""
    together: dict[Groups, list[Tensor]] = {}
    for part, groups in parts:
        together.setdefault(groups, []).append(part)
    for groups, tensors in together.items():
        if not groups:
            continue
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        for group in groups:
            dist.all_reduce(flat, op=op, group=group)
        for tensor, reduced in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(reduced.view(tensor.shape))
