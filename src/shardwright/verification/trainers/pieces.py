"""Parts that several adapters need: the weights of a model, and the ranks as environment variables."""

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardwright.parallel.boxes import local_box
from shardwright.verification.trainers.adapter import World


@torch.no_grad()
def load_weights(parameters: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Copy the shard of this rank of each whole weight into its parameter."""
    for name, parameter in parameters.items():
        local, offsets = local_box(parameter)
        local.copy_(weights[name][tuple(slice(at, at + n) for at, n in zip(offsets, local.shape, strict=True))])


def set_environment(world: World) -> None:
    """Set the environment variables that a launcher sets for each rank, if there is more than one rank."""
    if world.size > 1:
        rank, size = str(world.rank), str(world.size)
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # the process group exists, so no port is opened
