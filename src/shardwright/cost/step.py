"""The step time and its parts.

The cost of one layout in one call.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from shardwright.cost import compression, idle, ledger, memory, pipeline
from shardwright.cost.collectives import point_to_point
from shardwright.cost.data_messages import I_AND_W, F
from shardwright.cost.data_parallel import OverlappedPasses, data_parallel
from shardwright.cost.idle import StageTimes, busy
from shardwright.cost.job import Candidates, Floats, Ints, Job
from shardwright.cost.layer import embedding, head, layer
from shardwright.cost.ledger import Formulas
from shardwright.cost.memo import (
    NOT_OF_A_LAYER,
    NOT_OF_A_PASS,
    NOT_OF_STATES,
    OF_A_PASS,
    OF_STATES,
    Memo,
    others,
    remembers,
)
from shardwright.cost.optimizer_step import PLACEMENT, expert_moves, optimizer_step
from shardwright.cost.parameters import RankParameters
from shardwright.cost.passes import Passes
from shardwright.cost.rank_parameters import rank_parameters
from shardwright.cost.reserved import ROUNDING
from shardwright.cost.speed import DATA
from shardwright.layout.box import DENSE_AXES
from shardwright.layout.keys import KEYS
from shardwright.layout.layout import Layout, accumulation
from shardwright.split.rules import problems
from shardwright.split.stages import schedule_problems
from shardwright.system.errors import LayoutError, collecting

PIPELINE = "pipeline"
"""The part of the step time in which the busiest rank of `pp` waits for other stages."""
BUSIEST = "Pipeline, busiest rank"
"""A section of the ledger."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step of each candidate, arrays of shape (n,). `parts` add up to `total_s`, in the order in which
    they are shown. The part of communication that overlaps with computation is only the time that it adds to the step.

    Work is the work of `busiest`, the rank of `pp` with the most, (n,); "pipeline" is the idle time of that rank.
    """

    parts: dict[str, Floats]
    busiest: Ints

    @property
    def total_s(self) -> Floats:
        """Return the seconds of the step, (n,)."""
        return np.asarray(sum(self.parts.values(), np.zeros(())))


def step_time(job: Job, candidates: Candidates, *, simulated: bool = True, memo: Memo | None = None) -> StepTime:
    """Return the seconds of a step. With `simulated` the pipeline's schedule is simulated for each candidate; otherwise
    its idle time is a lower bound, which is some hundred times faster to compute. `memo`: of this job."""
    m = candidates.microbatches(job.global_batch)
    stages = StagePasses(job, candidates, memo)
    times = stages.times()
    work = busy(candidates, times, m)
    ends = idle.ends(candidates, times, work)
    span = ends.max(axis=1)
    if simulated:
        span = np.maximum(span, idle.makespans(pipeline.stages(job, candidates).built_from, times, m))
    most = work.argmax(axis=1)
    with ledger.section(BUSIEST if candidates.pp > 1 else "Work of a rank"):
        parts = {kind: m * seconds for kind, seconds in stages.of_rank(most).items()}
        most_work = np.take_along_axis(work, most[:, None], 1)[:, 0]
        if ledger.recording():
            stages.note(int(most[0]), m, parts)
            ledger.total("work", parts, value=most_work)
        parts[PIPELINE] = _waiting(job, candidates, span, most_work)
    params = _rank_parameters(job, candidates, memo if remembers(memo, job) else None)
    with ledger.section("Data parallel, rank with most parameters"):
        overlapped = OverlappedPasses.from_schedule(
            job, candidates, m, stages.passes_of_ranks(), span[:, None] - ends, stages.note_passes
        )
        parts[DATA] = data_parallel(job, candidates, params, m, overlapped)
    with ledger.section("Step"):
        parts["optimizer"] = optimizer_step(job, candidates, params)
        if candidates.shared.place_experts_every:
            parts[PLACEMENT] = expert_moves(job, candidates, params)
        rest = StepTime(parts, most).total_s
        share = stragglers(job, candidates)
        ledger.total("all but stragglers", parts, value=rest)
        f = Formulas("s", share_of_stragglers=share, all_but_stragglers=rest)
        parts["stragglers"] = f("stragglers", f.share_of_stragglers * f.all_but_stragglers)
        ledger.total("step", parts)
    return StepTime(parts, most)


def least_time(job: Job, candidates: Candidates, memo: Memo) -> Floats:
    """Return a lower bound on `step_time`, (n,), in a small part of its time: m x (F + I + W of all stages) / pp, with
    the time of stragglers. Ignored: stages that are not equal, idle ranks, data-parallel communication, the optimizer.
    0 if passes depend on the number of micro-batches. `memo`: of this job."""
    if not remembers(memo, job):
        return np.zeros(len(candidates))
    table = memo.table(OF_A_PASS, "all stages", candidates.kind.splits_backward, others(candidates, NOT_OF_A_PASS))
    rows = table.rows(candidates, lambda new: {"work_s": StagePasses(job, new, memo).work_s})
    m, work_s = candidates.microbatches(job.global_batch), table.values["work_s"][rows]
    return (1 - ROUNDING) * (1 + stragglers(job, candidates)) * m * work_s / candidates.pp


def _rank_parameters(job: Job, candidates: Candidates, memo: Memo | None) -> RankParameters:
    """Return the parameters of the rank with the most, from the memo if it has them."""
    if memo is None:
        return rank_parameters(job, candidates)
    stages_key = pipeline.stages(job, candidates).key
    table = memo.table(OF_STATES, "parameters of a rank", stages_key, others(candidates, NOT_OF_STATES))
    rows = table.rows(candidates, lambda new: rank_parameters(job, new)._asdict())
    return RankParameters(**{name: values[rows] for name, values in table.values.items()})


def _waiting(job: Job, candidates: Candidates, makespan: Floats, work: Floats) -> Floats:
    """Return the seconds that the rank with the most work waits for other stages. If ranks share cores, a rank that
    waits leaves its share to the others, which then run as fast as with cores of their own."""
    if candidates.pp == 1:
        return makespan - work
    if ledger.recording():
        simulated_with = f"{candidates.shared.pp_schedule} simulated with these times; cost/idle.py"
        ledger.note("makespan", "", makespan, "s", simulated_with)
    f = Formulas("s", makespan=makespan, work=work, core_share=job.cluster.accelerator.core_share)
    span = f.makespan
    if job.cluster.accelerator.core_share < 1:
        span = np.maximum(f.work, span * f.core_share)
    return f(PIPELINE, span - f.work, "waiting")


class StagePasses:
    """Seconds of the forward and backward passes of one micro-batch in every stage, by kind of work."""

    def __init__(self, job: Job, candidates: Candidates, memo: Memo | None = None) -> None:
        self.job, self.candidates = job, candidates
        self.memo = memo if remembers(memo, job) else None
        cut = pipeline.stages(job, candidates)
        self.n_stages = len(cut.layers)
        first, last = np.zeros(self.n_stages, dtype=np.int64), np.zeros(self.n_stages, dtype=np.int64)
        first[0], last[-1] = 1, 1 + job.model.mtp_modules
        first[-1] += job.model.mtp_modules
        self.work: list[tuple[Passes, Ints]] = [
            (self._part_passes("the embedding", candidates, partial(embedding, job)), first),
            (self._part_passes("the head", candidates, partial(head, job), NOT_OF_A_PASS), last),
        ]
        self.work += [
            (
                self._part_passes(
                    alike.name, alike.candidates, partial(layer, job, block=alike.block, name=alike.name)
                ),
                alike.counts,
            )
            for alike in pipeline.layers_alike(job, candidates, cut)
        ]

    def _part_passes(
        self, part: str, candidates: Candidates, compute: Callable[[Candidates], Passes], but: set[str] = NOT_OF_A_LAYER
    ) -> Passes:
        return compute(candidates) if self.memo is None else self.memo.passes(candidates, part, but, compute)

    def times(self) -> StageTimes:
        """Return the times of each stage for the simulation of the pipeline."""
        shape = (len(self.candidates), self.n_stages)
        f, i, w = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        for passes, count in self.work:
            for into, seconds in zip((f, i, w), passes.totals, strict=True):
                into += seconds[..., None] * count
        if self.candidates.pp > 1 and self.job.stack.speed.blocking_sends:
            f += self.message[:, None]
            i += self.message[:, None]
        return StageTimes(f, i, w, self.message)

    @property
    def work_s(self) -> Floats:
        """Return the seconds of one micro-batch in all stages, (n,), without messages between them."""
        return np.asarray(sum(sum(passes.totals) * count.sum() for passes, count in self.work))

    @cached_property
    def message(self) -> Floats:
        """Return the seconds of one message between stages, (n,)."""
        job, candidates, speed = self.job, self.candidates, self.job.stack.speed
        if candidates.pp == 1:
            return np.zeros(len(candidates))
        e_sent = compression.transit_bytes(job, candidates.shared.compress_pipeline)
        n_bytes = candidates.tokens(job.seq_len) * job.model.d_model * e_sent
        cut = candidates.tp if speed.scatters_messages else candidates.token_shards
        with ledger.section(BUSIEST):
            sent = point_to_point(job.cluster, n_bytes / cut, candidates.pp, candidates.world // candidates.pp, "sent")
            f = Formulas("s", sent=sent, message_s=speed.message_s)
            return f("message between stages", f.sent + f.message_s)

    def of_rank(self, rank: Ints) -> dict[str, Floats]:
        """Return the seconds of one micro-batch on a rank of `pp` of each candidate, by kind: {kind: (n,)}."""
        totals: dict[str, Floats] = {}
        for passes, count in self.work:
            share = self.sum_per_rank(count)[rank]
            for part in (passes.forward, passes.backward_input, passes.weight):
                for kind, seconds in part.items():
                    totals[kind] = totals.get(kind, 0.0) + seconds * share
        if self.job.stack.speed.blocking_sends and self.candidates.pp > 1:
            n_stages = self.sum_per_rank(np.ones(self.n_stages, dtype=int))[rank]
            totals["messages"] = 2 * self.message * n_stages
        return totals

    def passes_of_ranks(self) -> tuple[Floats, Floats]:
        """Return the seconds of the forward and of the backward pass of one micro-batch on each rank, (n, R)."""
        shape = (len(self.candidates), self.candidates.pp)
        forward, backward = np.zeros(shape), np.zeros(shape)
        for passes, count in self.work:
            share = self.sum_per_rank(count)
            f, i, w = (seconds[..., None] for seconds in passes.totals)
            forward += f * share
            backward += (i + w) * share
        return forward, backward

    def note(self, rank: int, m: Ints, parts: dict[str, Floats]) -> None:
        """Record the work of one candidate's rank of `pp`: `parts` of a step, and its passes of a micro-batch."""
        pp_stages = pipeline.stages(self.job, self.candidates)
        own_stages = pp_stages.of_rank[rank].tolist()
        listed = ", ".join(f"{stage} with {len(pp_stages.layers[stage])}" for stage in own_stages)
        layers = float(sum(len(pp_stages.layers[stage]) for stage in own_stages))
        every = [len(stage) for stage in pp_stages.layers]
        ledger.note("layers of all stages", " + ".join(map(str, every)), sum(every), "layers", "split/stages.py")
        ledger.note("layers of the rank", "", layers, "layers", f"rank {rank} of pp; of its stages {listed}")
        shares = [(passes, float(self.sum_per_rank(count)[rank])) for passes, count in self.work]
        for kind, seconds in parts.items():
            if kind == "messages":
                stages = len(own_stages) / len(self.candidates.shared.ways)
                ledger.note(
                    kind, "m * 2 * stages * message_between_stages", seconds, "s", "waits for them", m=m,
                    stages=stages, message_between_stages=self.message,
                )  # fmt: skip
                continue
            terms = {f"{kind} of {passes.part}": (share, passes.kind_s(kind)) for passes, share in shares}
            _note_shares(kind, terms, seconds, m)

    def note_passes(self, rank: int) -> None:
        """Record the passes of a micro-batch on a rank of the one candidate."""
        shares = [(passes, float(self.sum_per_rank(count)[rank])) for passes, count in self.work]
        for name, seconds in zip((F, I_AND_W), self.passes_of_ranks(), strict=True):
            totals = {passes.part: dict(zip("FIW", passes.totals, strict=True)) for passes, _ in shares}
            terms = {
                f"{kind} of {passes.part}": (share, totals[passes.part][kind])
                for passes, share in shares
                for kind in name.removesuffix(" of a microbatch").split(" and ")
            }
            _note_shares(name, terms, seconds[:, rank])

    def sum_per_rank(self, count: Ints) -> Floats:
        """Return (R,): the sum of `count`, a number for every stage, over the stages of each rank on the route of a
        micro-batch, averaged over the routes."""
        routes = self.candidates.shared.ways
        per_rank = np.zeros(self.candidates.pp)
        for route in routes:
            np.add.at(per_rank, list(route), count / len(routes))
        return per_rank


