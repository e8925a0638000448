"""The memory of thousands of layouts at once, for a search. Equal to `cost.memory`; shared parts are computed once."""

from dataclasses import replace

import numpy as np

from shardwright.cost import memory, pipeline, pools, stage_bytes, states
from shardwright.cost.job import Candidates, Floats, Ints, Job
from shardwright.cost.memo import (
    NOT_OF_A_MICROBATCH,
    NOT_OF_STATES,
    OF_A_MICROBATCH,
    OF_STATES,
    DistinctRows,
    Memo,
    numbered,
    others,
)

FIRST = np.zeros(1, dtype=np.int64)
"""The first rank of pp."""
ROUNDING = 1e-9
"""Relative error of sums in another order, with a margin."""


def reserved_bytes(job: Job, candidates: Candidates, most: float = np.inf, memo: Memo | None = None) -> Floats:
    """Return `memory.estimate_memory(job, candidates).reserved_bytes`, (n,), in a fraction of the time for many
    candidates. Above `most` the result may be a lower bound. `memo`: of this job.

    Parameters, gradients and optimizer states are computed once for candidates that differ only in micro-batch and
    recomputation. If they need at most `most`, the first rank of pp follows, and then other ranks that can need more.
    """
    if not job.stack.keeps_gradients and np.any(candidates.world == 1):
        # A single rank's gradients and pools depend on the micro-batch and on the number of them; it has few layouts.
        return memory.estimate_memory(job, candidates).reserved_bytes
    memo = memo or Memo.from_candidates(candidates)
    stages = pipeline.stages(job, candidates)
    table = memo.table(OF_STATES, "states", stages.key, others(candidates, NOT_OF_STATES))
    at = table.rows(candidates, lambda new: _whole_step(job, new))
    share, process = memory.lost_share(job, candidates), job.stack.of_process * table.values["workspace"].max()
    found: Floats = table.values["most"][at] * (1 + share) - share * process
    for first in (True, False) if candidates.pp > 1 else (True,):  # the first rank has most in flight, mostly
        rows = np.flatnonzero(found <= most)
        if len(rows):
            left = candidates.take(rows)
            ranks = FIRST if first else _others(job, left)
            if not len(ranks):
                break
            theirs, moving = stages.of_ranks(ranks), _while_running(job, left, memo, ranks)
            always, update = (table.values[name][np.ix_(at[rows], ranks)] for name in ("always", "update"))
            whole = np.maximum(always + moving, update)
            whole += states.messages(job, left, theirs)
            if pools.has_pools(job):
                numbers = stages.stages_of(ranks)
                gathered, sent = (table.values[name][:, numbers][at[rows]] for name in ("gathered", "sent"))
                room = pools.room(job, left, len(stages.layers))[:, numbers]
                whole += pools.in_passing(gathered, np.moveaxis(sent, 2, 0), room, theirs)
            found[rows] = np.maximum(found[rows], whole.max(1) * (1 + share[rows]) - share[rows] * process)
    return found


def states_and_passes(
    job: Job, states_of: Candidates, passes_of: Candidates, limit: float, memo: Memo
) -> tuple[Floats, Floats]:
    """Return the bytes that a micro-batch may need, for each layout of `states_of`, and the bytes that it needs at
    least, for each layout of `passes_of`. A layout with the degrees and ZeRO stage of the former and the micro-batch,
    the number of micro-batches and the recomputation of the latter needs more than `limit` if it needs more than it
    may. Both have the shared keys of one group; it has several ranks."""
    stages = pipeline.stages(job, states_of)
    table = memo.table(OF_STATES, "states", stages.key, others(states_of, NOT_OF_STATES))
    at = table.rows(states_of, lambda new: _whole_step(job, new))
    most = limit * (1 + ROUNDING) / (1 + (0.0 if job.stack.of_process else job.stack.fragmentation))
    room = np.where(table.values["most"][at] <= most, most - table.values["always"][at, 0], -np.inf)
    return room, _of_microbatches_alone(job, passes_of, memo)


def _others(job: Job, candidates: Candidates) -> Ints:
    """Return the ranks of pp, except the first, that can need the most memory (`pipeline.leading_ranks`)."""
    every = numbered(memory.few_microbatches(job, candidates))[0].tolist()
    leading = np.unique(np.concatenate([pipeline.leading_ranks(job, candidates, m) for m in every]))
    return leading[leading > 0]


