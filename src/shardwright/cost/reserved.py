"""The memory of thousands of layouts at once, for a search. Equal to `cost.memory`; shared parts are computed once.

Parameters and optimizer states depend on the degrees and the ZeRO stage of a layout, and passes on its micro-batch and
recomputation. Their bytes are in two tables, and a layout costs the sum of two rows at each moment of a step.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from shardwright.cost import memory, pipeline, pools, stage_bytes
from shardwright.cost.gradients import embedding_gradient, head_gradient, shares_gradients
from shardwright.cost.job import Candidates, Floats, Ints, Job
from shardwright.cost.memo import (
    NOT_OF_A_MICROBATCH,
    NOT_OF_STATES,
    OF_A_MICROBATCH,
    OF_STATES,
    Memo,
    numbered,
    others,
)
from shardwright.cost.states import messages

FIRST = np.zeros(1, dtype=np.int64)
"""The first rank of pp."""
ROUNDING = 1e-9
"""Relative error of sums in another order, with a margin."""
AT_ONCE = 2**16
"""Sums of two rows that are computed at once. With more, they do not fit in the cache."""


def reserved_bytes(job: Job, candidates: Candidates, most: float = np.inf, memo: Memo | None = None) -> Floats:
    """Return `memory.estimate_memory(job, candidates).reserved_bytes`, (n,), in a fraction of the time for many
    candidates. Above `most` the result may be a lower bound. `memo`: of this job."""
    if not job.stack.keeps_gradients and np.any(candidates.world == 1):
        # A single rank's gradients and pools depend on the micro-batch and on the number of them; it has few layouts.
        return memory.estimate_memory(job, candidates).reserved_bytes
    rows = np.arange(len(candidates))
    return PairedBytes(job, candidates, candidates, memo or Memo.from_candidates(candidates)).reserved(most, rows, rows)


class PairedBytes:
    """The memory of layouts of one group. A layout is a pair of indices: of `states_of`, candidates with its degrees
    and ZeRO stage, and of `passes_of`, candidates with its tp, cp, ep, ZeRO stage, micro-batch, number of micro-batches
    and recomputation. `memo`: of this job."""

    def __init__(self, job: Job, states_of: Candidates, passes_of: Candidates, memo: Memo) -> None:
        self.job, self.states_of, self.passes_of, self.memo = job, states_of, passes_of, memo
        self.stages = pipeline.stages(job, states_of)
        table = memo.table(OF_STATES, "states", self.stages.key, others(states_of, NOT_OF_STATES))
        self.at = table.rows(states_of, lambda new: _whole_step(job, new))
        self.states = table.values
        self.microbatches, self.number = numbered(memory.few_microbatches(job, passes_of))

    def may_need(self, most: float, states: Ints, passes: Ints) -> NDArray[np.bool_]:
        """Return a mask of the layouts, (n,). Left out are layouts whose first rank of pp needs more than `most` bytes
        for states and for the parts of its activations that do not depend on the data axes."""
        job, needed = self.job, np.zeros(len(self.passes_of))
        most *= (1 + ROUNDING) / (1 + (0.0 if job.stack.of_process else job.stack.fragmentation))
        room = np.where(self.states["most"] <= most, most - self.states["always"][:, 0], -np.inf)[self.at]
        parts, rows = self._microbatch_parts(self.passes_of, FIRST)
        for number, m in enumerate(self.microbatches.tolist()):
            places = np.flatnonzero(self.number == number)
            distinct, back = numbered(rows[places])
            counts = pipeline.merged_moments(job, self.passes_of, m).counts_of(FIRST)
            needed[places] = stage_bytes.sizes_of(parts[distinct], counts).max((1, 2))[back]
        result: NDArray[np.bool_] = needed[passes] <= room[states]
        return result

    def reserved(self, most: float, states: Ints, passes: Ints) -> Floats:
        """Return the reserved bytes of the layouts, (n,); above `most` the result may be a lower bound. If states and
        the optimizer's step need at most `most`, the first rank of pp follows, and then other ranks that can need more.
        """
        job, process = self.job, self.job.stack.of_process * self.states["workspace"].max()
        if job.stack.of_process:
            theirs = self.passes_of.take(passes)
            pairs = replace(self.states_of.take(states), micro_batch=theirs.micro_batch, recompute=theirs.recompute)
            share = memory.lost_share(job, pairs)
        else:
            share = memory.lost_share(job, self.passes_of)[passes]
        result: Floats = self.states["most"][self.at[states]] * (1 + share) - share * process
        for first in (True, False):  # the first rank has most in flight, mostly
            left = np.flatnonzero(result <= most)
            ranks = FIRST if first else self._others(passes[left])
            if len(left) and len(ranks):
                peaks = self._peaks(ranks, states[left], passes[left])
                result[left] = np.maximum(result[left], peaks * (1 + share[left]) - share[left] * process)
        return result

    def _others(self, passes: Ints) -> Ints:
        """Return the ranks of pp, except the first, that can need the most memory (`pipeline.leading_ranks`)."""
        every = self.microbatches[numbered(self.number[passes])[0]].tolist()
        leading = [pipeline.leading_ranks(self.job, self.states_of, m) for m in every]
        ranks = np.unique(np.concatenate([FIRST, *leading]))
        return ranks[ranks > 0]

    def _peaks(self, ranks: Ints, states: Ints, passes: Ints) -> Floats:
        """Return the largest peak of live tensors and of pools on some ranks of pp, (n,)."""
        job, peaks = self.job, np.zeros(len(states))
        (distinct, states), (at, passes) = numbered(states), numbered(passes)
        states_of, passes_of = self.states_of.take(distinct), self.passes_of.take(at)
        (parts, rows), (sharded, lasting) = self._microbatch_parts(passes_of, ranks), self._sharded(states_of, ranks)
        always, update = (self.states[name][np.ix_(self.at[distinct], ranks)] for name in ("always", "update"))
        beside = messages(job, passes_of, self.stages.of_ranks(ranks))
        apart = PassingPools(self, ranks, self.at[distinct], passes_of) if pools.has_pools(job) else None
        number = self.number[at][passes]
        for m in numbered(number)[0].tolist():
            pairs = np.flatnonzero(number == m)
            counts = pipeline.merged_moments(job, states_of, int(self.microbatches[m])).counts_of(ranks)
            (own, of_own), (theirs, of_theirs) = numbered(states[pairs]), numbered(passes[pairs])
            of_step = self._step_parts(states_of, passes_of, states[pairs], passes[pairs], counts)
            lasts, passing = (
                np.ascontiguousarray(np.moveaxis(stage_bytes.sizes_of(table, counts), 2, 0))
                for table in (sharded[lasting[own]], parts[rows[theirs]])
            )  # each (k, u, ranks)
            step = max(1, AT_ONCE // lasts[:, 0].size)
            for begin in range(0, len(pairs), step):
                some = slice(begin, begin + step)
                state, one = states[pairs[some]], passes[pairs[some]]
                moving = lasts.take(of_own[some], axis=1)
                moving += passing.take(of_theirs[some], axis=1)
                for moment, of_ranks, n_bytes in of_step:
                    moving[moment] += np.multiply.outer(n_bytes[some], of_ranks)
                whole = np.maximum(always[state] + moving.max(0), update[state]) + beside[one]
                if apart is not None:
                    whole += apart.in_passing(state, one)
                peaks[pairs[some]] = whole.max(1)
        return peaks

    def _step_parts(
        self, states_of: Candidates, passes_of: Candidates, states: Ints, passes: Ints, counts_Rkc: Floats
    ) -> list[tuple[int, Floats, Floats]]:
        """Return the gradients of embedding and head that `_microbatch_parts` leaves out: the number of a moment,
        how often each rank has them then, (R,), and their bytes, (n,). They depend on the degrees of a layout and on
        whether a step has 1, 2 or more micro-batches."""
        job, stages = self.job, self.stages
        counts = np.moveaxis(counts_Rkc[:, :, -len(pipeline.ACTIONS) :], 2, 0)
        if job.stack.keeps_gradients or not counts[pipeline.EMBEDDING].any():
            return []
        shared, splits = others(states_of, NOT_OF_STATES), states_of.kind.splits_backward
        table = self.memo.table(OF_STATES, "gradients of the ends", stages.key, splits, shared)

        def compute(new: Candidates) -> dict[str, Floats]:
            params, by_number = memory.StepMemory(job, new).params, [np.full(len(new), m) for m in (1, 2, 3)]
            return {
                name: np.stack([bytes_of(job, new, stages, params, m) for m in by_number], axis=1)
                for name, bytes_of in (("embedding", embedding_gradient), ("head", head_gradient))
            }

        at = (
            table.rows(states_of, compute)[states],
            (np.minimum(passes_of.microbatches(job.global_batch), 3) - 1)[passes],
        )
        backward = counts[pipeline.BACKWARD] + counts[pipeline.BACKWARD_LAST]
        return [
            (moment, of_ranks[:, moment], n_bytes)
            for name, of_ranks in (("embedding", counts[pipeline.EMBEDDING]), ("head", backward))
            if (n_bytes := table.values[name][at]).any()
            for moment in np.flatnonzero(of_ranks.any(0)).tolist()
        ]

    def _microbatch_parts(self, candidates: Candidates, ranks: Ints) -> tuple[Floats, Ints]:
        """Return a table of the parts of a micro-batch on some ranks of pp, (u, ranks, c), and each candidate's row."""
        job, stages, no_loss = self.job, self.stages.merged.of_ranks(ranks), self._without_loss(ranks)
        shared = others(candidates, NOT_OF_A_MICROBATCH | ({"loss_chunk_tokens"} if no_loss else set()))
        splits = candidates.kind.splits_backward
        table = self.memo.table(OF_A_MICROBATCH, "parts of a microbatch", stages.key, splits, shared)
        # The ZeRO stage matters only for whether gradients are accumulated in shards.
        alike = replace(candidates, zero=np.where(shares_gradients(job, candidates), 2, 0))

        def compute(new: Candidates) -> dict[str, Floats]:
            params = memory.StepMemory(job, new, stages).params
            microbatch_bytes = stage_bytes.microbatch_bytes(job, new, stages, params, self.memo, of_any_step=True)
            return {"parts": stage_bytes.parts_of_microbatch(microbatch_bytes, stages)}

        rows = table.rows(alike, compute)
        return table.values["parts"], rows

    def _sharded(self, candidates: Candidates, ranks: Ints) -> tuple[Floats, Ints]:
        """Return a table of the parts of some ranks of pp that depend on the data axes, (u, ranks, c), and each
        candidate's row."""
        job, stages = self.job, self.stages.merged.of_ranks(ranks)
        whole_loss = not (self._without_loss(ranks) or candidates.shared.loss_chunk_tokens)
        table = self.memo.table(OF_STATES, "sharded parts", stages.key, whole_loss, others(candidates, NOT_OF_STATES))

        def compute(new: Candidates) -> dict[str, Floats]:
            step = memory.StepMemory(job, new, stages)
            of_stage = step.pooled_shards if pools.has_pools(job) else step.sharded
            return {"parts": stage_bytes.parts_sharded(of_stage, stages)}

        rows = table.rows(candidates, compute)
        return table.values["parts"], rows

    def _without_loss(self, ranks: Ints) -> bool:
        return len(self.stages.layers) - 1 not in self.stages.of_rank[ranks]


