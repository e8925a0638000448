"""Messages of weights and gradients over the ranks with the same parameters, by ZeRO stage."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.blocks import blocks
from shardwright.cost.collectives import PricedMessage, all_gather, all_reduce
from shardwright.cost.compression import SENT_BYTES, GradientSums, waits_for_replicas
from shardwright.cost.formats import FORMATS
from shardwright.cost.job import Candidates, Floats, Ints, Job
from shardwright.cost.parameters import RankParameters
from shardwright.cost.rank_parameters import again_ranks
from shardwright.layout.layout import Layout
from shardwright.split.compression import BUCKET_BYTES, REPLICA_BUCKET_BYTES

F, I_AND_W, AFTER = "F of a microbatch", "I and W of a microbatch", "after the passes"
"""Ledger names of the passes of a rank, and of the time after its last pass."""


SUMMED, SCATTERED, ACROSS = "gradients, all-reduce", "gradients, reduce-scatter", "shards over replicas, all-reduce"
GATHERED, GATHERED_AGAIN = "weights, all-gather", "weights of layers, all-gather"


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters of a rank that are communicated over the same process groups: `count` of them, in `calls` messages.
    `again`: the part of `count` in layers, in `calls_again` messages. `reduced`: the part of `count` with
    gradients, in `calls_reduced` messages. Gradients are reduced over `reduce_ranks`, `stride` apart; ZeRO shards
    over `shards` of these. `calls_over_replicas`: messages in which gradients, or shards of them, are summed over
    replicas. `node_ranks`: ranks of a node (`layout.node_ranks`). `again_ranks`: ranks from which layers are
    gathered for the backward pass."""

    name: str
    count: Ints
    again: Ints
    reduced: Ints
    calls: Ints
    calls_again: Ints
    calls_reduced: Ints
    reduce_ranks: Ints
    shards: Ints
    stride: Ints
    calls_over_replicas: Ints
    node_ranks: Ints | int
    again_ranks: Ints

    @property
    def keeps_parts(self) -> NDArray[np.bool_]:
        """Return whether a rank keeps a part of gathered layers for the backward pass."""
        result: NDArray[np.bool_] = self.again_ranks < self.shards
        return result


