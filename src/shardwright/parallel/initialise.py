"""Allocates a model's parameters and fills them; each rank makes the initial values of its own shards."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwright.model.init import initialise
from shardwright.model.spec import ModelSpec
from shardwright.parallel.boxes import local_box
from shardwright.system.torch_private import map_tensors


def materialise(
    model: nn.Module,
    spec: ModelSpec,
    seed: int,
    device: torch.device,
    shards_on: torch.device,
    b_std: float = 0.0,
) -> None:
    """Move a model from the meta device to `device`, but sharded parameters to `shards_on`, and fill this rank's shard
    of every parameter. `b_std`: as for `model.init.initial_values`.

    Values depend only on (seed, name, index in the whole tensor), so that every layout starts from the same weights.
    `nn.init` on a sharded DTensor would give every rank the same shard on CPU; it is not used.
    """
    allocate(model, device, shards_on)
    initialise(model, spec, seed, local_box, b_std)


def allocate(model: nn.Module, device: torch.device, shards_on: torch.device) -> None:
    """Move a model from the meta device to `device`, but sharded parameters to `shards_on`, without values."""
    map_tensors(
        model, lambda tensor: torch.empty_like(tensor, device=shards_on if isinstance(tensor, DTensor) else device)
    )
