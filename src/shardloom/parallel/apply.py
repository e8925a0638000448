"""Everything that is done to a model to make it parallel, in the one order in which it is done."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardloom.layout import Layout
from shardloom.model.spec import ModelSpec
from shardloom.model.transformer import Transformer
from shardloom.parallel.data import DataEngine, Replicas, Single, needs_sharding, shard
from shardloom.parallel.initialise import materialise
from shardloom.parallel.mesh import build_mesh


@dataclass(frozen=True)
class ParallelModel:
    """A model laid over the ranks. `module` has the plain names; `engine` runs it and reduces its gradients."""

    module: Transformer
    engine: DataEngine
    layout: Layout
    mesh: DeviceMesh
    data_group: dist.ProcessGroup
    """All ranks that read different samples: those over which a loss or a count of tokens is summed."""
    named_parameters: dict[str, nn.Parameter]
    """What is optimised and saved, by its global name. Under FSDP these are the shards, and only these: while a
    block is gathered, `module.named_parameters()` gives the whole tensors in their place."""


def apply(
    spec: ModelSpec,
    layout: Layout,
    device: torch.device,
    *,
    seed: int,
    param_dtype: torch.dtype = torch.float32,
    compute_dtype: torch.dtype = torch.float32,
    compile_blocks: bool = False,
) -> ParallelModel:
    """Build a model of `spec` on this rank of `layout`, with its initial values.

    Every rank of the world calls this, with a process group already set up (of one rank, if there is one).
    """
    mesh = build_mesh(layout, device.type)
    data_group = mesh["dp_replicate", "dp_shard"]._flatten("data").get_group()
    with torch.device("meta"):
        model = Transformer(spec).to(param_dtype)
    blocks = list(model.layers.values())
    if compile_blocks:
        for block in blocks:
            block.compile()
    engine: DataEngine | None = None
    if needs_sharding(layout, compute_dtype, param_dtype):
        engine = shard(model, blocks, layout, mesh, compute_dtype, param_dtype)
    materialise(model, spec, seed, device)
    named = dict(model.named_parameters())
    if engine is None:
        # DDP makes its buckets of parameters that are there already, so it comes after their values.
        engine = Replicas(model, mesh) if layout.dp_replicate > 1 else Single(model)
    return ParallelModel(model, engine, layout, mesh, data_group, named)
