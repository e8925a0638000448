"""Memory that PyTorch's CUDA allocator reserves beyond the peak of live tensors, because its pools share no memory.

A tensor can take memory that another one has freed only if that was allocated on the same stream, and in a segment that
is large enough: segments are never joined. So the allocator reserves the sum of the peaks of its pools:

| memory of its own                                        | bytes                     | when                          |
| -------------------------------------------------------- | ------------------------- | ----------------------------- |
| reduced gradients, on a stream of FSDP2                  | g P / N                   | FSDP2                         |
| gathered parameters: a block and the ends, and the shard | e (B + E) + e max(B, E)/N | FSDP2 over N > 1 ranks        |
| of the larger one, on another stream                     |                           |                               |
| gradients of a block or of the ends that are cast for a  | r B, r E                  | the same, if larger than the  |
| reduce-scatter                                           |                           | logits and any activation     |
| gradients of matrices that are larger than any           | their sum less the logits | one rank without FSDP2; freed |
| activation                                               |                           | logits make room for them     |

B, E are parameters of the largest block and of embedding, norm and head; other symbols are defined in cost/states.py.
The rest, the allocator's rounding and holes, is `Stack.fragmentation`. benchmarks/gpu/memory.py compares all of it with
the allocator itself.

Memory of freed tensors that the C library keeps on a CPU, where it is the allocator.

Blocks of `MAPPED_BYTES` and more are mapped alone, and are returned to the kernel. glibc cannot reuse every hole of
smaller blocks (`training/device.py:configure_malloc`). For W bytes of tensors it keeps r s W more: r bytes for each
byte of small tensors, which `shardwright measure` measures, and s their share of all tensors, computed here.
"""

from dataclasses import dataclass

import numpy as np

from shardwright.cost import activations, parameters, pipeline
from shardwright.cost.blocks import blocks
from shardwright.cost.gradients import shares_gradients, uses_fsdp
from shardwright.cost.job import Candidates, Floats, Job
from shardwright.cost.parameters import Parameters
from shardwright.cost.pipeline import Stages
from shardwright.model.modules import end_rows
from shardwright.model.row import Row
from shardwright.system.units import MiB


@dataclass(frozen=True, eq=False)
class Pools:
    """Bytes of each stage that have pools of their own. `reduced`, `accumulating`, (n, S): gradients, once they are
    complete and while they accumulate. `gathered`, (n, S): parameters that are being gathered. `sent`, (2, n, S):
    gradients of a block and of the ends, while they are reduced."""

    reduced: Floats
    accumulating: Floats
    gathered: Floats
    sent: Floats


def has_pools(job: Job) -> bool:
    """Return whether pools are priced: for this system on GPUs."""
    return job.stack.pools and not job.stack.of_process


def stage_pools(job: Job, candidates: Candidates, stages: Stages, params: Parameters, reduced: Floats) -> Pools:
    """Return the pools of stages. `params`: their parameters, `reduced`: their complete gradients."""
    fsdp = uses_fsdp(job, candidates)[:, None]
    alone = (candidates.world == 1)[:, None] & ~fsdp
    apart = np.where(fsdp, reduced, _outsized(job, candidates, stages) if alone.any() else 0.0)
    shared = shares_gradients(job, candidates)[:, None] | ~fsdp
    ranks = candidates.shards[:, None]
    block = np.where(ranks > 1, params.stored.layer_dense[:, None], 0)
    block = block + np.where(candidates.expert_shards > 1, params.stored.layer_expert, 0)[:, None]
    ends = np.where(ranks > 1, params.ends, 0)
    gathered = job.element_bytes * (block + ends + np.maximum(block, ends) / ranks)
    trained = params.trained
    block = np.where(ranks > 1, trained.layer_dense[:, None], 0)
    block = block + np.where(candidates.expert_shards > 1, trained.layer_expert, 0)[:, None]
    sent = job.stack.reduced_bytes * np.stack(
        [np.broadcast_to(block, ends.shape), np.where(ranks > 1, trained.ends, 0)]
    )
    return Pools(apart, apart * shared, fsdp * gathered, fsdp * sent)


def in_passing(gathered: Floats, sent: Floats, room: Floats, stages: Stages) -> Floats:
    """Return the bytes in a rank's pools of parameters and gradients that are being sent, (n, R)."""
    result: Floats = (gathered + np.where(sent > room, sent, 0.0).sum(0))[:, stages.of_rank].max(2)
    return result