def _note_shares(
    what: str, terms: dict[str, tuple[float, Floats]], value: Floats, microbatches: Ints | None = None
) -> None:
    """Record a sum of entries, each with its factor; with `microbatches`, multiplied by their number."""
    nonzero = ledger.identified({name: term for name, term in terms.items() if term[0] and np.any(term[1])})
    if nonzero:
        formula = " + ".join(f"{times:g} * {name}" for name, (times, _) in nonzero.items())
        inputs: ledger.Inputs = {name: seconds for name, (_, seconds) in nonzero.items()}
        if microbatches is not None:
            formula, inputs["m"] = f"m * ({formula})", microbatches
        ledger.note(what, formula, value, **inputs)


def stragglers(job: Job, candidates: Candidates) -> Floats:
    """Return the relative increase of the step time as all ranks wait for the slowest: c log2(world size / node size).

    c `Calibration.straggler_share`. The maximum of n noisy times grows roughly as the logarithm of n; nodes differ more
    than the accelerators in one node. Ignored: failures, and noise of the network, which grows with its load.
    """
    nodes = np.maximum(candidates.world / job.cluster.node_size, 1)
    f = Formulas("", straggler_share=job.calibration.straggler_share, nodes=nodes)
    return f("share of stragglers", f.straggler_share * np.log2(f.nodes), "all wait for the slowest")


