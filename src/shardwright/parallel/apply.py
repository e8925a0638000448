"""Applies all kinds of parallelism of a layout to a model, in one fixed order."""

import operator
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from shardwright.layout.layout import Layout
from shardwright.model.linear_attention import GatedDeltaNet
from shardwright.model.matmul import Linear
from shardwright.model.moe import MoE, expert_layers
from shardwright.model.number_formats import Fp8
from shardwright.model.recompute import checkpointed, recompute_parts
from shardwright.model.spec import ModelSpec
from shardwright.model.transformer import Transformer
from shardwright.parallel.compressed import Compression, OverReplicas, codec_of
from shardwright.parallel.context import ContextAttention
from shardwright.parallel.data import (
    DataEngine,
    ErrorFeedback,
    MasterWeights,
    Replicated,
    Sharded,
    needs_masters,
    needs_sharding,
    shard,
)
from shardwright.parallel.expert import ReadCounts, read_counts, split_experts
from shardwright.parallel.fp8 import use_fp8
from shardwright.parallel.initialise import materialise
from shardwright.parallel.linear_attention import ContextDeltaNet
from shardwright.parallel.mesh import Groups, build_expert_mesh, build_groups, build_mesh, build_stage_groups
from shardwright.parallel.microbatch_runner import BatchInvariantRunner, Runner, SequentialRunner
from shardwright.parallel.model import ParallelModel
from shardwright.parallel.observer import Observer, Observers
from shardwright.parallel.offload import ActivationsOnHost
from shardwright.parallel.pipeline.messages import PipelineMessages
from shardwright.parallel.pipeline.runner import Pipeline, PipelineStage
from shardwright.parallel.pipeline.stage import StageModel, cut_stages, holders
from shardwright.parallel.point_to_point import connect
from shardwright.parallel.powersgd import PowerSGD
from shardwright.parallel.routing import shard_routers
from shardwright.parallel.secondary import build_secondary_groups
from shardwright.parallel.stored import store_base
from shardwright.parallel.tensor import RowLinear, plain_parameters, split_model
from shardwright.parallel.topk import TopK
from shardwright.schedule.actions import Schedule
from shardwright.schedule.basic import forward_only
from shardwright.split.compression import elements_of_block, powersgd_rank
from shardwright.split.documents import balances_documents
from shardwright.split.sequence import SequencePieces
from shardwright.split.stages import stage_layers, step_schedule
from shardwright.system.errors import LayoutError

Fill = Callable[[nn.Module, ModelSpec, int, torch.device, torch.device], None]
"""(part of the model on the meta device, spec, seed, device, device of the trained parameters)."""


