"""The seconds that messages of weights and gradients add to a step, and copies from and to them (FSDP2)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardwright.cost import compression, ledger, pipeline
from shardwright.cost.collectives import PricedMessage
from shardwright.cost.data_messages import (
    AFTER,
    GATHERED,
    GATHERED_AGAIN,
    I_AND_W,
    SCATTERED,
    SUMMED,
    F,
    ParameterGroup,
    calls_sent,
    data_messages,
    elements_sent,
    gathered_bytes,
    groups,
    over_link,
    replica_messages,
    stage_collectives,
    tensors_of_a_layer,
)
from shardwright.cost.job import Candidates, Floats, Ints, Job
from shardwright.cost.ledger import Formulas, plus
from shardwright.cost.messages import HIDDEN, hidden
from shardwright.cost.parameters import RankParameters
from shardwright.cost.passes import reached_bytes_per_s
from shardwright.cost.speed import DATA


@dataclass(frozen=True)
class OverlappedPasses:
    """The times with which messages of weights and gradients overlap on each rank of `pp`, (n, R): seconds of the
    forward and of the backward pass of a micro-batch, and `slack`, the time of the pipeline beyond the rank's own
    passes and the passes before and after them. `forward_windows`, `backward_windows`: passes with which collectives of
    a step overlap, instead of one; `chunks`: stages of a rank (`pipeline.windows`). `note(rank)` records the passes of
    the one candidate."""

    forward: Floats
    backward: Floats
    slack: Floats
    forward_windows: Floats
    backward_windows: Floats
    chunks: int
    note: Callable[[int], None] = lambda rank: None

    @classmethod
    def from_schedule(
        cls,
        job: Job,
        candidates: Candidates,
        m: Ints,
        passes: tuple[Floats, Floats],
        slack: Floats,
        note: Callable[[int], None],
    ) -> "OverlappedPasses":
        """Return the times of `m` micro-batches with these passes. No window has more passes than the step."""
        windows = pipeline.windows(job, candidates)
        weights, gradients = (np.minimum(window, m[:, None]) for window in (windows.weights, windows.gradients))
        return cls(*passes, slack, weights, gradients, windows.stages, note)

    def on(self, rank: int) -> "OverlappedPasses":
        """Return the times of one rank, (n, 1)."""
        return OverlappedPasses(
            self.forward[:, [rank]],
            self.backward[:, [rank]],
            self.slack[:, [rank]],
            self.forward_windows[:, [rank]],
            self.backward_windows[:, [rank]],
            self.chunks,
        )


def data_parallel(
    job: Job, candidates: Candidates, params: RankParameters, m: Ints, overlapped: OverlappedPasses
) -> Floats:
    """Return the exposed communication of weights and gradients in a step, in seconds.

    | zero | gradients                                                | weights                                    |
    | ---- | -------------------------------------------------------- | ------------------------------------------ |
    | 0    | all-reduced over all replicas, once                      |                                            |
    | 1    | reduce-scattered over the shards, once                   | gathered once                              |
    | 2    | reduce-scattered for each micro-batch                    | gathered once                              |
    | 3    | as 2                                                     | gathered for each pass, all but embedding  |
    |      |                                                          | and head forward and backward              |

    Shards of gradients are then all-reduced over dp_replicate, once. With a pipeline that gathers once a step, zero 3
    is as 1, and so is zero 2 of a stack that reduces once a step there (`Stack.reduces_once_in_pipelines`). With
    `layout.zero_secondary_ranks` layers are gathered from these ranks for the backward pass.
    Experts have their own process groups. A stack that overlaps communication runs it during the pass of its
    micro-batch; the part of one layer stays exposed, and `interference` slows the pass down. If a rank has several
    chunks, collectives of a step overlap with the passes after the last micro-batch of the first chunk, or before the
    first micro-batch of the last (`pipeline.windows`); the collectives of the chunk that ends last, or starts first,
    only with its own pass. Communication longer than that uses the rank's slack first: a rank that waits for others
    sends and receives meanwhile. So the step ends with the pipeline, or with the rank whose passes and messages take
    longest. After a pipeline two all-reduces follow: of the gradient of an embedding that is on two stages, and with
    two routes of micro-batches, of the gradients of both replicas of each stage. Gradients that are compressed with
    error feedback are summed after the last backward pass, too (`cost.compression`).
    """
    if ledger.recording():
        with ledger.unrecorded():
            rank = int(_exposed_s(job, candidates, params, m, overlapped)[0].argmax())
        overlapped.note(rank)
        overlapped = overlapped.on(rank)
    max_s = _exposed_s(job, candidates, params, m, overlapped).max(axis=1)
    after = [*replica_messages(job, candidates, params), *compression.messages(candidates, params)]
    slower = job.stack.speed.slowdown(DATA)
    parts = {"weights and gradients": max_s} | {message.what: message.seconds(job.cluster, slower) for message in after}
    if np.any(params.compressed):
        parts |= compression.computed(job, candidates, params)
    return ledger.total(DATA, parts)


def _exposed_s(
    job: Job, candidates: Candidates, params: RankParameters, m: Ints, overlapped: OverlappedPasses
) -> Floats:
    """Return the seconds that overlapping messages add to the step on each rank, (n, R)."""
    traffic = _DataParallelTraffic(job, candidates, params, overlapped)
    result = np.zeros(overlapped.forward.shape)
    for zero in np.unique(candidates.zero):
        sent = [
            (times, exposed)
            for times, whats, passes in stage_collectives(job, candidates, int(zero))
            if np.any((exposed := traffic.exposed(whats, passes, once=times == "1")).seconds)
        ]
        if not sent:
            continue
        f = Formulas("s", m=m[:, None])
        f.add({exposed.name: exposed.seconds for _, exposed in sent})
        copies = list(traffic.copies(int(zero)))
        whole = "weights and gradients" if not copies else "messages of weights and gradients"
        takes_slack = any(exposed.longer for _, exposed in sent)
        what = "messages beside passes" if takes_slack else whole
        seconds = f(what, plus(*(_in_step(f, times, f[exposed.name]) for times, exposed in sent)))
        if takes_slack:
            for _, exposed in sent:
                f.add(exposed.inputs)
            f("messages that no slack takes", plus(*(_in_step(f, times, exposed.anyway(f)) for times, exposed in sent)))
            ledger.note("slack", "", overlapped.slack, "s", f"{candidates.shared.pp_schedule} simulated; cost/idle.py")
            f.add(slack=overlapped.slack)
            longer = np.maximum(f.messages_beside_passes - f.slack, f.messages_that_no_slack_takes)
            seconds = f(whole, longer)
        if copies:
            f.add({name: copied_s[:, None] for _, name, copied_s in copies})
            copied = plus(*(_in_step(f, times, f[name]) for times, name, _ in copies))
            seconds = f("weights and gradients", f.messages_of_weights_and_gradients + copied)
        result = np.where((candidates.zero == zero)[:, None], seconds, result)
    return result


def _in_step(f: Formulas, times: str, seconds: Floats) -> Floats:
    """Return the seconds of collectives that are sent as many times in a step as `stage_collectives` says."""
    return seconds if times == "1" else f.m * seconds if times == "m" else (f.m - 1) * seconds


class ExposedCollective(NamedTuple):
    """Collectives that overlap with a pass: their name, the seconds that they add to it, (n, R), and the formula, with
    its inputs, of the part that no slack takes: the part of one layer and the slowdown of the pass. `longer`: whether
    slack can take anything."""

    name: str
    seconds: Floats
    anyway: Callable[[Formulas], Floats]
    inputs: ledger.Inputs
    longer: bool


class _DataParallelTraffic:
    """The data-parallel collectives of a step, by name, and their exposed parts."""

    def __init__(self, job: Job, candidates: Candidates, params: RankParameters, overlapped: OverlappedPasses) -> None:
        self.job, self.candidates = job, candidates
        self.passes = {F: overlapped.forward, I_AND_W: overlapped.backward}
        self.windows = {F: overlapped.forward_windows, I_AND_W: overlapped.backward_windows}
        self.chunks = overlapped.chunks
        self.groups = groups(job, candidates, params)
        self.params = params
        self._sent: dict[str, Floats] = {}
        self._priced: dict[str, list[PricedMessage]] = {}

    def exposed(self, whats: tuple[str, ...], beside: str, *, once: bool) -> ExposedCollective:
        """Return the exposed time of collectives that overlap with a pass of a micro-batch. Collectives that are sent
        `once` a step overlap with passes of the rank's other chunks, too. Nothing overlaps with collectives `AFTER` the
        passes of a chunk: the next pass waits."""
        name, speed = " and ".join(whats), self.job.stack.speed
        message_s = (
            self.sent(name) if len(whats) == 1 else ledger.total(name, {what: self.sent(what) for what in whats})
        )[:, None]
        pieces = self._pieces(name, whats)
        inputs: ledger.Inputs = {name: message_s}
        hides = speed.hides_dp or (speed.hides_sums and whats == (SUMMED,))
        if beside == AFTER or not hides:
            return ExposedCollective(name, message_s, lambda f: f[name], inputs, longer=False)
        work, of_a_piece = self.passes[beside], message_s / pieces
        windows, chunks = (self.windows[beside], self.chunks) if once else (1.0, 1)
        slows = self._interference(name, whats)
        left = hidden(message_s, work, slows, of_a_piece, what=name, beside=beside, windows=windows, chunks=chunks)
        inputs |= {beside: work, f"pieces of {name}": pieces, f"interference of {name}": slows}
        window = "windows_of_F" if beside == F else "windows_of_I_and_W"
        inputs |= {window: windows} if chunks > 1 else {}

        def anyway(f: Formulas) -> Floats:
            whole = f[window] * f[beside] if chunks > 1 else f[beside]
            piece = f[name] / f[f"pieces of {name}"]
            return piece + f[f"interference of {name}"] * np.minimum(f[name] - piece, whole)

        return ExposedCollective(
            name + HIDDEN,
            left,
            anyway,
            inputs,
            longer=self.candidates.pp > 1 and bool(np.any(message_s - work > of_a_piece)),
        )

    def _interference(self, name: str, whats: tuple[str, ...]) -> Floats | float:
        """Return the slowdown of a pass as a share of the time of its messages. NCCL opens as many channels, each on a
        multiprocessor, as the slowest link feeds (NVIDIA/nccl, src/graph/search.cc). So messages on a slower network
        than the accelerator's usual one slow a pass only for the time that they would take on the usual one."""
        share, own = self.job.stack.speed.interference, self.job.cluster
        if (usual := own.on_usual_network()) is own:
            f = Formulas("", interference=share)
            return f(f"interference of {name}", f.interference)
        messages = [message for what in whats for message in self._messages(what)]
        with ledger.unrecorded():
            usual_s, own_s = (
                sum((message.seconds(cluster) for message in messages), np.zeros(1)) for cluster in (usual, own)
            )
        f = Formulas("", interference=share, usual_s=usual_s, own_s=np.maximum(own_s, 1e-12))
        return f(f"interference of {name}", f.interference * f.usual_s / f.own_s)[:, None]

    def _pieces(self, name: str, whats: tuple[str, ...]) -> Floats:
        """Return the number of pieces in which collectives are sent: layers, or messages if they are fewer, (n, 1). One
        piece has no pass to overlap with."""
        f = Formulas(
            "", layers=np.full((len(self.candidates), 1), max(self.job.model.n_layers / self.candidates.pp, 1))
        )
        if not self.job.stack.speed.bucket_elements:
            return f(f"pieces of {name}", f.layers)
        calls = [calls_sent(self._messages(what)) + np.zeros(len(self.candidates)) for what in whats]
        f.add(sent_calls=np.maximum(np.max(calls, axis=0), 1)[:, None])
        return f(f"pieces of {name}", np.minimum(f.layers, f.sent_calls))

    def _messages(self, what: str) -> list[PricedMessage]:
        if what not in self._priced:
            job, layout = self.job, self.candidates.shared
            self._priced[what] = [sent for group in self.groups for sent in data_messages(job, layout, what, group)]
        return self._priced[what]

    def copies(self, zero: int) -> Iterator[tuple[str, str, Floats]]:
        """Yield the copies of parameters and gradients from and to the messages of a ZeRO stage: their number in a
        step, as `stage_collectives` says, their name and their seconds. A gather is read and written once more; a
        reduction is read in the type of the gradients and written in its own (`Speed.copies_parameters`)."""
        if not self.job.stack.speed.copies_parameters or zero == 0:
            return
        e, gathered, reduced = self.job.element_bytes, gathered_bytes(self.job), self.job.stack.speed.reduce_bytes
        for times, whats, _ in stage_collectives(self.job, self.candidates, zero):
            for what in whats:
                n_bytes = {GATHERED: 2 * gathered, GATHERED_AGAIN: 2 * gathered, SCATTERED: e + reduced}.get(what)
                if n_bytes is None:
                    continue
                sharded = (np.where(group.shards > 1, elements_sent(what, group), 0) for group in self.groups)
                elements = sum(sharded, np.zeros(len(self.candidates)))
                if np.any(elements):
                    f = Formulas("s", sent_elements=elements, copied_bytes=n_bytes)
                    f.add(element_rate=reached_bytes_per_s(self.job))
                    seconds = f.sent_elements * f.copied_bytes / f.element_rate
                    yield times, f"{what}, copies", f(f"{what}, copies", seconds, "FSDP2, foreach_all_gather_copy_out")

    def sent(self, what: str) -> Floats:
        """Return the seconds of a collective, summed over dense parameters and experts."""
        if what not in self._sent:
            messages = self._messages(what)
            slower = self.job.stack.speed.slowdown(DATA)
            terms = {message.what: message.seconds(self.job.cluster, slower) for message in messages}
            if bucket_s := self.job.stack.speed.bucket_s:
                host = f"host for {what}"
                f = Formulas("s", in_step=slower, calls=calls_sent(messages), bucket_s=bucket_s)
                terms[host] = f(host, f.in_step * f.calls * f.bucket_s)
            if (part_s := self.job.stack.speed.part_s) and what == GATHERED:
                of_all = np.where(self.candidates.shards > 1, self.candidates.shards, 0)
                parts = of_all * (self.params.blocks * tensors_of_a_layer(self.job) + self.params.end_groups)
                f = Formulas("s", parts_of_tensors=parts, part_s=part_s)
                terms["parts to their places"] = f("parts to their places", f.parts_of_tensors * f.part_s)
            if self.candidates.shared.offload_parameters == "cpu" and what != SUMMED:
                terms |= {f"{what}, {group.name}, host": self._over_link(what, group) for group in self.groups}
            self._sent[what] = ledger.total(what, terms)
        return self._sent[what]

    def _over_link(self, what: str, group: ParameterGroup) -> Floats:
        """Return the seconds of copies of fp32 shards from the host before a gather, or to it after a reduction."""
        f = Formulas(
            "s", elements=over_link(self.candidates.shared, what, group)[1],
            host_rate=self.job.cluster.accelerator.host_bytes_per_s,
        )  # fmt: skip
        return f(f"{what}, {group.name}, host", 4 * f.elements / f.host_rate, "FSDP2 copies shards in fp32")