def _whole_step(job: Job, candidates: Candidates) -> dict[str, Floats]:
    """Return the bytes of each rank, (n, R), without activations, temporary buffers of passes and messages: `always`,
    and while the optimizer runs; the maximum of both over all ranks, and the workspace in it, (n,). The allocator's
    separate pools are in all of them, except `gathered` and `sent`, which are of stages."""
    held = memory.StepMemory(job, candidates)
    always = sum((n_bytes for kind, n_bytes in held.states.items() if kind != "buffers"), np.zeros(1))
    reduced, apart = held.reduced_bytes, {}
    if pools.has_pools(job):
        apart = {"gathered": held.pools.gathered, "sent": np.moveaxis(held.pools.sent, 0, 2)}
        of_rank = held.stages.of_rank
        always = always + held.pools.reduced[:, of_rank].sum(2)
        reduced = held.pooled_shards.reduced[:, of_rank].sum(2)
    update = always - held.states["gathered"] + held.update_bytes + reduced
    return {
        "always": always,
        "update": update,
        "most": np.maximum(always, update).max(1),
        "workspace": held.states["workspace"].max(1),
        **apart,
    }


def _of_microbatches_alone(job: Job, candidates: Candidates, memo: Memo) -> Floats:
    """Return a lower bound on activations and temporary buffers at the peak of the first rank of pp, (n,): without
    their parts that depend on the data axes. It is computed once for candidates with equal micro-batches."""
    table, rows = _of_microbatches(job, candidates, memo, FIRST)
    parts, few = table.values["parts"], memory.few_microbatches(job, candidates)
    distinct, back = numbered(few * len(parts) + rows)
    low = np.zeros(len(distinct))
    for m in numbered(few)[0].tolist():
        alike = np.flatnonzero(distinct // len(parts) == m)
        counts = pipeline.moments(job, candidates, m).counts_of(FIRST)
        low[alike] = stage_bytes.sizes_of(parts[distinct[alike] % len(parts)], counts).max((1, 2))
    return low[back]


def _of_microbatches(job: Job, candidates: Candidates, memo: Memo, ranks: Ints) -> tuple[DistinctRows, Ints]:
    """Return the table of the parts of a micro-batch on some ranks of pp, (u, ranks, c), and each candidate's row."""
    whole = pipeline.stages(job, candidates)
    stages = whole.of_ranks(ranks)
    no_loss = len(whole.layers) - 1 not in whole.of_rank[ranks]
    shared = others(candidates, NOT_OF_A_MICROBATCH | ({"loss_chunk_tokens"} if no_loss else set()))
    splits = candidates.kind.splits_backward and not no_loss
    table = memo.table(OF_A_MICROBATCH, "parts of a microbatch", stages.key, splits, shared)
    # The ZeRO stage matters only for whether gradients are accumulated in shards.
    alike = replace(candidates, zero=np.where(states.shares_gradients(job, candidates), 2, 0))

    def compute(new: Candidates) -> dict[str, Floats]:
        of_microbatch = memory.StepMemory(job, new, stages, memo).of_microbatch
        return {"parts": stage_bytes.parts_of_microbatch(of_microbatch, stages)}

    return table, table.rows(alike, compute)


def _while_running(job: Job, candidates: Candidates, memo: Memo, ranks: Ints) -> Floats:
    """Return activations and temporary buffers at the peak of some ranks of pp, (n, ranks). One part depends on the
    micro-batch, and one on the data axes; each is computed once, and a peak is the largest sum at one moment."""
    whole = pipeline.stages(job, candidates)
    stages = whole.of_ranks(ranks)
    no_loss = len(whole.layers) - 1 not in whole.of_rank[ranks]
    of_microbatches, passing = _of_microbatches(job, candidates, memo, ranks)
    whole_loss = not (no_loss or candidates.shared.loss_chunk_tokens)
    sharded = memo.table(OF_STATES, "sharded parts", stages.key, whole_loss, others(candidates, NOT_OF_STATES))
    apart = pools.has_pools(job)

    def parts_sharded(new: Candidates) -> dict[str, Floats]:
        step = memory.StepMemory(job, new, stages)
        return {"parts": stage_bytes.parts_sharded(step.pooled_shards if apart else step.sharded, stages)}

    lasting = sharded.rows(candidates, parts_sharded)
    theirs, own = of_microbatches.values["parts"], sharded.values["parts"]
    few = memory.few_microbatches(job, candidates)
    found = np.zeros((len(candidates), len(ranks)))
    for m in numbered(few)[0].tolist():
        mine = np.flatnonzero(few == m)
        counts = pipeline.moments(job, candidates, m).counts_of(ranks)
        found[mine] = stage_bytes.sizes_of(theirs[passing[mine]] + own[lasting[mine]], counts).max(2)
    return found
