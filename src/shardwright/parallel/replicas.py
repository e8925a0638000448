"""Sums the gradients of parameters that are replicated over ranks of tp, so that the replicas stay equal.

A replica that was used for a part of the tokens (norms under sequence parallelism) or of the heads (norms of heads,
replicated kv heads) has a partial gradient. The partial gradients are summed once a step, after the reduction over data
ranks, on the gradient shard of each rank.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.layout.layout import Layout
from shardwright.model.modules import row_of
from shardwright.model.spec import ModelSpec
from shardwright.parallel.mesh import Groups
from shardwright.parallel.norm import local_part
from shardwright.split.tensor import summed_over


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


def sum_together(parts: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Sum tensors over the ranks, in place, in one all-reduce."""
    flat = torch.cat([part.flatten() for part in parts])
    dist.all_reduce(flat, group=group)
    for part, summed in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
        part.copy_(summed.view_as(part))
