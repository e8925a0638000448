"""The process groups of a layout, made by PyTorch from the ranks that `layout.py` numbers.

Parameters lie on a DeviceMesh, whose axes say along which ranks they are cut or copied:

| axis                   | its ranks                                                                          |
| ---------------------- | ---------------------------------------------------------------------------------- |
| `pp`, `tp`             | those of the layout                                                                |
| `replicas`             | dp_replicate: each has a copy of the state; under ZeRO-0 of cp too                 |
| `share`                | dp_shard x cp: those among which ZeRO shares out the state; under ZeRO-0 one rank  |
| `tp_kv`, `tp_copies`   | tp in two, with fewer kv heads than ranks: heads are dealt out, and copied         |

Experts lie on a mesh of their own, wherever ep or tp is above 1: with tp each rank sends other tokens to them, so to an
expert all of dp_shard x cp x tp are data ranks, except as ep deals out whole experts.

| axis                   | its ranks                                                                          |
| ---------------------- | ---------------------------------------------------------------------------------- |
| `pp`, `ep`             | those of the layout                                                                |
| `expert_replicas`      | dp_replicate; under ZeRO-0 of all that have the same experts                       |
| `expert_share`         | what ep leaves of dp_shard x cp x tp; under ZeRO-0 one rank                        |

Axes of one rank are left out, for each costs a process group; but `share` and `expert_share` are always there, and
`tp_kv` where `tp_copies` is.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwright.layout import DENSE_AXES, EXPERT_AXES, Layout
from shardwright.split.tensor import kv_copies


def build_mesh(layout: Layout, device_type: str, n_kv_heads: int) -> DeviceMesh:
    """The mesh of all ranks, outermost axis first. Every rank of the world has to call this."""
    copies = kv_copies(n_kv_heads, layout.tp)
    degrees = {"pp": layout.pp, "replicas": layout.dp_replicate, "share": layout.dp_shard * layout.cp}
    if layout.zero == 0:
        degrees |= {"replicas": layout.dp_replicate * layout.cp, "share": 1}
    degrees |= {"tp": layout.tp} if copies == 1 else {"tp_kv": layout.tp // copies, "tp_copies": copies}
    return _mesh(device_type, degrees, layout.groups(*DENSE_AXES)[0], always=("share", "tp_kv"))


def build_expert_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """The mesh on which experts lie. Every rank of the world has to call this, after `build_mesh`."""
    degrees = {
        "pp": layout.pp,
        "expert_replicas": layout.dp_replicate,
        "expert_share": layout.expert_dp_shard,
        "ep": layout.ep,
    }
    if layout.zero == 0:
        degrees |= {"expert_replicas": layout.dp_replicate * layout.expert_dp_shard, "expert_share": 1}
    return _mesh(device_type, degrees, layout.groups(*EXPERT_AXES)[0], always=("expert_share",))


def _mesh(device_type: str, degrees: dict[str, int], world: Sequence[int], always: Sequence[str]) -> DeviceMesh:
    kept = {axis: degree for axis, degree in degrees.items() if degree > 1 or axis in always}
    ranks = torch.tensor(world, dtype=torch.int).view(list(kept.values()))
    return DeviceMesh(device_type, ranks, mesh_dim_names=tuple(kept))


@dataclass(frozen=True)
class Groups:
    """The groups of the calling rank over which a step communicates; None where it would be alone."""

    pp: dist.ProcessGroup | None
    tp: dist.ProcessGroup | None
    tp_copies: dist.ProcessGroup | None
    """Ranks of tp with the same key and value heads."""
    ep: dist.ProcessGroup | None
    cp_ring: dist.ProcessGroup | None
    cp_ulysses: dist.ProcessGroup | None
    data: dist.ProcessGroup | None
    """dp_replicate x dp_shard: ranks that read different samples."""
    tokens: dist.ProcessGroup | None
    """data x cp: ranks that hold different tokens, over which a loss is summed."""


def build_groups(layout: Layout, mesh: DeviceMesh) -> Groups:
    """Every rank of the world has to call this, after `build_mesh`."""
    made: dict[tuple[int, ...], dist.ProcessGroup] = {
        tuple(dist.get_process_group_ranks(group)): group for group in mesh.get_all_groups()
    }

    def along(*axes: str) -> dist.ProcessGroup | None:
        groups = layout.groups(*axes)
        if len(groups[0]) == 1:
            return None
        mine = layout.group_of(dist.get_rank(), *axes)
        if mine not in made:
            made[mine], _ = dist.new_subgroups_by_enumeration([list(group) for group in groups])
        return made[mine]

    copies = mesh["tp_copies"].get_group() if "tp_copies" in (mesh.mesh_dim_names or ()) else None
    return Groups(
        pp=along("pp"),
        tp=along("tp"),
        tp_copies=copies,
        ep=along("ep"),
        cp_ring=along("cp_ring"),
        cp_ulysses=along("cp_ulysses"),
        data=along("dp_replicate", "dp_shard"),
        tokens=along("dp_replicate", "dp_shard", "cp"),
    )


def build_stage_groups(
    layout: Layout, groups: Groups, sets: Iterable[tuple[int, ...]]
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """For each set of ranks of `pp`, ascending, that this rank is in: its group in this rank's pipeline.

    Every rank of the world has to call this with the same sets, after `build_groups`.
    """
    assert groups.pp is not None
    found = {}
    for ranks in sorted(sets):
        if len(ranks) == layout.pp:
            group = groups.pp
        else:
            group, _ = dist.new_subgroups_by_enumeration([[line[i] for i in ranks] for line in layout.groups("pp")])
        if groups.pp.rank() in ranks:
            found[ranks] = group
    return found