def room(job: Job, candidates: Candidates, n_stages: int) -> Floats:
    """Return the largest freed memory for a later tensor of a backward pass in each stage, (n, S): an activation; in
    the last stage the logits of a micro-batch, or with a chunked loss the sum of the head's gradients."""
    result = np.broadcast_to(_largest_activation(job, candidates)[:, None], (len(candidates), n_stages)).copy()
    result[:, -1] = np.maximum(result[:, -1], _logits(job, candidates))
    return result


def _largest_activation(job: Job, candidates: Candidates) -> Floats:
    """Return the bytes of the largest tensor that a layer keeps of a micro-batch, (n,)."""
    tokens, h = candidates.tokens(job.seq_len), job.model.d_model
    outside = tokens / candidates.token_shards
    top_k = 0 if job.model.moe is None else job.model.moe.top_k
    result = outside * h
    for block in blocks(job.model):
        inner = tokens * block.inner / candidates.tp
        experts = outside * top_k * max(h, block.expert_inner) * bool(block.experts)
        result = np.maximum(result, np.maximum(inner, experts))
    return np.asarray(job.element_bytes * result, dtype=np.float64)


def _logits(job: Job, candidates: Candidates) -> Floats:
    rows = parameters.vocabulary_rows(job.model, candidates.tp)
    if candidates.shared.loss_chunk_tokens:
        return np.asarray(rows * job.model.d_model * max(4.0, job.element_bytes))
    return np.asarray(candidates.tokens(job.seq_len) * rows * job.element_bytes)


def _outsized(job: Job, candidates: Candidates, stages: Stages) -> Floats:
    """Return the bytes of a stage's matrix gradients that are larger than any activation, beyond the logits, (n, S)."""
    largest = _largest_activation(job, candidates)
    result = np.zeros((len(candidates), len(stages.layers)))
    for block, counts in stages.layers_by_kind.items():
        for row in block.rows:
            n_bytes = job.stack.gradient_bytes * parameters.elements(job.model, row, candidates.tp, candidates.ep)
            result += np.where(n_bytes > largest, n_bytes, 0.0)[:, None] * counts * row.trained
    result[:, -1] -= _logits(job, candidates)
    return np.maximum(result, 0.0)


MAPPED_BYTES = 32 * MiB
"""Largest threshold that glibc accepts. With 2 MiB, steps of a 30M model used 905 MiB with ZeRO-1 and 814 MiB with
ZeRO-3, instead of 1137 and 1203. They took 14 % and 34 % more CPU-seconds, and steps with micro-batches of 4096 tokens
27 % more, because the kernel zeroes the memory that it maps."""


def small_share(job: Job, candidates: Candidates) -> Floats:
    """Return the share of bytes in tensors of less than `MAPPED_BYTES`, (n,).

    Counted are a weight and its gradient, of the size of the parameter on a rank of tp, its optimizer states, which
    ZeRO shards, and the activations of a micro-batch. Ignored: shards of gradients, and buffers of messages.
    """
    small, whole = np.zeros(len(candidates)), np.zeros(len(candidates))
    e, model, tp, ep = job.element_bytes, job.model, candidates.tp, candidates.ep
    sharded = candidates.zero >= 1

    def add(n_bytes: Floats, count: float) -> None:
        nonlocal small, whole
        small = small + np.where(n_bytes < MAPPED_BYTES, n_bytes, 0.0) * count
        whole = whole + n_bytes * count

    def add_parameter(row: Row, count: float) -> None:
        n_bytes = np.asarray(e * parameters.elements(model, row, tp, ep), dtype=np.float64)
        shards = candidates.expert_shards if row.split == "experts" else candidates.shards
        add(n_bytes, (1 if row.frozen else 2) * count)
        if not row.frozen:
            add(n_bytes / np.where(sharded, shards, 1), job.n_optimizer_states * count)

    tokens = candidates.tokens(job.seq_len)
    outside = tokens / candidates.token_shards
    for block, of_stages in pipeline.stages(job, candidates).layers_by_kind.items():
        layers = float(np.sum(of_stages))
        for row in block.rows:
            add_parameter(row, layers)
        features = activations.features(job, candidates, block)
        made, *widths = (np.asarray(features[name], np.float64) for name in ("made", "q", "k", "v", "out"))
        add(e * outside * model.d_model, layers * (block.norms + block.inputs))
        for width in widths:
            add(e * tokens * width, layers)
        add(e * tokens * block.inner / tp, layers * (float(made) + 1) * (block.inner > 0))
    for row in end_rows(model):
        add_parameter(row, 1.0)
    predicted = np.minimum(tokens, candidates.shared.loss_chunk_tokens or tokens)
    add(e * predicted * parameters.vocabulary_rows(model, tp), 2.0)  # logits and their softmax
    return small / whole
