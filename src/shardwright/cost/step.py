"""How long a step takes, and where the time goes."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from shardwright.cost import idle, parameters, pipeline
from shardwright.cost.collectives import all_gather, all_reduce, point_to_point, reduce_scatter
from shardwright.cost.idle import StageTimes, busy
from shardwright.cost.job import Candidates, Floats, Ints, Job
from shardwright.cost.layer import Passes, embedding, head, hidden, layer, reached_bytes_per_s


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step of each candidate, arrays of shape (n,). `parts` add up to `total_s`, in the order in which
    they are shown; each is what its kind of work adds to the step, not how long it takes where it is hidden.

    Work is that of the rank of `pp` that has most of it; "pipeline" is the time in which that rank waits for others.
    """

    parts: dict[str, Floats]

    @property
    def total_s(self) -> Floats:
        """(n,) seconds."""
        return np.asarray(sum(self.parts.values(), np.zeros(())))


def step_time(job: Job, candidates: Candidates, *, simulated: bool = True) -> StepTime:
    """Seconds of a step. With `simulated` the pipeline's schedule is run on paper for each candidate; without, its
    idle time is a lower bound, some hundred times faster to get: no candidate is faster than its bound."""
    of = candidates
    m = of.microbatches(job.global_batch)
    stages = StagePasses(job, of)
    times = stages.times()
    work = busy(of, times, m)
    span = idle.least(of, times, work)
    if simulated:
        span = np.maximum(span, idle.makespans(of, times, m))
    most = work.argmax(axis=1)
    parts = {kind: m * seconds for kind, seconds in stages.of_rank(most).items()}
    parts["pipeline"] = span - np.take_along_axis(work, most[:, None], 1)[:, 0]
    forward, backward = stages.passes_of_rank(most)
    held = rank_parameters(job, of)
    parts["data parallel"] = data_parallel(job, of, held, m, forward, backward)
    parts["optimizer"] = optimizer(job, of, held)
    parts["stragglers"] = stragglers(job, of) * StepTime(parts).total_s
    return StepTime(parts)