def groups(job: Job, candidates: Candidates, params: RankParameters) -> list[ParameterGroup]:
    """Return the parameter groups. Experts are a separate group if ep or tp gives them other ranks."""
    apart = (candidates.ep * candidates.tp > 1) & np.any(params.experts)
    of_experts, filled = params.experts + params.expert_padding, params.layer_padding + params.end_padding
    dense = params.dense - params.untrained - params.compressed + filled + np.where(apart, 0, of_experts)
    experts = np.where(apart, of_experts, 0)
    frozen_experts = params.frozen_experts + params.frozen_expert_padding
    frozen = params.frozen + params.frozen_padding + np.where(apart, 0, frozen_experts)
    reduced, experts_reduced = dense - frozen, np.where(apart, experts - frozen_experts, 0)
    shards_base = candidates.zero == 3
    dense = np.where(shards_base, dense - params.saved - np.where(apart, 0, params.saved_experts), reduced)
    experts = np.where(shards_base, experts - np.where(apart, params.saved_experts, 0), experts_reduced)
    ranks = candidates.gradient_ranks
    expert_ranks = np.maximum(ranks * candidates.tp // candidates.ep, 1)
    whole = ~apart & (candidates.zero == 0) & (job.element_bytes == 4)

    layout = candidates.shared

    def calls(count: Ints, blocks: Ints) -> Ints:
        elements = job.stack.speed.bucket_elements
        if elements:
            least, most = (
                (0, blocks * tensors_of_a_layer(job)) if job.stack.speed.bucket_stated else (1e6 * ranks, count)
            )
            calls_of_all = np.minimum(-(-count // np.maximum(elements, least)), most)
            return np.maximum(calls_of_all, 1).astype(np.int64)
        # FSDP's engine reduces by block, in 16 bits without ZeRO too.
        in_buckets = np.where(params.buckets > 0, params.buckets, -(-count * 4 // BUCKET_BYTES))
        return np.where(whole, in_buckets, blocks)

    def over_replicas(count: Ints, calls: Ints, shards: Ints) -> Ints:
        if layout.compress_gradients == "none":
            return calls
        return np.where(whole, calls, -(-count * 4 // (shards * REPLICA_BUCKET_BYTES)))

    trains_ends = (params.ends > params.frozen_ends) | shards_base
    both, layers = (
        params.blocks + params.end_groups * trains_ends,
        np.maximum(dense - params.ends - params.end_padding, 0),
    )
    dense_calls, expert_calls = calls(dense, both), calls(experts, params.expert_blocks)
    dense_reduced = calls(reduced, params.blocks + params.end_groups * (params.ends > params.frozen_ends))
    expert_reduced = calls(experts_reduced, params.expert_blocks)
    shards = np.where(candidates.zero == 0, 1, candidates.shards)
    expert_shards = np.where(candidates.zero == 0, 1, candidates.expert_shards)
    expert_node_ranks = np.maximum(layout.node_ranks * candidates.tp // candidates.ep, 1)
    all_groups = [
        ParameterGroup("dense", dense, layers, reduced, dense_calls, calls(layers, params.blocks), dense_reduced, ranks,
               candidates.shards, candidates.tp, over_replicas(reduced, dense_reduced, shards), layout.node_ranks,
               again_ranks(job, candidates)),
        ParameterGroup("experts", experts, experts, experts_reduced, expert_calls, expert_calls, expert_reduced,
               expert_ranks, candidates.expert_shards, candidates.ep,
               over_replicas(experts_reduced, expert_reduced, expert_shards), expert_node_ranks,
               again_ranks(job, candidates, experts=True)),
    ]  # fmt: skip
    return [group for group in all_groups if np.any(group.count)]


def tensors_of_a_layer(job: Job) -> int:
    """Return the parameters, as tensors, of the layer with the most."""
    return max(block.tensors for block in blocks(job.model))


def calls_sent(messages: list[PricedMessage]) -> Floats:
    """Return the calls of all messages that more than one rank communicates, (n,)."""
    return sum((np.where(np.asarray(message.size) > 1, message.calls, 0) for message in messages), np.zeros(1))


def over_link(layout: Layout, what: str, group: ParameterGroup) -> tuple[Ints, Floats]:
    """Return the copies between device and host for one of the collectives of a group whose shards are on the host, and
    the total elements, (n,). `layout`: as of `data_messages`."""
    if what == GATHERED_AGAIN:  # parts that a rank keeps are on the device
        return np.where(group.keeps_parts, 0, group.calls_again), np.where(
            group.keeps_parts, 0.0, group.again / group.shards
        )
    copied: NDArray[np.bool_] = np.ones(len(group.count), dtype=bool)
    if what in (SCATTERED, ACROSS):
        across = waits_for_replicas(layout) & (group.reduce_ranks > group.shards)
        copied = across if what == ACROSS else ~across
    count, calls = (group.count, group.calls) if what == GATHERED else (group.reduced, group.calls_reduced)
    return np.where(copied, calls, 0), np.where(copied, count / group.shards, 0.0)


def stage_collectives(job: Job, candidates: Candidates, zero: int) -> list[tuple[str, tuple[str, ...], str]]:
    """Return the collectives of a ZeRO stage in a step: their number, "1" or with m micro-batches "m" or "(m - 1)"; the
    collectives that are sent together; and the pass that they overlap with, or `AFTER` the passes.

    With zero 3 embedding and head are gathered once a micro-batch, and the layers twice; in a pipeline too if
    `zero_pp_gather` is "microbatch", since each backward pass frees the layers that a forward pass or itself has
    gathered. With `Stack.reduces_after_pipelines` forward passes alone free layers. Ignored: there the forward passes
    before the first backward pass gather, too.
    """
    if zero == 0:
        return [("1", (SUMMED,), I_AND_W)]
    after = candidates.pp > 1 and job.stack.reduces_after_pipelines
    each_pass = candidates.shared.zero_pp_gather == "microbatch"
    if zero == 3 and not (candidates.pp > 1 and (after or not each_pass)):
        repeated = (GATHERED_AGAIN,) if job.stack.accumulates_whole else (GATHERED_AGAIN, SCATTERED)
        last = (GATHERED_AGAIN, SCATTERED, ACROSS)
        return [("m", (GATHERED,), F), ("(m - 1)", repeated, I_AND_W), ("1", last, I_AND_W)]
    sums: tuple[str, ...] = (SUMMED,) if zero == 1 and job.stack.sums_whole else (SCATTERED, ACROSS)
    once = [("1", sums, AFTER if after else I_AND_W), ("1", (GATHERED,), F)]
    if zero == 3 and each_pass:
        return [*once, ("m", (GATHERED_AGAIN,), I_AND_W)]
    again = zero == 2 and job.stack.reduces_each_microbatch(candidates.pp)
    return [*once, ("(m - 1)", (SCATTERED,), I_AND_W)] if again else once


def data_messages(job: Job, layout: Layout, what: str, group: ParameterGroup) -> list[PricedMessage]:
    """Return one of the collectives of a step for a group of parameters: messages for each block or bucket. `layout`: a
    layout with the same compression as all candidates."""
    name, sums = f"{what}, {group.name}", GradientSums.from_layout(job, layout, group.node_ranks)
    most = {
        GATHERED: group.calls,
        GATHERED_AGAIN: group.calls_again,
        SCATTERED: group.calls_reduced,
    }.get(what, group.calls_over_replicas)
    count = elements_sent(what, group)
    elements, calls = count / np.maximum(most, 1), np.where(count > 0, np.maximum(most, 1), 0)
    match what:
        case "gradients, all-reduce":
            return sums.all_reduce(name, elements, group.reduce_ranks, group.stride, calls)
        case "gradients, reduce-scatter":
            return sums.reduce_scatter(name, elements, group.shards, group.stride, calls)
        case "shards over replicas, all-reduce":
            replicas, stride = group.reduce_ranks // group.shards, group.shards * group.stride
            return sums.all_reduce(name, elements / group.shards, replicas, stride, calls)
        case _:
            e = np.asarray(SENT_BYTES.get(layout.compress_weights, gathered_bytes(job)))
            if what != GATHERED_AGAIN:
                return [PricedMessage(name, all_gather, elements * e, group.shards, group.stride, calls)]
            e = np.where(group.keeps_parts, job.element_bytes, e)
            return [PricedMessage(name, all_gather, elements * e, group.again_ranks, group.stride, calls)]


def elements_sent(what: str, group: ParameterGroup) -> Ints:
    """Return the elements of a group that one of the collectives of a step sends."""
    return {GATHERED: group.count, GATHERED_AGAIN: group.again}.get(what, group.reduced)


def gathered_bytes(job: Job) -> float:
    """Return the bytes of an element of gathered weights. Ignored: norms, embedding and head are in 16 bits."""
    form = FORMATS[job.precision]
    return form.gathered_bytes if form.narrow and job.stack.speed.gathers_casts else job.element_bytes


def replica_messages(
    job: Job, candidates: Candidates, params: RankParameters, end: Ints | int = 1
) -> list[PricedMessage]:
    """Return the all-reduces, once a step, of partial gradients of parameters on several ranks: ranks of tp, and two
    ranks of `pp`. `end`: 1 if the rank has the first or the last stage, not both."""
    spec, stride, n_bytes = job.model, candidates.world // candidates.pp, job.stack.speed.reduce_bytes
    shares = np.where(candidates.zero > 0, candidates.shards, 1)
    kv_ranks = np.maximum(candidates.tp // spec.n_kv_heads, 1)
    messages = [
        PricedMessage("gradients of norms, all-reduce", all_reduce, params.replicas * n_bytes / shares, candidates.tp,
                1, (params.replicas > 0).astype(np.int64)),
        PricedMessage("gradients of kv heads, all-reduce", all_reduce, params.kv_replicas * n_bytes / shares, kv_ranks,
                1, (params.kv_replicas > 0).astype(np.int64)),
    ]  # fmt: skip
    if candidates.pp > 1 and (spec.tied_embedding or spec.mtp_modules) and spec.lora is None:
        matrix_bytes = spec.vocab_size * spec.d_model / candidates.tp * n_bytes / shares
        what = "tied matrix of the first and last stage, all-reduce"
        messages.append(PricedMessage(what, all_reduce, matrix_bytes, 2, (candidates.pp - 1) * stride, end))
    if candidates.pp > 1 and len(candidates.shared.ways) > 1:
        what, of_each = (
            "both copies of a stage, all-reduce",
            (params.trained_dense + params.trained_experts) * n_bytes / shares,
        )
        messages.append(PricedMessage(what, all_reduce, of_each, 2, stride))
    return [message for message in messages if np.any(np.asarray(message.size * message.calls) > 1)]