def apply(
    spec: ModelSpec,
    layout: Layout,
    device: torch.device,
    *,
    seed: int,
    param_dtype: torch.dtype = torch.float32,
    compute_dtype: torch.dtype = torch.float32,
    compile_blocks: bool = False,
    cuda_graphs: bool = False,
    seq_len: int | None = None,
    fill: Fill = materialise,
    read: ReadCounts = read_counts,
    fp8: Fp8 | None = None,
    batch_invariant: bool = False,
) -> ParallelModel:
    """Build a model of `spec` on this rank of `layout`, with its initial values.

    Every rank of the world calls this, after `init_process_group` (also if the world size is 1). The layout has to fit
    the model (`split.rules.problems`). `seq_len`, in tokens, is the sequence length that pipeline stages are balanced
    for; by default `spec.max_seq_len`. `cuda_graphs`: record compiled blocks as CUDA graphs, on a single rank that
    computes with copies of its parameters (`MasterWeights`). `fp8`: the fp8 recipe of the layers' matmuls, or None.
    `fill` moves a part of the model from the meta device and gives it its initial values; `read` reads the numbers of
    rows that ranks of ep exchange. `batch_invariant`: see `model/batch_invariant.py`; the model and the layout have to
    support it (`split.rules.batch_invariance_problems`).
    """
    mesh = build_mesh(layout, device.type, spec.n_kv_heads)
    groups = build_groups(layout, mesh)
    parts, held_on = _parts(spec, layout, groups, param_dtype, compute_dtype, seq_len or spec.max_seq_len)
    experts_apart = spec.moe is not None and layout.ep * layout.tp > 1
    expert_mesh = build_expert_mesh(layout, device.type) if experts_apart else None
    sharded = experts_apart or needs_sharding(layout, compute_dtype, param_dtype)
    compression = Compression.from_layout(layout, mesh, expert_mesh)
    secondary = build_secondary_groups(layout, mesh, expert_mesh)
    shards: list[list[FSDPModule]] = []
    replicas_apart = compression.gradients is not None or elements_of_block(layout) > 0
    observers = Observers()
    for part in parts:
        blocks = list(part.layers.values())
        part.applies_head = not layout.loss_chunk_tokens
        if groups.tp is not None:
            split_model(part, layout, mesh, groups.tp)
        if layout.cp > 1:
            _attend_over_cp(part, layout, groups, balances_documents(spec, layout))
        if fp8 is not None:
            use_fp8(part, fp8, layout, groups)
        store_base(part, layout, groups.tp)
        shard_routers(part, layout, groups)
        if groups.ep is not None and expert_mesh is not None:
            split_experts(part, expert_mesh, groups.ep, read, codec_of(layout.compress_dispatch))
        offloads = layout.offload_activations == "cpu"
        store = ActivationsOnHost(device, layout.offload_min_bytes, observers) if offloads else None
        _run_blocks(blocks, layout, store, compile_blocks, cuda_graphs)
        if sharded:
            kinds = compute_dtype, param_dtype, replicas_apart
            shards.append(shard(part, blocks, layout, mesh, expert_mesh, compression, secondary, *kinds))
        fill(part, spec, seed, device, torch.device("cpu") if layout.offload_parameters == "cpu" else device)
    named = [dict(part.named_parameters()) for part in parts]
    plain = [{} if sharded else plain_parameters(part) for part in parts]
    copied = needs_masters(layout, compute_dtype, param_dtype)
    feedback = _error_feedback(spec, layout, mesh, named, plain, seed, sharded or copied)
    masters = [MasterWeights(part, compute_dtype) for part in parts] if copied else []
    summed_by = feedback or [None] * len(parts)
    engines: list[DataEngine] = [*masters]
    for units, summed in zip(shards, summed_by, strict=False):
        assert not isinstance(summed, PowerSGD)
        engines.append(Sharded(units, layout, OverReplicas(compression, summed) if replicas_apart else None))
    engines = engines or [
        _replicated(part, groups, compression, summed) for part, summed in zip(parts, summed_by, strict=True)
    ]
    stages = [
        PipelineStage(part, engine) for part, engine in zip(parts, engines, strict=True) if isinstance(part, StageModel)
    ]
    runner: Runner
    if stages:
        shared = {ranks for ranks in held_on.values() if len(ranks) > 1}
        stage_groups = build_stage_groups(layout, groups, shared | set(_neighbours(layout)))
        longest = seq_len or spec.max_seq_len
        runner = _pipeline(stages, layout, groups, stage_groups, device, compute_dtype, longest, observers)
    else:
        stage_groups = {}
        runner = SequentialRunner(parts[0], engines[0], cuda_graphs, observers)
    if batch_invariant:
        runner = BatchInvariantRunner(runner)
    return ParallelModel(
        spec,
        parts,
        runner,
        layout,
        mesh,
        groups,
        named,
        plain,
        held_on,
        stage_groups,
        masters,
        expert_mesh,
        {name: tensor for compressor in feedback for name, tensor in compressor.state.items()},
        observers,
    )


def _attend_over_cp(part: Transformer, layout: Layout, groups: Groups, balances_documents: bool) -> None:
    """Give each block of `part` an attention, or a scan, that continues over the tokens of other ranks of cp."""
    part.sequence_len = partial(operator.mul, layout.cp)
    if groups.cp_ring is not None:
        connect(groups.cp_ring)  # with documents some ranks may have nothing to send
    modules: list[Any] = list(part.modules())
    pieces = SequencePieces.from_layout(layout)
    for module in modules:
        if hasattr(module, "attend"):
            module.attend = ContextAttention(layout.cp_method, groups.cp_ring, groups.cp_ulysses, balances_documents)
        elif isinstance(module, GatedDeltaNet):
            module.mix = ContextDeltaNet(module, pieces, (groups.cp_ulysses, groups.cp_ring))


def _error_feedback(
    spec: ModelSpec,
    layout: Layout,
    mesh: DeviceMesh,
    named: Sequence[dict[str, nn.Parameter]],
    plain: Sequence[dict[str, nn.Parameter]],
    seed: int,
    sharded: bool,
) -> list[PowerSGD] | list[TopK]:
    """Return for each part the sums of gradients that are compressed with error feedback; an empty list if the layout
    has none.

    Raises LayoutError if matmuls do not use the type of the parameters.
    """
    rank, k = powersgd_rank(layout), elements_of_block(layout)
    if rank and sharded:
        raise LayoutError(
            f"layout.compress_gradients={layout.compress_gradients!r} needs matmuls in the type of the parameters; set "
            f"precision.compute='fp32', or compress_gradients='bf16'"
        )
    if rank:
        return [PowerSGD(parameters, spec, rank, mesh["replicas"], seed) for parameters in named]
    both = zip(named, plain, strict=True)
    return [TopK(*parameters, spec, k, layout, mesh) for parameters in both] if k else []


