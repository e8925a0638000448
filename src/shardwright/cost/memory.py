"""Memory of each rank of a pipeline, by kind, at the peak of a step or over the whole step.

It is the sum of parameters, gradients and optimizer states (`cost.states`), of the activations of the micro-batches in
flight and of the temporary buffers of the running action (`cost.stage_bytes`): the loss has copies of the logits, of
all tokens or of a chunk, the backward pass of a block its gradients. A peak is the largest sum at one moment, never a
sum of peaks. The optimizer runs when no activations are left.

Shapes: n candidates, S stages, R ranks of pp, v stages of a rank, k moments.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from shardwright.cost import ledger, parameters, pipeline, pools, stage_bytes, states
from shardwright.cost.job import FULL, Candidates, Floats, Ints, Job
from shardwright.cost.ledger import Formulas, plus
from shardwright.cost.memo import Memo, numbered
from shardwright.cost.pipeline import Moments, Stages
from shardwright.cost.pools import Pools
from shardwright.cost.stage_bytes import MicrobatchBytes, ShardedBytes, StageBytes

KINDS = (
    "weights",
    "master",
    "gradients",
    "optimizer",
    "gathered",
    "activations",
    "experts",
    "logits",
    "working",
    "buffers",
    "workspace",
)
"""The kinds of memory. `gathered`: parameters gathered by ZeRO-3; `experts`: rows sent to experts; `working`: temporary
buffers of an action; `buffers`: messages of the pipeline; `workspace`: of libraries."""

_BOTH = ("gradients", "gathered")
"""The kinds that have one part for the whole step and another part for some of its moments."""

MOMENTS = ("forward", "loss", "backward", "optimizer")
"""Moments of a step at which the peak of a rank can be; `MemoryEstimate.moment` has indices into this."""

_WHERE = np.array([0, 1, 2, 2, 2])
"""The index in `MOMENTS` of each of `pipeline.ACTIONS`."""


@dataclass(frozen=True, eq=False)
class MemoryEstimate:
    """Bytes of each rank of pp at its peak.

    `kinds`: for each of `KINDS` an array (n, R). `moment`: (n, R), where in the step the peak is. `fragmentation`:
    (n,), bytes that the allocator reserves beyond these, as a fraction; `of_process`: of all except the workspace.
    `pools`: bytes of the allocator's pools (cost/pools.py), which add up, each (n, R), if they are priced.
    """

    kinds: dict[str, Floats]
    moment: Ints
    fragmentation: Floats
    of_process: bool = False
    pools: dict[str, Floats] = field(default_factory=dict)

    @property
    def rank_bytes(self) -> Floats:
        """Return the sum of all kinds, (n, R); comparable to `torch.cuda.max_memory_allocated` on each rank."""
        return np.sum(list(self.kinds.values()), axis=0)

    @property
    def peak_bytes(self) -> Floats:
        """Return the bytes of the rank with the most, (n,)."""
        return np.max(self.rank_bytes, axis=1)

    @property
    def fullest_rank(self) -> int:
        """Return the rank of the first candidate for which the allocator reserves most."""
        return int((self.rank_bytes + self.lost_bytes)[0].argmax())

    @property
    def other_pools(self) -> Floats:
        """Return by how much the sum of the peaks of the allocator's pools exceeds the peak of live tensors, (n, R)."""
        return np.maximum(sum(self.pools.values(), np.zeros(1)) - self.rank_bytes, 0.0)

    @property
    def lost_bytes(self) -> Floats:
        """Return the bytes that the allocator reserves beyond the tensors, (n, R)."""
        beside = self.other_pools
        of_pools = self.rank_bytes + beside - self.kinds["workspace"] * self.of_process
        return np.asarray(beside + self.fragmentation[:, None] * of_pools)

    @property
    def reserved_bytes(self) -> Floats:
        """Return the reserved bytes, (n,), with the allocator's fragmentation, comparable to
        `torch.cuda.max_memory_reserved`, or on a CPU to the peak resident memory of the process. They have to fit."""
        return np.max(self.rank_bytes + self.lost_bytes, axis=1)


