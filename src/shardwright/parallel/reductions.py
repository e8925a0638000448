"""Reduces many tensors in one message: gradients of replicas, and statistics of shards of a parameter.

A replica that was used for a part of the tokens (norms under sequence parallelism) or of the heads (norms of heads,
replicated kv heads) has a partial gradient. The partial gradients are summed once a step, after the reduction over data
ranks, on the gradient shard of each rank, so that the replicas stay equal.
"""

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwright.layout.layout import Layout
from shardwright.model.modules import row_of
from shardwright.model.spec import ModelSpec
from shardwright.parallel.mesh import Groups
from shardwright.parallel.norm import local_part
from shardwright.split.tensor import summed_over

ReducedOver = tuple[dist.ProcessGroup, ...]


def groups_that_shard(parameter: Tensor, dim: int) -> ReducedOver:
    """Return the groups of ranks over which `dim`, a negative index such as -1 for columns, is sharded."""
    if not isinstance(parameter, DTensor):
        return ()
    mesh, wanted = parameter.device_mesh, parameter.dim() + dim
    over = [i for i, place in enumerate(parameter.placements) if getattr(place, "dim", None) == wanted]
    return tuple(mesh.get_group(i) for i in over if mesh.size(i) > 1)


def reduce_together(
    parts: Iterable[tuple[Tensor, ReducedOver]], op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> None:
    """All-reduce each tensor, in place, over the ranks of its groups; tensors with equal groups share one message.

    Every rank of a group passes tensors of the same shapes in the same order."""
    together: dict[ReducedOver, list[Tensor]] = {}
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


def sum_together(parts: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Sum tensors over the ranks, in place, in one all-reduce."""
    reduce_together((part, (group,)) for part in parts)


def sum_replica_gradients(
    parameters: Mapping[str, nn.Parameter], spec: ModelSpec, layout: Layout, groups: Groups
) -> None:
    """Sum, in place, the partial gradients of replicated parameters: one all-reduce for each group of ranks."""
    for over, group in (("tp", groups.tp), ("tp_replicas", groups.tp_replicas)):
        parts = [
            local_part(parameter.grad)
            for name, parameter in parameters.items()
            if parameter.grad is not None and summed_over(row_of(spec, name), layout, spec.n_kv_heads) == over
        ]
        if parts and group is not None:
            sum_together(parts, group)
