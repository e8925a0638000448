"""The number of ranks from which zero 3 gathers layers for the backward pass (`layout.zero_secondary_ranks`).

Source: ZeRO++, arXiv 2306.10209; parallel/secondary.py.
"""

import numpy as np

from shardwright.cost.job import Candidates, Ints, Job


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
    found: Ints = np.where(possible, ranks, shards)
    return found