class StagePasses:
    """Seconds of the passes of one microbatch in every stage, by kind of work."""

    def __init__(self, job: Job, of: Candidates) -> None:
        self.job, self.of = job, of
        cut = pipeline.stages(job, of)
        self.n_stages = len(cut.layers)
        first, last = np.zeros_like(cut.plain), np.zeros_like(cut.plain)
        first[0], last[-1] = 1, 1
        self.work: list[tuple[Passes, Ints]] = [(embedding(job, of), first), (head(job, of), last)]
        if cut.plain.any():
            self.work.append((layer(job, of, experts=False), cut.plain))
        if cut.mixtures.any():
            self.work.append((layer(job, of, experts=True), cut.mixtures))

    def times(self) -> StageTimes:
        """What the pipeline is simulated with."""
        shape = (len(self.of), self.n_stages)
        f, i, w = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        for passes, count in self.work:
            for into, seconds in zip((f, i, w), passes.totals, strict=True):
                into += seconds[..., None] * count
        if self.of.pp > 1 and self.job.stack.speed.blocking_sends:
            f += self.message[:, None]
            i += self.message[:, None]
        return StageTimes(f, i, w, self.message)

    @cached_property
    def message(self) -> Floats:
        """Seconds of one message between stages, (n,)."""
        job, of, speed = self.job, self.of, self.job.stack.speed
        if of.pp == 1:
            return np.zeros(len(of))
        n_bytes = of.tokens(job.seq_len) * job.model.d_model * job.element_bytes
        cut = of.tp if speed.scatters_messages else of.token_shards
        return point_to_point(job.cluster, n_bytes / cut, of.pp, of.world // of.pp) + speed.message_s

    def of_rank(self, rank: Ints) -> dict[str, Floats]:
        """Seconds of one microbatch on a rank of `pp` of each candidate, by kind: {kind: (n,)}."""
        found: dict[str, Floats] = {}
        for passes, count in self.work:
            share = self._share(count)[rank]
            for part in (passes.forward, passes.backward_input, passes.weight):
                for kind, seconds in part.items():
                    found[kind] = found.get(kind, 0.0) + seconds * share
        if self.job.stack.speed.blocking_sends and self.of.pp > 1:
            n_stages = self._share(np.ones(self.n_stages, dtype=int))[rank]
            found["messages"] = 2 * self.message * n_stages
        return found

    def passes_of_rank(self, rank: Ints) -> tuple[Floats, Floats]:
        """Seconds of one microbatch forward and backward on a rank of each candidate."""
        forward, backward = np.zeros(len(self.of)), np.zeros(len(self.of))
        for passes, count in self.work:
            share = self._share(count)[rank]
            f, i, w = passes.totals
            forward += f * share
            backward += (i + w) * share
        return forward, backward

    def _share(self, count: Ints) -> Floats:
        """(R,): of what every stage has `count`, how much a microbatch meets on each rank, all ways averaged."""
        ways = self.of.shared.ways
        found = np.zeros(self.of.pp)
        for way in ways:
            np.add.at(found, list(way), count / len(ways))
        return found


class RankParameters(NamedTuple):
    """Parameters on the rank of `pp` that has most, each (n,). `ends`: what embedding, last norm and head are of the
    dense ones."""

    dense: Ints
    experts: Ints
    ends: Ints


def data_parallel(job: Job, of: Candidates, held: RankParameters, m: Ints, forward: Floats, backward: Floats) -> Floats:
    """What communication of weights and gradients adds to a step; `forward`, `backward`: seconds of a microbatch's
    passes on the rank.

    | zero | gradients                                                | weights                                    |
    | ---- | -------------------------------------------------------- | ------------------------------------------ |
    | 0    | all-reduced over all copies, once                        |                                            |
    | 1    | reduce-scattered over the shards, once                   | gathered once                              |
    | 2    | reduce-scattered for each microbatch                     | gathered once                              |
    | 3    | as 2                                                     | gathered for each pass, all but embedding  |
    |      |                                                          | and head forward and backward              |

    Shares are then all-reduced over replicas, once. Under a pipeline that gathers once a step, zero 3 is as 1. Experts
    have groups of their own. A stack that overlaps hides messages beside the pass of the microbatch that they belong
    to, but for a layer's share of them, and pays `interference` for what it hides. At the end of a pipeline come the
    sum of a tied matrix over its two stages, and that of both copies of each stage where microbatches go two ways.
    """
    speed, cluster = job.stack.speed, job.cluster
    dense, experts, ends = held
    copies = np.maximum(of.copies * of.tp // of.ep, 1)
    zero = np.zeros(len(of))
    reduce, gather, gather_again, scatter, across = zero, zero, zero, zero, zero
    for count, again, n_copies, shards, stride in (
        (dense, dense - ends, of.copies, of.shards, of.tp),
        (experts, experts, copies, of.expert_shards, of.ep),
    ):
        if not np.any(count):
            continue
        gradients = count * speed.reduce_bytes
        reduce = reduce + all_reduce(cluster, gradients, n_copies, stride)
        gather = gather + all_gather(cluster, count * job.element_bytes, shards, stride)
        gather_again = gather_again + all_gather(cluster, again * job.element_bytes, shards, stride)
        scatter = scatter + reduce_scatter(cluster, gradients, shards, stride)
        across = across + all_reduce(cluster, gradients / shards, n_copies // shards, shards * stride)
    layers = max(job.model.n_layers / of.pp, 1)

    def beside(message_s: Floats, pass_s: Floats) -> Floats:
        if not speed.hides_dp:
            return message_s
        return hidden(message_s, pass_s, speed.interference, message_s / layers)

    once = beside(scatter + across, backward) + beside(gather, forward)
    each = beside(gather + scatter, backward) if of.pp > 1 else beside(gather_again + scatter, backward)
    last = beside(gather_again + scatter + across, backward)
    if of.pp > 1 and of.shared.zero_pp_gather == "step":
        by_microbatch = once
    else:
        by_microbatch = m * beside(gather, forward) + (m - 1) * each + last
    by_zero = [
        beside(reduce, backward),
        once,
        once + (m - 1) * beside(scatter, backward),
        by_microbatch,
    ]
    found = np.select([of.zero == stage for stage in range(4)], by_zero)
    return np.asarray(found) + _twins(job, of, np.asarray(dense + experts, dtype=np.float64))


def _twins(job: Job, of: Candidates, held: Floats) -> Floats:
    """Sums of gradients over two ranks of `pp` that hold the same."""
    if of.pp == 1:
        return np.zeros(len(of))
    spec, stride = job.model, of.world // of.pp
    found = np.zeros(len(of))
    if spec.tied_embedding:
        matrix_bytes = spec.vocab_size * spec.d_model / of.tp * job.stack.speed.reduce_bytes
        found = found + all_reduce(job.cluster, matrix_bytes, 2, (of.pp - 1) * stride)
    if len(of.shared.ways) > 1:
        shares = np.where(of.zero > 0, of.shards, 1)
        found = found + all_reduce(job.cluster, held * job.stack.speed.reduce_bytes / shares, 2, stride)
    return found


def optimizer(job: Job, of: Candidates, held: RankParameters) -> Floats:
    """Seconds of the optimizer, which memory bounds, and of what a step does once.

    For each parameter the rank has a share of, Adam in fp32 reads gradient (4 bytes), master weight (4) and moments (8)
    and writes weight and moments (12) and the working weight (2); the norm of the gradients reads them before (4), and
    they are set to zero after (4): 38. Then come the loss, the norm's all-reduce and the start of the next step.
    """
    stack = job.stack
    dense, experts, _ = held
    changed = np.where(of.zero > 0, dense / of.shards + experts / of.expert_shards, dense + experts)
    return stack.speed.optimizer_bytes * changed / reached_bytes_per_s(job) + stack.speed.step_s


def stragglers(job: Job, of: Candidates) -> Floats:
    """Share by which a step is longer because all wait for the slowest: c log2(world / accelerators of a node).

    c `Calibration.straggler_share`. The largest of n noisy times grows about as the logarithm of n; nodes differ more
    than the accelerators in one. Ignored: failures, and noise of the network, which grows with its load.
    """
    nodes = np.maximum(of.world / job.cluster.node_size, 1)
    return job.calibration.straggler_share * np.log2(nodes)


def rank_parameters(job: Job, of: Candidates) -> RankParameters:
    """Those of each candidate."""
    cut = pipeline.stages(job, of)
    held = parameters.of_ranks(job.model, cut, of.tp, of.ep)
    dense, experts, ends = (part[:, cut.of_rank].sum(axis=2) for part in (held.dense, held.expert, held.ends))
    most = (dense + experts).argmax(axis=1)[:, None]

    def of_that(part: Ints) -> Ints:
        return np.take_along_axis(part, most, 1)[:, 0]

    return RankParameters(of_that(dense), of_that(experts), of_that(ends))
