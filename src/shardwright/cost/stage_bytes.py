"""Bytes of the stages of a pipeline while it runs: the bytes of a micro-batch in each stage, the bytes that ZeRO shards
for a part of the step, and the sum of all at given moments.

Shapes: n candidates, S stages, R ranks of pp, v stages of a rank, k moments, c parts of a sum.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.cost import activations, ledger, pipeline
from shardwright.cost.activations import LayerActivations
from shardwright.cost.end_activations import EndActivations, ends
from shardwright.cost.gradients import embedding_gradient, moving_gradients, weight_gradient_bytes
from shardwright.cost.job import Candidates, Floats, Ints, Job
from shardwright.cost.memo import NOT_OF_A_LAYER, OF_A_PASS, Memo, others
from shardwright.cost.parameters import Parameters
from shardwright.cost.pipeline import Layers, Moments, Stages


@dataclass(frozen=True, eq=False)
class MicrobatchBytes:
    """Bytes of a micro-batch in each stage, (n, S): kept while it is in flight, by kind, and while it waits for W; and
    the temporary buffers of an action: of a block's backward pass, of gradients before their reduction, of the loss, of
    the embedding's backward pass. `last_norm`: bytes of the last stage, in addition to logits, that are freed before
    the backward pass of its layers."""

    activations: Floats
    experts: Floats
    logits: Floats
    waiting: Floats
    waiting_logits: Floats
    working: Floats
    gradients: Floats
    loss: Floats
    embedding: Floats
    last_norm: Floats


@dataclass(frozen=True, eq=False)
class ShardedBytes:
    """Bytes of each stage for a part of the step, independent of the micro-batch, (n, S): its gradients while they
    accumulate and once they are reduced, and the parameters that it gathers for a pass and during the head's."""

    accumulating: Floats
    reduced: Floats
    gathered: Floats
    gathered_for_head: Floats


@dataclass(frozen=True, eq=False)
class StageBytes(ShardedBytes, MicrobatchBytes):
    """The bytes of a micro-batch and the sharded bytes of each stage."""

    def take(self, rows: Ints) -> "StageBytes":
        """Return the bytes of some of the candidates."""
        return StageBytes(**{name: values[rows] for name, values in vars(self).items()})


def microbatch_bytes(
    job: Job,
    candidates: Candidates,
    stages: Stages,
    params: Parameters,
    memo: Memo | None = None,
    of_any_step: bool = False,
) -> MicrobatchBytes:
    """Return the bytes of a micro-batch in some stages; `params`: their parameters, `memo`: cached results of layers.
    `of_any_step`: without the gradients of both ends that depend on the data axes and the number of micro-batches
    (`gradients.head_gradient`, `gradients.embedding_gradient`)."""
    zeros = np.zeros((len(candidates), len(stages.layers)))
    kept, experts, waiting, working, largest = (zeros.copy() for _ in range(5))
    layers: list[tuple[Layers, LayerActivations]] = []
    for alike in pipeline.layers_alike(job, candidates, stages):
        layer, counts = _layer(job, alike, memo), alike.counts
        layers.append((alike, layer))
        kept += (layer.kept - layer.experts)[:, None] * counts
        experts += layer.experts[:, None] * counts
        waiting += layer.waiting[:, None] * counts
        working = np.maximum(working, layer.working[:, None] * (counts > 0))
        largest = np.maximum(largest, layer.kept[:, None] * (counts > 0))
    if candidates.shared.offload_activations == "cpu":
        stays = 1 - job.stack.offloaded_share
        kept, experts = stays * kept, stays * experts
    around = ends(job, candidates)
    kept[:, 0] += around.first
    kept[:, :-1] += around.sent[:, None]
    kept[:, 1:] -= around.received[:, None]
    kept[:, -1] += around.last
    waiting[:, -1] += around.last
    logits, waiting_logits, loss = (zeros.copy() for _ in range(3))
    logits[:, -1], waiting_logits[:, -1] = around.logits, around.waiting_logits
    # The head's backward pass has the gradients of the logits and of its matrix.
    head = params.trained.head * weight_gradient_bytes(job)
    loss[:, -1] = np.maximum(around.loss, np.maximum(head, around.summed) + around.to_head - around.freed)
    if candidates.shared.offload_activations == "cpu":
        # The layer that runs, and the layer whose activations are being copied.
        n_layers = np.array([len(numbers) for numbers in stages.layers])
        working = working + np.minimum(n_layers, 2) * largest
        loss[:, -1] += largest[:, -1]
    of_a_block = (
        np.min([layer.kept for _, layer in layers], axis=0),
        np.max([layer.working for _, layer in layers], axis=0),
    )
    gradients = moving_gradients(job, candidates, stages, params, *of_a_block, of_any_step=of_any_step)
    if ledger.recording():
        _note_stages(stages, kept, around, layers)
    embedding = zeros.copy()
    if not of_any_step:
        microbatches = candidates.microbatches(job.global_batch)
        embedding[:, 0] = embedding_gradient(job, candidates, stages, params, microbatches)
    last_norm = zeros.copy()
    if not candidates.kind.splits_backward:  # else W reads it
        last_norm[:, -1] = around.last
    return MicrobatchBytes(
        kept, experts, logits, waiting, waiting_logits, working, gradients, loss, embedding, last_norm
    )