@dataclass(frozen=True, eq=False)
class Curve:
    """Memory of one rank over a step. `labels`, one for each moment: its actions (`3F0`) in order, then "optimizer".
    `kinds`: for each of `KINDS` the bytes at each moment, (k,)."""

    labels: tuple[str, ...]
    kinds: dict[str, Floats]

    @property
    def total_bytes(self) -> Floats:
        """Return the sum of all kinds, (k,)."""
        return np.sum(list(self.kinds.values()), axis=0)


def estimate_memory(job: Job, candidates: Candidates) -> MemoryEstimate:
    """Return the memory of n candidates, whose batches have to be divisible and whose schedule has to be valid."""
    step = StepMemory(job, candidates)
    shape = (len(candidates), candidates.pp)
    kinds = {kind: np.zeros(shape) for kind in KINDS}
    moment = np.zeros(shape, dtype=np.int64)
    few = step.microbatches()
    for m in np.unique(few):
        rows = np.nonzero(few == m)[0]
        at = pipeline.moments(job, candidates, int(m))
        moving, moment[rows] = _fullest(step.of_stage.take(rows), step.stages, at)
        for kind, values in moving.items():
            kinds[kind][rows] = values
    for kind, values in step.states.items():
        kinds[kind] += values
    last = step.at_update()
    update = np.sum(list(last.values()), axis=0) > np.sum(list(kinds.values()), axis=0)
    kinds = {kind: np.where(update, last[kind], kinds[kind]) for kind in KINDS}
    result = MemoryEstimate(kinds, np.where(update, 3, moment), lost_share(job, candidates), job.stack.of_process)
    return replace(result, pools=_pools(step)) if pools.has_pools(job) else result


def _pools(step: "StepMemory") -> dict[str, Floats]:
    """Return the bytes of the allocator's pools, which add up, each (n, R): memory for the whole step, the peak of the
    memory that is allocated and freed, and parameters and gradients that are being sent."""
    few, job, apart, stages = step.microbatches(), step.job, step.pools, step.stages
    always = sum(step.states.values(), np.zeros(1)) + apart.reduced[:, stages.of_rank].sum(2)
    update = step.update_bytes - step.states["gathered"] + step.pooled_shards.reduced[:, stages.of_rank].sum(2)
    moving = np.zeros_like(update)
    for m in np.unique(few):
        rows = np.nonzero(few == m)[0]
        at = pipeline.moments(job, step.candidates, int(m))
        moving[rows] = stage_bytes.sizes_at(step.pooled.take(rows), stages, at).max(2)
    room = pools.room(job, step.candidates, len(stages.layers))
    passing = pools.in_passing(apart.gathered, apart.sent, room, stages)
    return {"pools of the step": always, "pools at once": np.maximum(moving, update), "pools in passing": passing}


def note_fullest(job: Job, candidates: Candidates, memory: MemoryEstimate) -> None:
    """Record the parts of the peak memory of the rank with the most, for a single candidate; `memory`: its memory."""
    rank = memory.fullest_rank
    at_update = MOMENTS[int(memory.moment[0, rank])] == "optimizer"
    with ledger.section(f"Memory of pp rank {rank}" if candidates.pp > 1 else "Memory"):
        step = StepMemory(job, candidates, _of_rank(job, candidates, rank))
        step.params.note(pipeline.stages(job, candidates), rank)
        kept = {kind: n_bytes for kind, n_bytes in step.states.items() if not (at_update and kind == "gathered")}
        if at_update:
            now = {"working": step.update_bytes, "gradients": step.reduced_bytes}
            complete = now["gradients"]
            ledger.note("gradients now", "sum(reduced_of_stages)", complete, "B", reduced_of_stages=complete)
        else:
            few = int(step.microbatches()[0])
            at = pipeline.moments(job, candidates, few)
            now, _ = _fullest(step.of_stage, step.stages, at.of_rank(rank))
        both = [kind for kind in _BOTH if kind in kept and kind in now]
        sums = {kind: ledger.total(kind, {f"{kind} kept": kept[kind], f"{kind} now": now[kind]}, "B") for kind in both}
        kept |= now | sums
        whole = ledger.total("all kinds", kept, "B", "the allocator's peak of live tensors")
        share, terms, all_pools = memory.fragmentation, {"all_kinds": whole}, "all_kinds"
        if memory.of_process:
            terms["workspace"] = kept["workspace"]
            formula = "all_kinds + fragmentation * (all_kinds - workspace)"
        else:
            if pools.has_pools(job):
                terms["other_pools"], all_pools = memory.other_pools[:, rank], "(all_kinds + other_pools)"
                parts = ledger.identified({name: n_bytes[:, rank] for name, n_bytes in memory.pools.items()})
                ledger.note(
                    "other pools", f"max({' + '.join(parts)} - all_kinds, 0)", terms["other_pools"], "B",
                    "of the allocator; cost/pools.py", all_kinds=whole, **parts,
                )  # fmt: skip
            formula = f"(1 + fragmentation) * {all_pools}"
        peak = whole + memory.lost_bytes[:, rank]
        ledger.note("peak", formula, peak, "B", "with what the allocator cannot use", fragmentation=share, **terms)


