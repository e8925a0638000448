"""Parts that several adapters need: the weights of a model, and the ranks as environment variables."""

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardwright.parallel.boxes import local_box
from shardwright.system.errors import InputError
from shardwright.verification.trainers.adapter import World


def whole_option(options: Mapping[str, Any], name: str) -> int:
    """Return an option of `--set` that is a number of 0 or more, by default 0; raises InputError for another value."""
    value = options.get(name, 0)
    if type(value) is not int or value < 0:
        raise InputError(f"{name}={value}: valid: a whole number of 0 or more")
    return value


def expert_problem(ep: int, options: Mapping[str, Any]) -> str | None:
    """Return why `ep` ranks cannot share the experts of `--set experts`, or None."""
    experts = whole_option(options, "experts")
    if ep > 1 and not experts:
        return f"ep={ep} needs --set experts=N, a multiple of {ep}"
    return f"ep={ep} does not divide experts={experts}; --set experts={2 * ep}" if experts % ep else None


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