def _layer(job: Job, alike: Layers, memo: Memo | None) -> LayerActivations:
    """Return the activations of layers of a kind, from the memo if it has them."""
    if memo is None:
        return activations.layer(job, alike.candidates, alike.block, alike.name)
    splits = alike.candidates.kind.splits_backward
    table = memo.table(OF_A_PASS, "activations", alike.name, splits, others(alike.candidates, NOT_OF_A_LAYER))
    rows = table.rows(alike.candidates, lambda new: vars(activations.layer(job, new, alike.block, alike.name)))
    return LayerActivations(**{name: values[rows] for name, values in table.values.items()})


ONE_THREAD = 2**18
"""Multiplications of a matmul up to which BLAS uses one thread; threads that wait for others take CPU time too."""


def sizes_at(of_stage: StageBytes, stages: Stages, at: Moments) -> Floats:
    """Return activations and temporary buffers, sum of all kinds, (n, R, k)."""
    return sizes_of(parts_of_microbatch(of_stage, stages) + parts_sharded(of_stage, stages), at.counts)


def sizes_of(parts_nRc: Floats, counts_Rkc: Floats) -> Floats:
    """Return the sum of parts, each times its count at a moment (`Moments.counts`), (n, R, k)."""
    n_ranks, k, c = counts_Rkc.shape
    sizes = np.empty((n_ranks, len(parts_nRc), k))
    step = max(1, ONE_THREAD // (k * c))
    for begin in range(0, len(parts_nRc), step):
        some = parts_nRc[begin : begin + step].transpose(1, 0, 2)
        np.matmul(some, counts_Rkc.transpose(0, 2, 1), out=sizes[:, begin : begin + step])
    return sizes.transpose(1, 0, 2)


def parts_of_microbatch(of_stage: MicrobatchBytes, stages: Stages) -> Floats:
    """Return the bytes of a rank for a micro-batch, in the order of `Moments.counts`, (n, R, c)."""
    parts, (in_flight, waiting, *_), by_action = _parts(len(of_stage.loss), stages)
    in_flight[:] = (of_stage.activations + of_stage.experts + of_stage.logits)[:, stages.of_rank]
    waiting[:] = (of_stage.waiting + of_stage.waiting_logits)[:, stages.of_rank]
    working, gradients = (part[:, stages.of_rank].max(2) for part in (of_stage.working, of_stage.gradients))
    by_action[pipeline.LOSS] = of_stage.loss[:, -1:]
    by_action[pipeline.BACKWARD] = working + gradients
    by_action[pipeline.BACKWARD_LAST] = working + gradients - of_stage.logits[:, -1:] - of_stage.last_norm[:, -1:]
    by_action[pipeline.EMBEDDING] = of_stage.embedding[:, :1]
    return parts


def parts_sharded(of_stage: ShardedBytes, stages: Stages) -> Floats:
    """Return the bytes of a rank's stages for a part of the step, for any micro-batch, in the same order, (n, R, c)."""
    parts, (*_, accumulating, reduced), by_action = _parts(len(of_stage.gathered), stages)
    accumulating[:] = of_stage.accumulating[:, stages.of_rank]
    reduced[:] = of_stage.reduced[:, stages.of_rank]
    by_action[:] = of_stage.gathered[:, stages.of_rank].max(2)
    by_action[pipeline.LOSS] = of_stage.gathered_for_head[:, stages.of_rank].max(2)
    by_action[pipeline.EMBEDDING] = 0.0  # no layer follows
    return parts


def _parts(n: int, stages: Stages) -> tuple[Floats, list[Floats], Floats]:
    """Return zeros, (n, R, c), and views of them: for the stages of a rank, in flight, waiting, accumulating and
    reduced, each (n, R, v), and for each action, (actions, n, R)."""
    n_ranks, v = stages.of_rank.shape
    parts = np.zeros((n, n_ranks, 4 * v + len(pipeline.ACTIONS)))
    return parts, [parts[:, :, v * at : v * (at + 1)] for at in range(4)], np.moveaxis(parts[:, :, 4 * v :], 2, 0)


def _note_stages(
    stages: Stages, kept: Floats, around: EndActivations, layers: Sequence[tuple[Layers, LayerActivations]]
) -> None:
    """Record the activations of a micro-batch in each stage of the one rank, without rows of experts and logits."""
    last = len(stages.layers) - 1
    for stage in stages.of_rank[0].tolist():
        terms, inputs = [], {}
        for alike, layer in layers:
            if count := int(alike.counts[stage]):
                name = ledger.identifier(f"kept by {alike.name}")
                terms.append(f"{count} * {name}")
                inputs[name] = layer.kept - layer.experts
        ends = {"dropout_mask": around.first * (stage == 0), "sent_on": around.sent * (stage < last)}
        ends["around_the_last_norm"] = around.last * (stage == last)
        nonzero = {name: n_bytes for name, n_bytes in ends.items() if np.any(n_bytes)}
        formula = " + ".join([*terms, *nonzero])
        if stage > 0 and np.any(around.received):
            formula, nonzero["in_a_buffer"] = f"{formula} - in_a_buffer", around.received
        ledger.note(f"kept in stage {stage}", formula, kept[:, stage], "B", "of a microbatch", **inputs, **nonzero)
