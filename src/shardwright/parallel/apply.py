"""Everything that is done to a model to make it parallel, in the one order in which it is done."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwright.layout import Layout
from shardwright.model.matmul import Linear
from shardwright.model.spec import ModelSpec
from shardwright.model.transformer import Transformer
from shardwright.parallel.context import ContextAttention
from shardwright.parallel.data import DataEngine, Replicas, Sharded, Single, needs_sharding, shard
from shardwright.parallel.expert import split_experts
from shardwright.parallel.initialise import materialise
from shardwright.parallel.mesh import Groups, build_expert_mesh, build_groups, build_mesh
from shardwright.parallel.model import ParallelModel
from shardwright.parallel.pipeline import Pipeline, Stage
from shardwright.parallel.routing import shard_routers
from shardwright.parallel.run import OneByOne, Runner
from shardwright.parallel.stage import StageModel, cut_stages
from shardwright.parallel.stage_data import StageEngine, StageReplicas, StageShards
from shardwright.parallel.tensor import plain_parameters, split_model
from shardwright.schedule.actions import Schedule
from shardwright.split.stages import stage_layers, step_schedule


def apply(
    spec: ModelSpec,
    layout: Layout,
    device: torch.device,
    *,
    seed: int,
    param_dtype: torch.dtype = torch.float32,
    compute_dtype: torch.dtype = torch.float32,
    compile_blocks: bool = False,
    seq_len: int | None = None,
) -> ParallelModel:
    """Build a model of `spec` on this rank of `layout`, with its initial values.

    Every rank of the world calls this, with a process group already set up (of one rank, if there is one). The layout
    has to fit the model (`split.rules.problems`). `seq_len`, in tokens, is the length that pipeline stages are
    balanced for; the longest that the model is meant for unless given.
    """
    mesh = build_mesh(layout, device.type, spec.n_kv_heads)
    groups = build_groups(layout, mesh)
    parts = _parts(spec, layout, groups, param_dtype, seq_len or spec.max_seq_len)
    experts_apart = spec.moe is not None and layout.ep * layout.tp > 1
    expert_mesh = build_expert_mesh(layout, device.type) if experts_apart else None
    sharded = experts_apart or needs_sharding(layout, compute_dtype, param_dtype)
    shards: list[Sharded] = []
    for part in parts:
        blocks = list(part.layers.values())
        if groups.tp is not None:
            split_model(part, layout, mesh, groups.tp)
        if layout.cp > 1:
            attending: list[Any] = [module for module in part.modules() if hasattr(module, "attend")]
            for module in attending:
                module.attend = ContextAttention(layout.cp_method, groups.cp_ring, groups.cp_ulysses)
        shard_routers(part, layout, groups)
        if groups.ep is not None and expert_mesh is not None:
            split_experts(part, expert_mesh, groups.ep)
        if layout.recompute == "full":
            for block in blocks:
                _recompute(block)
        if compile_blocks:
            for block in blocks:
                block.compile()
        if sharded:
            shards.append(shard(part, blocks, layout, mesh, expert_mesh, compute_dtype, param_dtype))
        materialise(part, spec, seed, device)
    named = [dict(part.named_parameters()) for part in parts]
    plain = [{} if sharded else plain_parameters(part) for part in parts]
    stages = [part for part in parts if isinstance(part, StageModel)]
    runner: Runner
    if stages:
        runner = _pipeline(stages, shards, layout, groups, device, compute_dtype, seq_len or spec.max_seq_len)
    else:
        runner = OneByOne(shards[0] if sharded else _engine(parts[0], groups))
    return ParallelModel(spec, parts, runner, layout, mesh, groups, named, plain)


def _parts(
    spec: ModelSpec, layout: Layout, groups: Groups, dtype: torch.dtype, seq_len: int
) -> list[Transformer] | list[StageModel]:
    """What this rank has of the model, on the meta device: all of it, or its stages."""
    if groups.pp is None:
        with torch.device("meta"):
            return [Transformer(spec).to(dtype)]
    numbers = tuple(stage for _, stage in layout.held_by(groups.pp.rank()))
    return cut_stages(spec, stage_layers(spec, layout, seq_len), numbers, dtype)


def _engine(model: nn.Module, groups: Groups) -> DataEngine:
    """ZeRO-0 on plain tensors. DDP makes its buckets of parameters that are there already, so it comes last."""
    return Single(model) if groups.tokens is None else Replicas(model, groups.tokens)


def _pipeline(
    models: list[StageModel],
    shards: list[Sharded],
    layout: Layout,
    groups: Groups,
    device: torch.device,
    dtype: torch.dtype,
    seq_len: int,
) -> Pipeline:
    assert groups.pp is not None
    engines: list[StageEngine] = [StageShards(each, layout) for each in shards]
    engines = engines or [StageReplicas(model.parameters(), groups.tokens) for model in models]
    held = layout.held_by(groups.pp.rank())
    stages = [
        Stage(model, engine, way, layout.n_stages, groups.pp)
        for model, engine, (way, _) in zip(models, engines, held, strict=True)
    ]
    spec = models[0].spec
    cuts = layout.tp if layout.token_shards else 1

    def schedule(n_microbatches: int) -> Schedule:
        return step_schedule(spec, layout, n_microbatches, seq_len)

    def activation(tokens_BT: Tensor) -> Tensor:
        n_sequences, n_tokens = tokens_BT.shape
        return torch.empty(n_sequences, n_tokens // cuts, spec.d_model, dtype=dtype, device=device)

    return Pipeline(stages, schedule, layout.ways, groups.pp, activation, device)


def _recompute(block: nn.Module) -> None:
    """Keep only a block's inputs; the backward pass runs it again (Chen et al., arXiv 1604.06174).

    Nothing random has to be kept for that: dropout goes by keys that are among the inputs.
    """
    for module in block.modules():
        if isinstance(module, Linear):
            module.saves_first = True
    block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
