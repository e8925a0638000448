"""Parameters of a rank of a pipeline, as data parallelism sends them, and the ranks from which layers are gathered for
the backward pass (`layout.zero_secondary_ranks`).

Source: ZeRO++, arXiv 2306.10209; parallel/secondary.py.
"""

import numpy as np

from shardwright.cost import compression, ledger, parameters, pipeline
from shardwright.cost.blocks import BlockShape
from shardwright.cost.job import Candidates, Ints, Job
from shardwright.cost.parameters import RankParameters


def rank_parameters(job: Job, candidates: Candidates, rank: int | None = None) -> RankParameters:
    """Return the parameters of each candidate on a rank of `pp`, by default the rank with the most."""
    cut = pipeline.stages(job, candidates)
    params = parameters.tp_rank_parameters(
        job.model,
        cut,
        candidates.tp,
        candidates.ep,
        element_bytes=job.element_bytes,
        ends_tp=parameters.vocabulary_shards(job, candidates),
    )
    replicas, kv_replicas = parameters.with_partial_gradients(job.model, cut, candidates)
    blocks = np.array([len(layers) for layers in cut.layers])
    expert_blocks = sum((n for block, n in cut.layers_by_kind.items() if block.experts), np.zeros_like(blocks))
    shape = params.dense.shape
    untrained = sum((_untrained(block) * n for block, n in cut.layers_by_kind.items()), np.zeros_like(blocks))
    of_trained = params.trained
    frozen = [params.dense - of_trained.dense, params.expert - of_trained.expert, params.ends - of_trained.ends]
    frozen[0] = frozen[0] - untrained * (job.model.lora is not None)
    parts = [params.dense, params.expert, params.ends, of_trained.hidden, *frozen, replicas, kv_replicas]
    parts += [np.broadcast_to(blocks, shape), np.broadcast_to(expert_blocks, shape), (params.ends > 0).astype(np.int64)]
    parts.append(np.broadcast_to(untrained, shape))
    compressed = compression.counts(job.model, cut, candidates)
    parts += [*compressed, (compressed[0] > 0).astype(np.int64)]
    parts += (
        list(parameters.padding(job.model, cut, candidates)) if job.stack.pads_rows else [np.zeros_like(parts[0])] * 5
    )
    # If matrices are compressed with error feedback, a formula estimates the buckets of the other parameters.
    counted = job.element_bytes == 4 and bool((candidates.zero == 0).any()) and not np.any(compressed[0])
    parts.append(
        parameters.buckets(job.model, cut, candidates.tp, candidates.ep) if counted else np.zeros_like(parts[0])
    )
    parts += [params.dense - params.stored.dense, params.expert - params.stored.expert]
    of_ranks = [part[:, cut.of_rank].sum(axis=2) for part in parts]
    most = (of_ranks[0] + of_ranks[1]).argmax(axis=1)[:, None] if rank is None else np.full((len(candidates), 1), rank)
    with ledger.section("Data parallel, rank with most parameters"):
        params.note(cut, int(most[0, 0]))
    return RankParameters(*(np.take_along_axis(part, most, 1)[:, 0] for part in of_ranks))


def _untrained(block: BlockShape) -> int:
    return sum(row.numel for row in block.rows if row.counted and row.kind == "balance")


def again_ranks(job: Job, candidates: Candidates, experts: bool = False) -> Ints:
    """Return from how many ranks layers are gathered for the backward pass, (n,): the secondary ranks, if ZeRO's shards
    are a multiple of them; else all ranks of the shards. `experts`: for experts, if separate."""
    ranks, shards = candidates.zero_secondary_ranks, candidates.shards
    possible = np.full(len(candidates), candidates.pp == 1) & (candidates.zero == 3)
    if experts:
        ranks, shards = ranks * candidates.tp // candidates.ep, candidates.expert_shards
        whole = job.model.moe is not None and job.model.moe.n_experts
        possible &= whole % (shards * candidates.ep) == 0  # else FSDP2 shards another dim
    possible &= (ranks > 1) & (shards > ranks) & (shards % np.maximum(ranks, 1) == 0)
    result: Ints = np.where(possible, ranks, shards)
    return result
