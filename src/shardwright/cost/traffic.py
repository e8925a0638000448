"""The messages that a rank sends in a step, as the step time prices them. Tests compare them with real steps.

Not listed: numbers of a few bytes once a step (target tokens, norm of the gradients), and the counts of routers (rows
for each expert, their load and losses).
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np

from shardwright.cost import compression, data_messages
from shardwright.cost.collectives import PricedMessage, point_to_point
from shardwright.cost.job import Candidates, Job
from shardwright.cost.parameters import RankParameters
from shardwright.cost.rank_parameters import rank_parameters
from shardwright.cost.speed import DATA
from shardwright.cost.step import PIPELINE, StagePasses


def step_messages(job: Job, candidates: Candidates, rank: int) -> list[PricedMessage]:
    """Return the messages of rank `rank` of `pp` in a step of one layout, with the calls of all its micro-batches.
    Sends are included only if they leave the rank."""
    m = int(candidates.microbatches(job.global_batch)[0])
    stages = StagePasses(job, candidates)
    messages = [
        replace(message, calls=message.calls * m * float(stages.sum_per_rank(count)[rank]))
        for passes, count in stages.work
        for message in passes.messages
    ]
    messages += _between_stages(job, candidates, rank, m)
    params = rank_parameters(job, candidates, rank)
    end = (params.end_groups == 1).astype(np.int64)
    data = [
        replace(message, calls=message.calls * times)
        for times, what, group in _collectives(job, candidates, params, m)
        for message in data_messages.data_messages(job, candidates.shared, what, group)
    ]
    data += [*data_messages.replica_messages(job, candidates, params, end), *compression.messages(candidates, params)]
    messages += [replace(message, work=DATA) for message in data]
    return [
        message for message in messages if np.all(message.size * np.sign(message.calls) * np.sign(message.n_bytes) > 1)
    ]


def shards_over_link(job: Job, candidates: Candidates, rank: int) -> dict[str, tuple[int, int]]:
    """Return, with shards of parameters in host memory, the copies "to the device" and "to the host" of rank `rank` of
    `pp` in a step of one layout, and their bytes; else an empty dict."""
    if candidates.shared.offload_parameters == "none":
        return {}
    params = rank_parameters(job, candidates, rank)
    calls: Counter[str] = Counter()
    elements: Counter[str] = Counter()
    for times, what, group in _collectives(job, candidates, params, int(candidates.microbatches(job.global_batch)[0])):
        reduced = what in (data_messages.SCATTERED, data_messages.ACROSS)
        where = "to the host" if reduced else "to the device"
        n, count = data_messages.over_link(candidates.shared, what, group)
        calls[where] += times * int(n[0])
        elements[where] += times * round(float(count[0]))
    return {where: (calls[where], 4 * elements[where]) for where in calls}


def _collectives(
    job: Job, candidates: Candidates, params: RankParameters, m: int
) -> Iterator[tuple[int, str, data_messages.ParameterGroup]]:
    """Yield the collectives of weights and gradients in a step: their number, their name, and their parameters."""
    times = {"1": 1, "m": m, "(m - 1)": m - 1}
    for often, whats, _ in data_messages.stage_collectives(job, candidates, int(candidates.zero[0])):
        for what in whats:
            for group in data_messages.groups(job, candidates, params):
                yield times[often], what, group


def _between_stages(job: Job, candidates: Candidates, rank: int, m: int) -> Iterator[PricedMessage]:
    """Yield the activations that a rank sends to the next stage, and the gradients sent to the previous one."""
    e_sent = compression.transit_bytes(job, candidates.shared.compress_pipeline)
    n_bytes = candidates.tokens(job.seq_len) * job.model.d_model * e_sent / candidates.token_shards
    stride = candidates.world // candidates.pp
    for route in candidates.shared.ways:
        for before, after in pairwise(route):
            if before != after:
                for what, sender in (("activations", before), ("gradients of activations", after)):
                    if sender == rank:
                        calls = m // len(candidates.shared.ways)
                        apart = abs(before - after) * stride
                        yield PricedMessage(what, point_to_point, n_bytes, 2, apart, calls, PIPELINE)
