"""Parts that several adapters need: a model in plain PyTorch, its loss, its weights, and the ranks as environment
variables.

Shapes: B sequences, T tokens, V vocabulary.
"""

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwright.data.samples import IGNORE
from shardwright.model.init import initialise
from shardwright.model.spec import ModelSpec
from shardwright.model.transformer import Transformer
from shardwright.parallel.boxes import local_box
from shardwright.verification.trainers.adapter import World


def plain_model(spec: ModelSpec, world: World) -> Transformer:
    """Return Shardwright's decoder for one device, with initial weights."""
    model = Transformer(spec).to(world.dtype)
    initialise(model, spec, world.seed)
    return model


def loss_sum(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Return the sum of the cross-entropy over the targets that are counted."""
    return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), ignore_index=IGNORE, reduction="sum")


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
