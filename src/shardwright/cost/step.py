"""The step time and its parts."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from shardwright.cost import idle, ledger, parameters, pipeline
from shardwright.cost.collectives import all_gather, all_reduce, point_to_point
from shardwright.cost.compression import SENT_BYTES, Sums
from shardwright.cost.idle import StageTimes, busy
from shardwright.cost.job import Candidates, Floats, Ints, Job
from shardwright.cost.layer import embedding, head, layer
from shardwright.cost.matrix_updates import matrix_updates
from shardwright.cost.messages import HIDDEN, hidden
from shardwright.cost.passes import Passes, reached_bytes_per_s

PIPELINE = "Pipeline, busiest rank"
"""A section of the ledger."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step of each candidate, arrays of shape (n,). `parts` add up to `total_s`, in the order in which
    they are shown; of communication that overlaps with computation a part is only what it adds to the step.

    Work is that of the rank of `pp` with the most; "pipeline" is the idle time of that rank.
    """

    parts: dict[str, Floats]

    @property
    def total_s(self) -> Floats:
        """(n,) seconds."""
        return np.asarray(sum(self.parts.values(), np.zeros(())))


def step_time(job: Job, candidates: Candidates, *, simulated: bool = True) -> StepTime:
    """Seconds of a step. With `simulated` the pipeline's schedule is simulated for each candidate; otherwise its idle
    time is a lower bound, which is some hundred times faster to compute."""
    m = candidates.microbatches(job.global_batch)
    stages = StagePasses(job, candidates)
    times = stages.times()
    work = busy(candidates, times, m)
    span = idle.least(candidates, times, work)
    if simulated:
        span = np.maximum(span, idle.makespans(candidates, times, m))
    most = work.argmax(axis=1)
    with ledger.section(PIPELINE if candidates.pp > 1 else "Work of a rank"):
        parts = {kind: m * seconds for kind, seconds in stages.of_rank(most).items()}
        mine = np.take_along_axis(work, most[:, None], 1)[:, 0]
        parts["pipeline"] = span - mine
        forward, backward = stages.passes_of_rank(most)
        if ledger.recording():
            stages.note(int(most[0]), m, {kind: seconds for kind, seconds in parts.items() if kind != "pipeline"})
            ledger.total("work", parts | {"pipeline": np.zeros(1)}, value=mine)
            if candidates.pp > 1:
                simulated_with = f"{candidates.shared.pp_schedule} simulated with these times; cost/idle.py"
                ledger.note("makespan", "", span, "s", simulated_with)
                ledger.note("pipeline", "makespan - work", span - mine, "s", "waiting", makespan=span, work=mine)
    held = rank_parameters(job, candidates)
    with ledger.section("Data parallel, rank with most parameters"):
        parts["data parallel"] = data_parallel(job, candidates, held, m, forward, backward)
    with ledger.section("Step"):
        parts["optimizer"] = optimizer(job, candidates, held)
        rest = StepTime(parts).total_s
        share = stragglers(job, candidates)
        ledger.total("all but stragglers", parts, value=rest)
        parts["stragglers"] = ledger.compute(
            "stragglers", "share_of_stragglers * all_but_stragglers", share_of_stragglers=share, all_but_stragglers=rest
        )
        ledger.total("step", parts)
    return StepTime(parts)


class StagePasses:
    """Seconds of the forward and backward passes of one micro-batch in every stage, by kind of work."""

    def __init__(self, job: Job, candidates: Candidates) -> None:
        self.job, self.candidates = job, candidates
        cut = pipeline.stages(job, candidates)
        self.n_stages = len(cut.layers)
        first, last = np.zeros(self.n_stages, dtype=np.int64), np.zeros(self.n_stages, dtype=np.int64)
        first[0], last[-1] = 1, 1 + job.model.mtp_modules
        first[-1] += job.model.mtp_modules
        self.work: list[tuple[Passes, Ints]] = [(embedding(job, candidates), first), (head(job, candidates), last)]
        self.work += [
            (layer(job, alike.candidates, alike.block, alike.name), alike.counts)
            for alike in pipeline.layers_alike(job, candidates)
        ]

    def times(self) -> StageTimes:
        """The times of each stage for the simulation of the pipeline."""
        shape = (len(self.candidates), self.n_stages)
        f, i, w = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        for passes, count in self.work:
            for into, seconds in zip((f, i, w), passes.totals, strict=True):
                into += seconds[..., None] * count
        if self.candidates.pp > 1 and self.job.stack.speed.blocking_sends:
            f += self.message[:, None]
            i += self.message[:, None]
        return StageTimes(f, i, w, self.message)

    @cached_property
    def message(self) -> Floats:
        """Seconds of one message between stages, (n,)."""
        job, candidates, speed = self.job, self.candidates, self.job.stack.speed
        if candidates.pp == 1:
            return np.zeros(len(candidates))
        n_bytes = candidates.tokens(job.seq_len) * job.model.d_model * job.element_bytes
        cut = candidates.tp if speed.scatters_messages else candidates.token_shards
        with ledger.section(PIPELINE):
            sent = point_to_point(job.cluster, n_bytes / cut, candidates.pp, candidates.world // candidates.pp, "sent")
            return ledger.compute("message between stages", "sent + message_s", sent=sent, message_s=speed.message_s)

    def of_rank(self, rank: Ints) -> dict[str, Floats]:
        """Seconds of one micro-batch on a rank of `pp` of each candidate, by kind: {kind: (n,)}."""
        found: dict[str, Floats] = {}
        for passes, count in self.work:
            share = self._share(count)[rank]
            for part in (passes.forward, passes.backward_input, passes.weight):
                for kind, seconds in part.items():
                    found[kind] = found.get(kind, 0.0) + seconds * share
        if self.job.stack.speed.blocking_sends and self.candidates.pp > 1:
            n_stages = self._share(np.ones(self.n_stages, dtype=int))[rank]
            found["messages"] = 2 * self.message * n_stages
        return found

    def passes_of_rank(self, rank: Ints) -> tuple[Floats, Floats]:
        """Seconds of the forward and of the backward pass of one micro-batch on a rank of each candidate."""
        forward, backward = np.zeros(len(self.candidates)), np.zeros(len(self.candidates))
        for passes, count in self.work:
            share = self._share(count)[rank]
            f, i, w = passes.totals
            forward += f * share
            backward += (i + w) * share
        return forward, backward

    def note(self, rank: int, m: Ints, parts: dict[str, Floats]) -> None:
        """Record the work of one candidate's rank of `pp`: `parts` of a step, and its passes of a micro-batch."""
        held = pipeline.stages(self.job, self.candidates)
        mine = held.of_rank[rank].tolist()
        told = ", ".join(f"{stage} with {len(held.layers[stage])}" for stage in mine)
        layers = float(sum(len(held.layers[stage]) for stage in mine))
        every = [len(stage) for stage in held.layers]
        ledger.note("layers of all stages", " + ".join(map(str, every)), sum(every), "layers", "split/stages.py")
        ledger.note("layers of the rank", "", layers, "layers", f"rank {rank} of pp; of its stages {told}")
        there = [(passes, float(self._share(count)[rank])) for passes, count in self.work]
        for kind, seconds in parts.items():
            if kind == "messages":
                stages = len(mine) / len(self.candidates.shared.ways)
                ledger.note(
                    kind, "m * 2 * stages * message_between_stages", seconds, "s", "waits for them", m=m,
                    stages=stages, message_between_stages=self.message,
                )  # fmt: skip
                continue
            terms = {f"{kind} of {passes.of}": (share, passes.of_kind(kind)) for passes, share in there}
            _note_shares(kind, terms, seconds, m)
        for name, seconds in zip(("F", "I and W"), self.passes_of_rank(np.array([rank])), strict=True):
            totals = {passes.of: dict(zip("FIW", passes.totals, strict=True)) for passes, _ in there}
            terms = {
                f"{each} of {passes.of}": (share, totals[passes.of][each])
                for passes, share in there
                for each in name.split(" and ")
            }
            _note_shares(f"{name} of a microbatch", terms, seconds)

    def _share(self, count: Ints) -> Floats:
        """(R,): the sum of `count`, a number for every stage, over the stages of each rank on the route of a
        micro-batch, averaged over the routes."""
        routes = self.candidates.shared.ways
        found = np.zeros(self.candidates.pp)
        for route in routes:
            np.add.at(found, list(route), count / len(routes))
        return found


