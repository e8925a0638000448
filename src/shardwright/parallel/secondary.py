"""Secondary shards of parameters in a node: `layout.zero_secondary_ranks`, hpZ of ZeRO++ (arXiv 2306.10209).

With zero 3 a layer is gathered from all ranks of dp_shard x cp for its forward pass, freed, and gathered again for its
backward pass. With r secondary ranks, consecutive ones, each keeps 1/r of what was gathered, in the type of the
matmuls, and the backward pass gathers from these r alone:

    forward    all-gather over dp_shard x cp -> layer runs -> rank i of the r ranks keeps part i of r, the rest is freed
    backward   all-gather over the r ranks   -> parts are freed, layer runs -> only shards remain

So a part is as old as the forward pass of its micro-batch: the next forward pass gathers the shards, which the
optimizer may have changed. What a rank keeps is e x parameters of the layers / r bytes, e of an element. Experts have
r x tp / ep such ranks; where these are not several, or FSDP2 shards experts along another dim, they are gathered from
all ranks.

FSDP2 has this as `reshard_after_forward=r`, but not for parameters that tp shards, and on a mesh that it builds on the
ranks of one replica alone, in which other replicas take no part. So the group and what a rank keeps are set here.
"""

from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from shardwright.layout import Layout
from shardwright.parallel.mesh import lines_of
from shardwright.torch_private import (
    FSDPMeshInfo,
    FSDPParam,
    ShardedState,
    parameter_groups,
    register_shard,
    set_secondary_shard,
)


def build_secondary_groups(
    layout: Layout, mesh: DeviceMesh, expert_mesh: DeviceMesh | None
) -> dict[str, dist.ProcessGroup]:
    """The group of secondary ranks of this rank, for dense parameters ("") and experts ("expert_"), where they are
    gathered from one. Every rank of the world has to call this, after the meshes are built."""
    found: dict[str, dist.ProcessGroup] = {}
    ranks = {"": layout.zero_secondary_ranks, "expert_": layout.zero_secondary_ranks * layout.tp // layout.ep}
    for prefix, along in (("", mesh), ("expert_", expert_mesh)):
        if along is not None and (lines := lines_of(along, f"{prefix}shards", ranks[prefix])) is not None:
            found[prefix], _ = dist.new_subgroups_by_enumeration(lines.flatten(0, 1).tolist())
    return found


def keep_secondary_shards(module: FSDPModule, group: dist.ProcessGroup, device_type: str) -> None:
    """Let a group of parameters of FSDP2, sharded along dim 0, be gathered from the ranks of `group` in backward
    passes."""
    among = FSDPMeshInfo(DeviceMesh.from_group(group, device_type), shard_mesh_dim=0)
    for parameters in parameter_groups(module):
        parameters.post_forward_mesh_info = among
        for parameter in parameters.fsdp_params:
            each: Any = parameter
            each.to_sharded_post_forward = partial(_keep_part, parameter, group)


def drop_secondary_shards(module: FSDPModule) -> None:
    """Free what the last forward pass kept, where no backward pass follows."""
    for parameters in parameter_groups(module):
        for parameter in parameters.fsdp_params:
            set_secondary_shard(parameter, None)


def _keep_part(parameter: FSDPParam, group: dist.ProcessGroup) -> None:
    """As `FSDPParam.to_sharded_post_forward`: of a gathered parameter keep the part of this rank, and free the rest.
    The module has its shard, as between steps."""
    (whole,) = parameter.all_gather_outputs  # (N,), with what FSDP2 pads it to
    n = whole.numel() // group.size()
    set_secondary_shard(parameter, whole.narrow(0, group.rank() * n, n).clone())
    register_shard(parameter)
    parameter.free_unsharded_param()
    parameter.sharded_state = ShardedState.SHARDED_POST_FORWARD
