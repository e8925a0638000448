"""Secondary shards of parameters in a node: `layout.zero_secondary_ranks`, hpZ of ZeRO++ (arXiv 2306.10209).

With zero 3 a layer is gathered from all ranks of dp_shard x cp for its forward pass, freed, and gathered again for its
backward pass. With r consecutive secondary ranks, each keeps 1/r of the gathered layer, in the type of the matmuls, and
the backward pass gathers from these r ranks alone:

    forward    all-gather over dp_shard x cp -> layer runs -> rank i of the r ranks keeps part i of r, the rest is freed
    backward   all-gather over the r ranks   -> parts are freed, layer runs -> only shards remain

A part is as old as the forward pass of its micro-batch: the next forward pass gathers the shards again, because the
optimizer may have changed them. A rank keeps e x parameters of the layers / r bytes (e bytes per element). Experts have
r x tp / ep secondary ranks; they are gathered from all ranks if that is one rank, or if FSDP2 shards them along another
dim.

FSDP2 offers `reshard_after_forward=r`, but not for parameters that tp shards, and it builds the mesh on the ranks of
one replica, where other replicas take no part. So this module makes the groups and takes the part that a rank keeps.
"""

from functools import partial

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from shardwright.layout.layout import Layout
from shardwright.parallel.mesh import lines_of
from shardwright.system.torch_private import fsdp_parameters, gather_again_among, set_secondary_shard


def build_secondary_groups(
    layout: Layout, mesh: DeviceMesh, expert_mesh: DeviceMesh | None
) -> dict[str, dist.ProcessGroup]:
    """Return this rank's groups of secondary ranks, for dense parameters ("") and experts ("expert_").

    A key is missing if those parameters have no secondary ranks. Every rank of the world calls this, after the meshes
    are built."""
    secondary: dict[str, dist.ProcessGroup] = {}
    ranks = {"": layout.zero_secondary_ranks, "expert_": layout.zero_secondary_ranks * layout.tp // layout.ep}
    for prefix, along in (("", mesh), ("expert_", expert_mesh)):
        if along is not None and (lines := lines_of(along, f"{prefix}shards", ranks[prefix])) is not None:
            secondary[prefix], _ = dist.new_subgroups_by_enumeration(lines.flatten(0, 1).tolist())
    return secondary


def keep_secondary_shards(module: FSDPModule, group: dist.ProcessGroup, device_type: str) -> None:
    """Make backward passes gather an FSDP2 parameter group, sharded along dim 0, from the ranks of `group`."""
    gather_again_among(module, DeviceMesh.from_group(group, device_type), partial(_part, group))


def drop_secondary_shards(module: FSDPModule) -> None:
    """Free the parts that the last forward pass kept; for forward passes without a backward pass."""
    for parameter in fsdp_parameters(module):
        set_secondary_shard(parameter, None)


def _part(group: dist.ProcessGroup, whole_N: Tensor) -> Tensor:
    """Return this rank's part of a gathered parameter."""
    n = whole_N.numel() // group.size()
    return whole_N.narrow(0, group.rank() * n, n).clone()