def _note_shares(
    what: str, terms: dict[str, tuple[float, Floats]], value: Floats, microbatches: Ints | None = None
) -> None:
    """Record a sum of entries, each with its factor; with `microbatches`, multiplied by their number."""
    there = {ledger.identifier(name): each for name, each in terms.items() if each[0] and np.any(each[1])}
    if there:
        formula = " + ".join(f"{times:g} * {name}" for name, (times, _) in there.items())
        inputs: ledger.Inputs = {name: each for name, (_, each) in there.items()}
        if microbatches is not None:
            formula, inputs["m"] = f"m * ({formula})", microbatches
        ledger.note(what, formula, value, **inputs)


class RankParameters(NamedTuple):
    """Parameters on the rank of `pp` with the most, each (n,). `ends`: embedding, last norm and head, and `hidden`:
    hidden matrices, both included in `dense`."""

    dense: Ints
    experts: Ints
    ends: Ints
    hidden: Ints


def data_parallel(
    job: Job, candidates: Candidates, held: RankParameters, m: Ints, forward: Floats, backward: Floats
) -> Floats:
    """Exposed communication of weights and gradients in a step; `forward`, `backward`: seconds of a micro-batch's
    passes on the rank.

    | zero | gradients                                                | weights                                    |
    | ---- | -------------------------------------------------------- | ------------------------------------------ |
    | 0    | all-reduced over all replicas, once                      |                                            |
    | 1    | reduce-scattered over the shards, once                   | gathered once                              |
    | 2    | reduce-scattered for each micro-batch                    | gathered once                              |
    | 3    | as 2                                                     | gathered for each pass, all but embedding  |
    |      |                                                          | and head forward and backward              |

    Shards of gradients are then all-reduced over dp_replicate, once. With a pipeline that gathers once a step, zero 3
    is as 1. Experts have their own process groups. A stack that overlaps communication runs it during the pass of its
    micro-batch; the part of one layer stays exposed, and `interference` slows the pass down. After a pipeline come the
    all-reduce of the gradient of an embedding that two stages hold, and with two routes of micro-batches that of the
    gradients of both replicas of each stage.
    """
    traffic = _Traffic(job, candidates, held, forward, backward)
    found = np.zeros(len(candidates))
    for zero in np.unique(candidates.zero):
        terms = [(times, name, seconds) for times, (name, seconds) in traffic.of_stage(int(zero)) if np.any(seconds)]
        if terms:
            formula = " + ".join(f"{times}{ledger.identifier(name)}" for times, name, _ in terms)
            inputs: ledger.Inputs = {ledger.identifier(name): seconds for _, name, seconds in terms}
            exposed = ledger.compute("weights and gradients", formula, m=m, **inputs)
            found = np.where(candidates.zero == zero, exposed, found)
    replicas = _replicas(job, candidates, np.asarray(held.dense + held.experts, dtype=np.float64))
    return ledger.total("data parallel", {"weights and gradients": found} | replicas)


