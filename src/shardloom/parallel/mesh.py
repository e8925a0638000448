"""The DeviceMesh of a layout: its process groups, made by PyTorch from the ranks that `layout.py` numbers."""

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardloom.layout import DENSE_AXES, Layout


def build_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """A mesh with one named dimension an axis of the dense box, outermost first, also those of degree 1.

    `mesh["dp_shard"]` is the calling rank's own group along an axis. Every rank of the world has to call this.
    """
    world = layout.groups(*DENSE_AXES)[0]
    ranks = torch.tensor(world, dtype=torch.int).view([layout.degree(axis) for axis in DENSE_AXES])
    return DeviceMesh(device_type, ranks, mesh_dim_names=DENSE_AXES)