class PassingPools:
    """Pools of parameters and gradients that are being sent, on some ranks of pp, of pairs of states and passes. `at`:
    the rows of the states."""

    def __init__(self, paired: PairedBytes, ranks: Ints, at: Ints, passes_of: Candidates) -> None:
        numbers = paired.stages.merged.stages_of(ranks)
        self.stages = paired.stages.merged.of_ranks(ranks)
        self.gathered, self.sent = (paired.states[name][:, numbers][at] for name in ("gathered", "sent"))
        self.room = pools.room(paired.job, passes_of, len(paired.stages.layers))[:, numbers]

    def in_passing(self, states: Ints, passes: Ints) -> Floats:
        """Return the bytes of the pools, (n, ranks)."""
        sent = np.moveaxis(self.sent[states], 2, 0)
        return pools.in_passing(self.gathered[states], sent, self.room[passes], self.stages)


def _whole_step(job: Job, candidates: Candidates) -> dict[str, Floats]:
    """Return the bytes of each rank, (n, R), without activations, temporary buffers of passes and messages: `always`,
    and while the optimizer runs; the maximum of both over all ranks, and the workspace in it, (n,). The allocator's
    separate pools are in all of them, except `gathered` and `sent`, which are of stages."""
    step = memory.StepMemory(job, candidates)
    always = sum((n_bytes for kind, n_bytes in step.states.items() if kind != "buffers"), np.zeros(1))
    reduced, apart = step.reduced_bytes, {}
    if pools.has_pools(job):
        apart = {"gathered": step.pools.gathered, "sent": np.moveaxis(step.pools.sent, 0, 2)}
        of_rank = step.stages.of_rank
        always = always + step.pools.reduced[:, of_rank].sum(2)
        reduced = step.pooled_shards.reduced[:, of_rank].sum(2)
    update = always - step.states["gathered"] + step.update_bytes + reduced
    return {
        "always": always,
        "update": update,
        "most": np.maximum(always, update).max(1),
        "workspace": step.states["workspace"].max(1),
        **apart,
    }