def _replicated(
    part: nn.Module, groups: Groups, compression: Compression, feedback: ErrorFeedback | None
) -> Replicated:
    others = [parameter for name, parameter in part.named_parameters() if feedback is None or name not in feedback]
    return Replicated(others, groups.tokens, compression.gradients, feedback)


def _parts(
    spec: ModelSpec,
    layout: Layout,
    groups: Groups,
    dtype: torch.dtype,
    frozen_dtype: torch.dtype,
    seq_len: int,
) -> tuple[list[Transformer] | list[StageModel], dict[str, tuple[int, ...]]]:
    """Return the whole model, or with pp this rank's stages, on the meta device, and for each parameter of the whole
    model the ranks of `pp` that hold it."""
    with torch.device("meta"):
        whole = Transformer(spec).to_types(dtype, frozen_dtype)
    if groups.pp is None:
        return [whole], {name: (0,) for name, _ in whole.named_parameters()}
    stages = cut_stages(whole, stage_layers(spec, layout, seq_len))
    local = dict.fromkeys(layout.stages_on(groups.pp.rank()))
    return [stages[number] for number in local], holders(stages, layout.ways)


def _neighbours(layout: Layout) -> Iterator[tuple[int, int]]:
    """Yield the pairs of ranks of `pp`, the lower first, that hold two consecutive stages."""
    for route in layout.ways:
        for rank, next_rank in pairwise(route):
            if rank != next_rank:
                yield min(rank, next_rank), max(rank, next_rank)


def _pipeline(
    stages: list[PipelineStage],
    layout: Layout,
    groups: Groups,
    stage_groups: dict[tuple[int, ...], dist.ProcessGroup],
    device: torch.device,
    dtype: torch.dtype,
    seq_len: int,
    observer: Observer,
) -> Pipeline:
    assert groups.pp is not None
    spec = stages[0].model.spec
    cuts = layout.tp if layout.token_shards else 1

    def schedule(training: bool, n_microbatches: int) -> Schedule:
        if training:
            return step_schedule(spec, layout, n_microbatches, seq_len)
        return forward_only(layout.ways[0], layout.pp, n_microbatches)

    def activation(tokens_BT: Tensor) -> Tensor:
        n_sequences, n_tokens = tokens_BT.shape
        return torch.empty(n_sequences, n_tokens // cuts, spec.d_model, dtype=dtype, device=device)

    messages = PipelineMessages(groups.pp.rank(), stage_groups, codec_of(layout.compress_pipeline), observer)
    return Pipeline(stages, schedule, messages, activation, device, observer)


def _run_blocks(
    blocks: Sequence[nn.Module], layout: Layout, store: ActivationsOnHost | None, compiled: bool, graphs: bool
) -> None:
    """Set up compilation, recomputation by the layout, and `store`, which keeps saved activations, for blocks.

    `graphs`: the kernels of compiled blocks are recorded as CUDA graphs.

    The forward pass of a block is compiled; hooks around it (of FSDP2, of saved tensors) are not. All blocks share one
    code object and one compilation; collectives split it into several regions.
    """
    # Without a pipeline the backward pass of the last block comes next, so the block keeps its activations.
    last = blocks[-1] if layout.pp == 1 else None
    one_region = compiled and layout.tp * layout.cp * layout.ep == 1
    recomputing = blocks[: layout.recompute_layers] if layout.recomputes else ()
    if layout.recompute == "full":
        for block in recomputing:
            _recompute(block, compiled, one_region)
    if compiled:
        for block in blocks:
            block.forward = torch.compile(block.forward, options={"triton.cudagraphs": True} if graphs else None)
            for layer in expert_layers(block).values():
                layer.tally.copies = graphs
    if layout.recompute != "full":
        for block in recomputing:
            keep = None if store is None or block is last else store.keep
            recompute_parts(block, layout.recompute_modules, keep, one_region=one_region)
    if store is not None:
        for block in blocks:
            store.wrap(block, first=block is blocks[0], keeps=block is last)


def _recompute(block: nn.Module, compiled: bool, one_region: bool) -> None:
    for module in block.modules():
        if isinstance(module, Linear | RowLinear):
            module.saves_first = True
    # The compiler skips a checkpointed function that it cannot trace as a whole, for example at collectives. Then its
    # children are compiled, except experts, whose choices have to be kept.
    experts = bool(expert_layers(block))
    if compiled and not one_region:
        for part in block.children() if experts else (block,):
            if not isinstance(part, MoE):
                part.forward = torch.compile(part.forward)
    block.forward = checkpointed(block.forward, decides=experts, compiled=one_region)