SUMMED, SCATTERED, ACROSS = "gradients, all-reduce", "gradients, reduce-scatter", "shards over replicas, all-reduce"
GATHERED, GATHERED_AGAIN = "weights, all-gather", "weights of layers, all-gather"


@dataclass(frozen=True)
class _Group:
    """Parameters of a rank that are communicated over the same process groups: `count` of them, of which `again` are in
    layers. Gradients are reduced over `reduce_ranks`, `stride` apart; ZeRO shards over `shards` of these."""

    name: str
    count: Ints
    again: Ints
    reduce_ranks: Ints
    shards: Ints
    stride: Ints


class _Traffic:
    """The data-parallel collectives of a step, by name, and their exposed parts."""

    def __init__(
        self, job: Job, candidates: Candidates, held: RankParameters, forward: Floats, backward: Floats
    ) -> None:
        self.job, self.candidates = job, candidates
        self.passes = {"F of a microbatch": forward, "I and W of a microbatch": backward}
        dense, experts, ends = held.dense, held.experts, held.ends
        dense_ranks = candidates.gradient_ranks
        expert_ranks = np.maximum(dense_ranks * candidates.tp // candidates.ep, 1)
        groups = [
            _Group("dense", dense, dense - ends, dense_ranks, candidates.shards, candidates.tp),
            _Group("experts", experts, experts, expert_ranks, candidates.expert_shards, candidates.ep),
        ]
        self.groups = [group for group in groups if np.any(group.count)]
        self._sent: dict[str, Floats] = {}

    def of_stage(self, zero: int) -> list[tuple[str, tuple[str, Floats]]]:
        """The communication of a step for a ZeRO stage, each with the number of times, such as `m * `."""
        if zero == 0:
            return [("", self.in_backward(SUMMED))]
        gathered = self.exposed((GATHERED,), "F of a microbatch")
        if zero == 3 and not (self.candidates.pp > 1 and self.candidates.shared.zero_pp_gather == "step"):
            each = self.in_backward(GATHERED if self.candidates.pp > 1 else GATHERED_AGAIN, SCATTERED)
            return [("m * ", gathered), ("(m - 1) * ", each), ("", self.in_backward(GATHERED_AGAIN, SCATTERED, ACROSS))]
        once = [("", self.in_backward(SCATTERED, ACROSS)), ("", gathered)]
        return [*once, ("(m - 1) * ", self.in_backward(SCATTERED))] if zero == 2 else once

    def in_backward(self, *whats: str) -> tuple[str, Floats]:
        return self.exposed(whats, "I and W of a microbatch")

    def exposed(self, whats: tuple[str, ...], beside: str) -> tuple[str, Floats]:
        """The name and exposed time of collectives that overlap with a pass of a micro-batch."""
        name, speed = " and ".join(whats), self.job.stack.speed
        message_s = (
            self.sent(name) if len(whats) == 1 else ledger.total(name, {what: self.sent(what) for what in whats})
        )
        if not speed.hides_dp:
            return name, message_s
        of_a_layer = message_s / max(self.job.model.n_layers / self.candidates.pp, 1)
        left = hidden(message_s, self.passes[beside], speed.interference, of_a_layer, what=name, beside=beside)
        return name + HIDDEN, left

    def sent(self, what: str) -> Floats:
        """Seconds of a collective, summed over dense parameters and experts."""
        if what not in self._sent:
            terms = {f"{what}, {each.name}": _message(self.job, self.candidates, what, each) for each in self.groups}
            self._sent[what] = ledger.total(what, terms)
        return self._sent[what]


def _message(job: Job, candidates: Candidates, what: str, group: _Group) -> Floats:
    """Seconds of one collective of a group of parameters."""
    cluster, name = job.cluster, f"{what}, {group.name}"
    sums, gathered = Sums.of(job, candidates.shared), candidates.shared.compress_weights
    e = SENT_BYTES.get(gathered, job.element_bytes)
    match what:
        case "gradients, all-reduce":
            return sums.all_reduce(group.count, group.reduce_ranks, group.stride, name)
        case "gradients, reduce-scatter":
            return sums.reduce_scatter(group.count, group.shards, group.stride, name)
        case "shards over replicas, all-reduce":
            replicas, stride = group.reduce_ranks // group.shards, group.shards * group.stride
            return sums.all_reduce(group.count / group.shards, replicas, stride, name)
        case "weights, all-gather":
            return all_gather(cluster, group.count * e, group.shards, group.stride, name)
        case _:
            return all_gather(cluster, group.again * e, group.shards, group.stride, name)


def _replicas(job: Job, candidates: Candidates, held: Floats) -> dict[str, Floats]:
    """All-reduces of gradients over two ranks of `pp` that hold replicas of parameters, by name."""
    found: dict[str, Floats] = {}
    spec, stride, n_bytes = job.model, candidates.world // candidates.pp, job.stack.speed.reduce_bytes
    if candidates.pp > 1 and (spec.tied_embedding or spec.mtp_modules):
        matrix_bytes = spec.vocab_size * spec.d_model / candidates.tp * n_bytes
        what = "tied matrix of the first and last stage, all-reduce"
        found[what] = all_reduce(job.cluster, matrix_bytes, 2, (candidates.pp - 1) * stride, what)
    if candidates.pp > 1 and len(candidates.shared.ways) > 1:
        shares = np.where(candidates.zero > 0, candidates.shards, 1)
        what = "both copies of a stage, all-reduce"
        found[what] = all_reduce(job.cluster, held * n_bytes / shares, 2, stride, what)
    return found


def optimizer(job: Job, candidates: Candidates, held: RankParameters) -> Floats:
    """Seconds of the optimizer, which is bound by memory bandwidth, and the fixed overhead of a step.

    For each parameter of the rank's shard, Adam in fp32 reads gradient (4 bytes), master weight (4) and moments (8) and
    writes weight and moments (12) and the working weight (2); the gradient norm reads the gradients before (4), and
    they are zeroed after (4): 38. Each optimizer state more or fewer than two adds or saves 8 bytes, and one that is
    stored in bf16 saves 4; of an optimizer that keeps means of matrices none is counted, but what it reads and writes
    more (`OptimizerKind.step_bytes`). The overhead is that of the loss, the norm's all-reduce and the start of the next
    step. Whole matrices: `cost.matrix_updates`. Ignored: the all-reduces of means.
    """
    stack, kind = job.stack, job.optimizer_kind
    n_states = 0 if kind.means is not None else job.n_optimizer_states
    of_states = n_states * 2 * job.state_bytes - 2 * 8 if job.narrow_states else 8 * (n_states - 2)
    shards, expert_shards = (
        np.where(candidates.zero > 0, over, 1) for over in (candidates.shards, candidates.expert_shards)
    )
    parts = [("P", "shards"), ("Q", "expert_shards")][: 1 + bool(np.any(held.experts))]
    changed = " + ".join(f"{count} / {over}" if np.any(candidates.zero > 0) else count for count, over in parts)
    by_element = ledger.compute(
        "optimizer", f"optimizer_bytes * ({changed}) / element_rate + step_s", P=held.dense, Q=held.experts,
        shards=shards, expert_shards=expert_shards, element_rate=reached_bytes_per_s(job), step_s=stack.speed.step_s,
        optimizer_bytes=stack.speed.optimizer_bytes + kind.step_bytes + of_states,
    )  # fmt: skip
    if kind.matrix_state is None:
        return by_element
    matrices = matrix_updates(job, candidates, held.hidden, held.experts)
    return ledger.compute(
        "optimizer of all parameters", "optimizer + updates_of_matrices", optimizer=by_element,
        updates_of_matrices=matrices,
    )  # fmt: skip


def stragglers(job: Job, candidates: Candidates) -> Floats:
    """Relative increase of the step time because all ranks wait for the slowest: c log2(world size / node size).

    c `Calibration.straggler_share`. The maximum of n noisy times grows roughly as the logarithm of n; nodes differ more
    than the accelerators in one node. Ignored: failures, and noise of the network, which grows with its load.
    """
    nodes = np.maximum(candidates.world / job.cluster.node_size, 1)
    return ledger.compute(
        "share of stragglers", "straggler_share * log2(nodes)", "", "all wait for the slowest",
        straggler_share=job.calibration.straggler_share, nodes=nodes,
    )  # fmt: skip


def rank_parameters(job: Job, candidates: Candidates) -> RankParameters:
    """The parameters of each candidate on its rank of `pp` with the most."""
    cut = pipeline.stages(job, candidates)
    held = parameters.of_ranks(job.model, cut, candidates.tp, candidates.ep)
    dense, experts, ends, hidden = (
        part[:, cut.of_rank].sum(axis=2) for part in (held.dense, held.expert, held.ends, held.hidden)
    )
    most = (dense + experts).argmax(axis=1)[:, None]

    with ledger.section("Data parallel, rank with most parameters"):
        held.note(cut, int(most[0, 0]))

    def of_that(part: Ints) -> Ints:
        return np.take_along_axis(part, most, 1)[:, 0]

    return RankParameters(of_that(dense), of_that(experts), of_that(ends), of_that(hidden))
