"""The memory of thousands of layouts at once, for a search: as `cost.memory` has it, with what many share computed
once."""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwright.cost import memory, pipeline
from shardwright.cost.job import Candidates, Floats, Ints, Job
from shardwright.cost.memo import NOT_OF_A_STAGE, NOT_OF_STATES, OF_A_STAGE, OF_STATES, Memo, Table, others


def reserved_bytes(job: Job, candidates: Candidates, most: float = np.inf, memo: Memo | None = None) -> Floats:
    """`memory.of(job, candidates).reserved_bytes`, (n,), in a fraction of the time for many candidates. Of those that
    need more than `most` it may be a lower bound, above `most`. `memo`: of this job.

    Parameters, gradients and optimizer states are computed once for candidates that differ only in micro-batch and
    recomputation. Where they need no more than `most`, activations and temporary buffers follow, once for candidates
    that differ only in their data axes.
    """
    memo = memo or Memo.of(candidates)
    of = (candidates.shared.ways, len(pipeline.stages(job, candidates).layers))
    table = memo.table(OF_STATES, "states", *of, others(candidates, NOT_OF_STATES))
    at = table.rows(candidates, lambda new: _whole_step(job, new))
    share, process = memory.lost_share(job, candidates), job.stack.of_process * table.values["workspace"].max()
    found: Floats = table.values["most"][at] * (1 + share) - share * process
    of_stages = memo.table(OF_A_STAGE, "stages", *of, others(candidates, NOT_OF_A_STAGE))
    first, every = np.zeros(1, dtype=np.int64), np.arange(candidates.pp)
    for ranks in (first, every) if candidates.pp > 1 else (first,):  # the first has most in flight, mostly
        rows = np.nonzero(found <= most)[0]
        if len(rows):
            moving, messages = _while_running(job, candidates.take(rows), of_stages, memo, ranks)
            always, update = (table.values[name][np.ix_(at[rows], ranks)] for name in ("always", "update"))
            whole = np.maximum(always + moving, update) + messages
            found[rows] = np.maximum(found[rows], whole.max(1) * (1 + share[rows]) - share[rows] * process)
    return found


def _whole_step(job: Job, candidates: Candidates) -> dict[str, Floats]:
    """Bytes of each rank, (n, R), without activations, temporary buffers of passes and messages: `always`, and while
    the optimizer runs; the most of both and of all ranks, and of it the workspace, (n,)."""
    held = memory.Step(job, candidates)
    always = sum((n_bytes for kind, n_bytes in held.states.items() if kind != "buffers"), np.zeros(1))
    update = always - held.states["gathered"] + held.update_bytes + held.reduced_bytes
    return {
        "always": always,
        "update": update,
        "most": np.maximum(always, update).max(1),
        "workspace": held.states["workspace"].max(1),
    }


def _while_running(job: Job, candidates: Candidates, table: Table, memo: Memo, ranks: Ints) -> tuple[Floats, Floats]:
    """Activations and temporary buffers at the peak of some ranks of pp, and messages of the pipeline, each (n, ranks);
    `table`: of what stages have."""

    def of_stages(new: Candidates) -> dict[str, Floats]:
        step = memory.Step(job, new, memo=memo)
        return {**vars(step.of_stage), "messages": step.states["buffers"]}

    at = table.rows(candidates, of_stages)
    few = memory.few_microbatches(job, candidates)
    first, back = _numbered(few, at)
    stages = pipeline.stages(job, candidates)
    # Only the stages of these ranks, with the first and the last of all in their places.
    kept = np.unique([0, len(stages.layers) - 1, *stages.of_rank[ranks].ravel()])
    stages = replace(stages, of_rank=np.searchsorted(kept, stages.of_rank[ranks]))
    columns = {name: values[np.ix_(at[first], kept)] for name, values in table.values.items() if name != "messages"}
    of_stage = memory.StageBytes(**columns)
    moving = np.zeros((len(first), len(ranks)))
    distinct, begins = np.unique(few[first], return_index=True)  # in order, so each has a slice of the rows
    for m, begin, end in zip(distinct, begins, [*begins[1:], len(first)], strict=True):
        peaks = pipeline.moments(job, candidates, int(m)).of_ranks(ranks.tolist())
        moving[begin:end] = memory.sizes_at(of_stage.take(slice(begin, end)), stages, peaks).max(2)
    return moving[back], table.values["messages"][np.ix_(at, ranks)]


def _numbered(*columns: NDArray[Any]) -> tuple[Ints, Ints]:
    """Indices of the first occurrences of the distinct rows, (u,), in the order of the first column, and for every row
    the number of its distinct row, (n,)."""
    key = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        key = key * (int(column.max()) + 1) + column
    _, first, back = np.unique(key, return_index=True, return_inverse=True)
    return first, back
