"""The device meshes and process groups of a layout, from the rank numbers of `layout.py`.

Parameters are DTensors on a DeviceMesh, sharded or replicated along each of its axes:

| axis                   | its ranks                                                                          |
| ---------------------- | ---------------------------------------------------------------------------------- |
| `pp`, `tp`             | as in the layout                                                                   |
| `replicas`             | dp_replicate, with ZeRO-0 also cp: ranks that hold replicas                        |
| `shards`               | dp_shard x cp: ranks over which ZeRO shards; with ZeRO-0 one rank                  |
| `tp_kv`, `tp_replicas` | tp with fewer kv heads than ranks: kv heads are sharded and then replicated        |

Experts have their own mesh if ep or tp is above 1. Ranks of tp send different tokens to the experts, so for an expert
all ranks of dp_shard x cp x tp are data ranks, except that ep shards whole experts over some of them.

| axis                   | its ranks                                                                          |
| ---------------------- | ---------------------------------------------------------------------------------- |
| `pp`, `ep`             | as in the layout                                                                   |
| `expert_replicas`      | dp_replicate; with ZeRO-0 all ranks that have the same experts                     |
| `expert_shards`        | dp_shard x cp x tp / ep: ranks over which ZeRO shards; with ZeRO-0 one rank        |

Axes of one rank are left out, because each costs a process group. Exceptions: `shards` and `expert_shards` always
exist, and `tp_kv` exists if `tp_replicas` does.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwright.layout.box import DENSE_AXES, EXPERT_AXES
from shardwright.layout.layout import Layout
from shardwright.split.tensor import kv_replicas


def build_mesh(layout: Layout, device_type: str, n_kv_heads: int) -> DeviceMesh:
    """Return the mesh of all ranks, outermost axis first. Every rank of the world has to call this."""
    replicas = kv_replicas(n_kv_heads, layout.tp)
    degrees = {"pp": layout.pp, "replicas": layout.dp_replicate, "shards": layout.dp_shard * layout.cp}
    if layout.zero == 0:
        degrees |= {"replicas": layout.dp_replicate * layout.cp, "shards": 1}
    degrees |= {"tp": layout.tp} if replicas == 1 else {"tp_kv": layout.tp // replicas, "tp_replicas": replicas}
    return _mesh(device_type, degrees, layout.groups(*DENSE_AXES)[0], always=("shards", "tp_kv"))


def build_expert_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """Return the mesh of the experts. Every rank of the world has to call this, after `build_mesh`."""
    degrees = {
        "pp": layout.pp,
        "expert_replicas": layout.dp_replicate,
        "expert_shards": layout.expert_dp_shard,
        "ep": layout.ep,
    }
    if layout.zero == 0:
        degrees |= {"expert_replicas": layout.dp_replicate * layout.expert_dp_shard, "expert_shards": 1}
    return _mesh(device_type, degrees, layout.groups(*EXPERT_AXES)[0], always=("expert_shards",))


def _mesh(device_type: str, degrees: dict[str, int], world: Sequence[int], always: Sequence[str]) -> DeviceMesh:
    kept = {axis: degree for axis, degree in degrees.items() if degree > 1 or axis in always}
    ranks = torch.tensor(world, dtype=torch.int).view(list(kept.values()))
    return DeviceMesh(device_type, ranks, mesh_dim_names=tuple(kept))


def lines_of(mesh: DeviceMesh, axis: str, node_ranks: int) -> torch.Tensor | None:
    """Return the ranks along an axis, (groups, nodes, node_ranks), `node_ranks` consecutive ranks per node, or None if
    the ranks do not make up several whole nodes of several ranks."""
    n = mesh[axis].size()
    if node_ranks <= 1 or n % node_ranks or n == node_ranks:
        return None
    at = list(mesh.mesh_dim_names or ()).index(axis)
    return mesh.mesh.movedim(at, -1).reshape(-1, n // node_ranks, node_ranks)


@dataclass(frozen=True)
class Groups:
    """The process groups over which the calling rank communicates in a step; None for a group of one rank."""

    pp: dist.ProcessGroup | None
    tp: dist.ProcessGroup | None
    tp_replicas: dist.ProcessGroup | None
    """Ranks of tp with the same key and value heads."""
    ep: dist.ProcessGroup | None
    cp_ring: dist.ProcessGroup | None
    cp_ulysses: dist.ProcessGroup | None
    data: dist.ProcessGroup | None
    """dp_replicate x dp_shard: ranks that read different samples."""
    tokens: dist.ProcessGroup | None
    """data x cp: ranks that hold different tokens, over which a loss is summed."""


def build_groups(layout: Layout, mesh: DeviceMesh) -> Groups:
    """Return the calling rank's groups. Every rank of the world has to call this, after `build_mesh`."""
    made: dict[tuple[int, ...], dist.ProcessGroup] = {
        tuple(dist.get_process_group_ranks(group)): group for group in mesh.get_all_groups()
    }

    def along(*axes: str) -> dist.ProcessGroup | None:
        groups = layout.groups(*axes)
        if len(groups[0]) == 1:
            return None
        ranks = layout.group_of(dist.get_rank(), *axes)
        if ranks not in made:
            made[ranks], _ = dist.new_subgroups_by_enumeration([list(group) for group in groups])
        return made[ranks]

    replicas = mesh["tp_replicas"].get_group() if "tp_replicas" in (mesh.mesh_dim_names or ()) else None
    return Groups(
        pp=along("pp"),
        tp=along("tp"),
        tp_replicas=replicas,
        ep=along("ep"),
        cp_ring=along("cp_ring"),
        cp_ulysses=along("cp_ulysses"),
        data=along("dp_replicate", "dp_shard"),
        tokens=along("dp_replicate", "dp_shard", "cp"),
    )


def build_stage_groups(
    layout: Layout, groups: Groups, sets: Iterable[tuple[int, ...]]
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Return the process group of each set of ranks of `pp` (ascending) that includes this rank, in its own pipeline.

    Every rank of the world has to call this with the same sets, after `build_groups`.
    """
    assert groups.pp is not None
    stage_groups = {}
    for ranks in sorted(sets):
        if len(ranks) == layout.pp:
            group = groups.pp
        else:
            group, _ = dist.new_subgroups_by_enumeration([[line[i] for i in ranks] for line in layout.groups("pp")])
        if groups.pp.rank() in ranks:
            stage_groups[ranks] = group
    return stage_groups