def lost_share(job: Job, candidates: Candidates) -> Floats:
    """Return the bytes that the allocator reserves beyond the tensors, as a fraction, (n,)."""
    if not job.stack.of_process:
        again = job.stack.again_fragmentation * (candidates.recompute == FULL) * (candidates.pp == 1)
        if (layers := candidates.shared.recompute_layers) is not None:
            again = again * min(1.0, layers * len(pipeline.stages(job, candidates).layers) / job.model.n_layers)
        return np.asarray(job.stack.fragmentation + again, dtype=np.float64)
    kept = np.array(job.stack.holes)[candidates.zero]
    return np.asarray(kept * pools.small_share(job, candidates), dtype=np.float64)


def curve(job: Job, candidates: Candidates, rank: int) -> Curve:
    """Return the memory of rank `rank` of pp at every action of a step, for a single candidate."""
    assert len(candidates) == 1, len(candidates)
    step = StepMemory(job, candidates, _of_rank(job, candidates, rank))
    microbatches = int(candidates.microbatches(job.global_batch)[0])
    actions, *moments = pipeline.every_moment(job, candidates, microbatches, rank)
    by_moment = [_activation_bytes(step.of_stage, step.stages, at.fields) for at in moments]
    which = np.argmax([sum(kinds.values(), np.zeros(1))[0, 0] for kinds in by_moment], axis=0)
    last = step.at_update()
    kinds = {}
    for kind in KINDS:
        always = step.states[kind][0, 0] if kind in step.states else 0.0
        comes = [kinds[kind][0, 0] if kind in kinds else np.zeros(len(actions)) for kinds in by_moment]
        kinds[kind] = np.append(np.choose(which, comes) + always, last[kind][0, 0])
    return Curve((*map(str, actions), "optimizer"), kinds)