@dataclass(frozen=True)
class Estimate:
    """Memory and step time of one layout for a job, computed on first access; the schedule is simulated."""

    job: Job
    candidates: Candidates

    @cached_property
    def time(self) -> StepTime:
        """Return the step time, as arrays of length 1."""
        return step_time(self.job, self.candidates, simulated=True)

    @cached_property
    def memory(self) -> memory.MemoryEstimate:
        """Return the memory by rank of `pp`, as arrays with one candidate."""
        return memory.estimate_memory(self.job, self.candidates)

    @property
    def step_s(self) -> float:
        """Return the step time in seconds."""
        return float(self.time.total_s[0])

    @property
    def parts_s(self) -> dict[str, float]:
        """Return the parts of the step time, in seconds; they add up to `step_s`."""
        return {kind: float(np.asarray(seconds).reshape(-1)[0]) for kind, seconds in self.time.parts.items()}

    @property
    def peak_bytes(self) -> float:
        """Return the reserved bytes of the rank with the most memory, with the allocator's fragmentation."""
        return float(self.memory.reserved_bytes[0])


def estimate(job: Job, layout: Layout, micro_batch: int = 1, recompute: str | None = None) -> Estimate:
    """Return the cost of a layout. `recompute`, if given, replaces the layout's.

    Raises LayoutError for values that the cost model does not cover, and for every reason why the layout cannot run
    this job: rules of the model, the size of the cluster, the batch, the schedule.
    """
    values = {name: getattr(layout, name) for name in KEYS}
    reasons = [
        f"layout.{name}={value}: there is no price for it, the cost model has no formulas"
        for name, value in values.items()
        if value in KEYS[name].not_priced()
    ]
    if reasons:
        raise LayoutError(*reasons)
    reasons = [
        *problems(job.model, layout, job.seq_len),
        *job.offload_problems(layout.offload_optimizer, layout.offload_parameters, layout.offload_activations),
    ]
    reasons += compression.problems(job, layout)
    if layout.world_size != job.cluster.size:
        degrees = " x ".join(str(layout.degree(axis)) for axis in DENSE_AXES)
        reasons.append(
            f"{' x '.join(DENSE_AXES)} = {degrees} = {layout.world_size} ranks, and {job.cluster.name} has "
            f"{job.cluster.size} accelerators; change the degrees so that they multiply to that"
        )
    with collecting(reasons, LayoutError):
        reasons += schedule_problems(layout, accumulation(job.global_batch, micro_batch, layout.data_ranks))
    if reasons:
        raise LayoutError(*reasons)
    return Estimate(job, Candidates.from_layout(layout, micro_batch, recompute))
