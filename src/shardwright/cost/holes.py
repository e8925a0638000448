"""Memory of freed tensors that the C library keeps on a CPU, where it is the allocator.

Blocks of `MAPPED_BYTES` and more are mapped alone, and are returned to the kernel. glibc cannot reuse every hole of
smaller blocks (`training/device.py:configure_malloc`). For W bytes of tensors it keeps r s W more: r bytes for each
byte of small tensors, which `shardwright measure` measures, and s their share of all tensors, computed here.
"""

import numpy as np

from shardwright.cost import activations, parameters, pipeline
from shardwright.cost.job import Candidates, Floats, Job
from shardwright.model.modules import Row, end_rows
from shardwright.system.units import MiB

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
        add(n_bytes, 2 * count)
        add(n_bytes / np.where(sharded, shards, 1), job.n_optimizer_states * count)

    tokens = candidates.tokens(job.seq_len)
    outside = tokens / candidates.token_shards
    for block, of_stages in pipeline.stages(job, candidates).of_kind.items():
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