class StepMemory:
    """The quantities that are the same at all moments of a step. `stages`: of some ranks; by default of all."""

    def __init__(
        self, job: Job, candidates: Candidates, stages: Stages | None = None, memo: Memo | None = None
    ) -> None:
        self.job, self.candidates, self.memo = job, candidates, memo
        self.stages = stages or pipeline.stages(job, candidates)
        self.params = parameters.tp_rank_parameters(
            job.model,
            self.stages,
            candidates.tp,
            candidates.ep,
            vocabulary_multiple=job.stack.vocabulary_multiple,
            element_bytes=job.element_bytes,
            ends_tp=parameters.vocabulary_shards(job, candidates),
        )

    @cached_property
    def microbatch_bytes(self) -> MicrobatchBytes:
        """Return the bytes of a micro-batch in each stage."""
        return stage_bytes.microbatch_bytes(self.job, self.candidates, self.stages, self.params, self.memo)

    @cached_property
    def sharded(self) -> ShardedBytes:
        """Return the bytes of each stage that exist for a part of the step."""
        return ShardedBytes(*states.stage_state_bytes(self.job, self.candidates, self.stages, self.params))

    @cached_property
    def of_stage(self) -> StageBytes:
        """Return the bytes of a micro-batch and the sharded bytes of each stage."""
        return StageBytes(**vars(self.microbatch_bytes), **vars(self.sharded))

    @cached_property
    def pools(self) -> Pools:
        """Return the bytes that the allocator keeps in separate pools."""
        return pools.stage_pools(self.job, self.candidates, self.stages, self.params, self.sharded.reduced)

    @cached_property
    def pooled_shards(self) -> ShardedBytes:
        """Return the bytes of each stage that exist for a part of the step, without gradients in a separate pool."""
        sharded, apart = self.sharded, self.pools
        return replace(
            sharded,
            accumulating=np.maximum(sharded.accumulating - apart.accumulating, 0.0),
            reduced=np.maximum(sharded.reduced - apart.reduced, 0.0),
        )

    @cached_property
    def pooled(self) -> StageBytes:
        """Return the bytes of a micro-batch and of each stage, without gradients that have a pool of their own."""
        return StageBytes(**vars(self.microbatch_bytes), **vars(self.pooled_shards))

    @cached_property
    def update_bytes(self) -> Floats:
        """Return the temporary buffers of the optimizer, (n, R)."""
        return states.optimizer_step(self.job, self.candidates, self.stages, self.params)

    @cached_property
    def reduced_bytes(self) -> Floats:
        """Return the gradients at the optimizer's step that do not exist for the whole step, (n, R)."""
        result: Floats = self.sharded.reduced[:, self.stages.of_rank].sum(2)
        return result

    @cached_property
    def states(self) -> dict[str, Floats]:
        """Return parameters, gradients, optimizer states and other memory of the whole step, by kind, each (n, R)."""
        return states.rank_state_bytes(self.job, self.candidates, self.stages, self.params)

    def microbatches(self) -> Ints:
        """Return, for each candidate, a number of micro-batches with the same peaks as all of them, (n,)."""
        return few_microbatches(self.job, self.candidates)

    def at_update(self) -> dict[str, Floats]:
        """Return the memory by kind while the optimizer runs: no activations and no gathered parameters."""
        nothing = np.zeros((len(self.candidates), len(self.stages.of_rank)))
        now = {"gathered": nothing, "working": self.update_bytes}
        now["gradients"] = self.states["gradients"] + self.reduced_bytes
        return {**dict.fromkeys(KINDS, nothing), **self.states, **now}


def _of_rank(job: Job, candidates: Candidates, rank: int) -> Stages:
    """Return all stages, and the one rank; R is 1."""
    stages = pipeline.stages(job, candidates)
    return replace(stages, of_rank=stages.of_rank[[rank]])


def few_microbatches(job: Job, candidates: Candidates) -> Ints:
    """Return, for each candidate, a number of micro-batches with the same peaks as all of them, (n,)."""
    distinct, back = numbered(candidates.microbatches(job.global_batch))
    few = [pipeline.representative(candidates.shared.pp_schedule, candidates.pp, int(m)) for m in distinct]
    result: Ints = np.array(few, dtype=np.int64)[back]
    return result


def _fullest(of_stage: StageBytes, stages: Stages, at: Moments) -> tuple[dict[str, Floats], Ints]:
    """Return activations and temporary buffers by kind at each rank's peak, and where in the step it is, (n, R)."""
    which = stage_bytes.sizes_at(of_stage, stages, at).argmax(2)
    rank = np.arange(len(stages.of_rank))[None, :]
    fullest = {name: values[0, rank, which][:, :, None] for name, values in at.fields.items()}
    kinds = _activation_bytes(of_stage, stages, fullest)
    return {name: values[:, :, 0] for name, values in kinds.items()}, _WHERE[fullest["kind"][:, :, 0]]


def _activation_bytes(of_stage: StageBytes, stages: Stages, at: dict[str, Ints]) -> dict[str, Floats]:
    """Return activations and temporary buffers by kind, (n, R, k), at given moments: the fields of `Moments` by name,
    with a first dim for candidates."""
    kind = at["kind"]

    def of_ranks(part: Floats) -> Floats:
        return part[:, stages.of_rank][:, :, None]

    is_loss, is_last, embeds = kind == pipeline.LOSS, kind == pipeline.BACKWARD_LAST, kind == pipeline.EMBEDDING
    backward = is_last | (kind == pipeline.BACKWARD)
    f = Formulas("B", {name: count.astype(np.float64) for name, count in at.items() if name != "kind"})
    f.add(
        kept=of_ranks(of_stage.activations),
        kept_for_W=of_ranks(of_stage.waiting),
        experts_kept=of_ranks(of_stage.experts),
        logits_kept=of_ranks(of_stage.logits),
        logits_for_W=of_ranks(of_stage.waiting_logits),
        loss=of_stage.loss[:, -1:, None] * is_loss,
        logits_of_a_microbatch=of_stage.logits[:, -1:, None] * is_last,
        around_the_last_norm=of_stage.last_norm[:, -1:, None] * is_last,
        gradients_of_stages=of_ranks(of_stage.gradients) * backward[..., None],
        all_of_stages=of_ranks(of_stage.accumulating),
        reduced_of_stages=of_ranks(of_stage.reduced),
        of_embedding=of_stage.embedding[:, :1, None] * embeds,
        gathered_of_stages=np.where(
            is_loss[..., None], of_ranks(of_stage.gathered_for_head), of_ranks(of_stage.gathered) * ~embeds[..., None]
        ),
        working_of_stages=of_ranks(of_stage.working) * backward[..., None],
    )
    waits, running = bool(at["waiting"].any()), ""
    if ledger.recording():
        stage_numbers = ", ".join(map(str, stages.of_rank[0]))
        running = f"{pipeline.ACTIONS[int(kind[0, 0, 0])]} runs; microbatches in flight of stages {stage_numbers}"
    activations, logits = _sum(f.in_flight * f.kept), _sum(f.in_flight * f.logits_kept)
    if waits:
        activations = activations + _sum(f.waiting * f.kept_for_W)
        logits = logits + _sum(f.waiting * f.logits_for_W)
    if is_loss.any():
        logits = logits + f.loss
    if is_last.any():
        logits = logits - f.logits_of_a_microbatch
        if of_stage.last_norm.any():
            activations = activations - f.around_the_last_norm
    gradients = _gradients(f, at, bool(of_stage.accumulating.any()), bool(backward.any()), bool(embeds.any()))
    formulas = {"activations": activations}
    if of_stage.experts.any():
        formulas["experts"] = _sum(f.in_flight * f.experts_kept)
    if of_stage.logits[:, stages.of_rank].any():
        formulas["logits"] = logits
    if gradients:
        formulas["gradients now"] = plus(*gradients)
    if of_stage.gathered.any():
        formulas["gathered now"] = np.max(f.gathered_of_stages, axis=-1)
    if backward.any():
        formulas["working"] = np.max(f.working_of_stages, axis=-1)
    n_bytes = {what.partition(" ")[0]: f(what, formula, running) for what, formula in formulas.items()}
    kinds = ("activations", "experts", "logits", "gradients", "gathered", "working")
    return {name: n_bytes.get(name, np.zeros(kind.shape)) for name in kinds}


def _gradients(f: Formulas, at: dict[str, Ints], accumulate: bool, backward: bool, embedding: bool) -> list[Floats]:
    """Return the terms of gradients that do not exist for the whole step."""
    terms = [_sum(f.accumulating * f.all_of_stages)] * (accumulate and bool(at["accumulating"].any()))
    terms += [_sum(f.reduced * f.reduced_of_stages)] * (accumulate and bool(at["reduced"].any()))
    return terms + [np.max(f.gradients_of_stages, axis=-1)] * backward + [f.of_embedding] * embedding


def _sum(of_stages: Floats) -> Floats:
    """Return the sum over the stages of a rank."""
    total: Floats = np.sum(of_stages, axis=-1)
    return total
