"""Exposed communication of a layer over tp, cp and ep, in seconds: the part that does not overlap with computation."""

from dataclasses import replace
from functools import partial

import numpy as np

from shardwright.cost import ledger
from shardwright.cost.blocks import BlockShape, Region
from shardwright.cost.collectives import (
    CollectiveCost,
    PricedMessage,
    all_gather,
    all_reduce,
    all_to_all,
    all_to_all_by_node,
    named,
    point_to_point,
    reduce_scatter,
)
from shardwright.cost.compression import transit_bytes
from shardwright.cost.formats import FORMATS
from shardwright.cost.job import FULL, Candidates, Floats, Job
from shardwright.cost.ledger import Formulas
from shardwright.cost.passes import Passes, reached_bytes_per_s
from shardwright.cost.speed import CONTEXT, EXPERT, MATMULS, TENSOR
from shardwright.split.sequence import chunks_of_ring_rank

HIDDEN = ", exposed"
"""Ledger suffix of communication that overlaps with computation."""
MERGE_BYTES = 10.0
"""Bytes moved for each element of attention's output at a hop of the ring: the fp32 sum is read and written, a block's
output is read."""


def tensor(passes: Passes, job: Job, candidates: Candidates, block: BlockShape, tokens: Floats) -> None:
    """Add the collectives over tp of each tensor-parallel region: attention, and a feed-forward network or the shared
    experts. Routed experts need none.

    |                         | forward                            | backward                                   |
    | ----------------------- | ---------------------------------- | ------------------------------------------ |
    | without token shards    | all-reduce of the region's result  | all-reduce of its input's gradient         |
    | on token shards         | all-gather in, reduce-scatter out  | all-gather out, reduce-scatter in, and the |
    |                         |                                    | input gathered again where it was not kept |

    Inputs and outputs are tokens x d_model; the inputs of latent attention are its latent vectors, and the key that all
    heads read is gathered once (Korthikanti et al., arXiv 2205.05198, section 4.2.2).
    """
    result = tokens * job.model.d_model * job.element_bytes
    regions = _OverTp(passes, job, candidates)
    for region in block.regions:
        regions.add(MESSAGES_OF_F, result, result_of(region), reduce_scatter, all_reduce)
        regions.add(OF_RESULTS, result * regions.narrowed, f"gradient of the result of {region.name}", all_gather, None)
        for number, features in enumerate((*region.inputs, *region.every_head)):
            what = f"input of {region.name}" + (f" {number + 1}" if number else "")
            of_region = number < len(region.inputs)
            calls = region.readers[number] if of_region and job.stack.tp_by_matrix else 1
            regions.input(tokens * features * job.element_bytes, what, again=of_region, calls=calls)
    squares = tokens * max(4.0, job.element_bytes)
    for name in block.sharded_norms:
        regions.add(MESSAGES_OF_F, squares, f"squares of {name}", all_reduce, all_reduce)
        regions.add(OF_RESULTS, squares, f"gradient of the squares of {name}", all_reduce, all_reduce)
    for row in block.scaled_matrices:
        if row.split == "row":  # the norms of its rows with the adapter and without
            of_rows = np.full(len(candidates), 2 * row.shape[0] * max(4.0, job.element_bytes))
            what = f"squares of the rows of {row.module.replace('.', ' ')}"
            regions.add(MESSAGES_OF_F, of_rows, what, all_reduce, all_reduce)
    regions.price()


def result_of(region: Region) -> str:
    """Return the name of the tensor in the message of a region's result."""
    return f"result of {region.name}"


MESSAGES_OF_F, OF_RESULTS, OF_INPUTS, AGAIN = (
    "messages of F",
    "gradients of results",
    "gradients of inputs",
    "inputs gathered again",
)
"""The messages over tp, grouped by the computation that they may overlap with."""
IN_PIECES = (MESSAGES_OF_F, OF_RESULTS)
"""The messages whose first piece has no matmul to overlap with."""


class _OverTp:
    """The messages of a part of the model over tp, and their exposed seconds.

    In the backward pass the reduction of an input's gradient overlaps with the weight gradients, and the second
    all-gather of the input with the input gradients; the first collective of the backward pass is exposed. A stack that
    splits matmuls and collectives into pieces overlaps all but the first piece: gathers of results' gradients and of
    inputs overlap with the input gradients. If the backward pass is split, the weight gradients come later and hide
    nothing. `has_whole`: there are messages without token shards.
    """

    def __init__(self, passes: Passes, job: Job, candidates: Candidates, *, has_whole: bool = True) -> None:
        self.passes, self.job, self.candidates, self.has_whole = passes, job, candidates, has_whole
        self.terms: dict[str, dict[str, Floats]] = {name: {} for name in (MESSAGES_OF_F, OF_RESULTS, OF_INPUTS, AGAIN)}

    def add(
        self, when: str, n_bytes: Floats, what: str, on_shards: CollectiveCost | None, whole: CollectiveCost | None
    ) -> None:
        """Add a collective for token shards, and one without them."""
        whole = whole if self.has_whole else None
        forward = TENSOR if when == MESSAGES_OF_F else ""
        seconds = over_tp(self.passes, self.job, self.candidates, n_bytes, what, on_shards, whole, forward)
        speed = self.job.stack.speed
        copies = speed.copies_tokens or self.job.stack.tp_by_matrix
        if on_shards is not None and copies and not (speed.hides_tp and when != OF_INPUTS):
            cut = self.candidates.token_shards > 1
            f = Formulas("s", bytes_sent=n_bytes, sent=cut.astype(int), element_rate=reached_bytes_per_s(self.job))
            name = f"copy for {what}, {named(on_shards)}"
            seconds[name] = f(name, 2 * f.bytes_sent * f.sent / f.element_rate, "tokens are not the first dim")
        self.terms[when] |= seconds

    def input(self, n_bytes: Floats, what: str, again: bool = True, narrow: bool = True, calls: int = 1) -> None:
        """Add the input of column-parallel matmuls. `again`: it is not kept as gathered. `narrow`: it is gathered in
        the format of the matmuls. `calls`: number of matmuls, if each gathers it itself."""
        gathered = n_bytes * self.narrowed if narrow else n_bytes
        for number in range(calls):
            read = what + (f" for matrix {number + 1}" if number else "")
            if not (number and self.job.stack.merges_gathers):
                self.add(MESSAGES_OF_F, gathered, read, all_gather, None)
            self.add(OF_INPUTS, n_bytes, f"gradient of the {read}", reduce_scatter, all_reduce)
        if again and not self.job.stack.keeps_gathered:
            self.add(AGAIN, gathered, f"{what}, again", all_gather, None)

    @property
    def narrowed(self) -> float:
        """Return the bytes that a gather of matmul inputs sends, relative to elements of 16 bits."""
        form = FORMATS[self.job.precision]
        return form.gathered_bytes / 2 if self.job.stack.speed.gathers_narrow and form.narrow else 1.0

    def price(self) -> None:
        """Add the exposed seconds to the passes, whose matmuls have been added before."""
        speed, passes = self.job.stack.speed, self.passes
        sums = {
            name: ledger.total(name, those, value=sum(those.values(), np.zeros(len(self.candidates))))
            for name, those in self.terms.items()
        }
        inside = {name: part.get(MATMULS, np.zeros(1)) for name, part in passes.parts.items()}
        exposed = {}
        for names, beside in self._hidden_by().items():
            what, those = " and ".join(names), {name: sums.pop(name) for name in names}
            seconds = those[what] if what in those else ledger.total(what, those)
            in_pieces = sum((those[name] for name in names if name in IN_PIECES), np.zeros(1))
            least = in_pieces / self.candidates.tp if speed.hides_tp else 0.0
            exposed[what + HIDDEN] = hidden(
                seconds, inside[beside], speed.interference, least, what=what, beside=f"{MATMULS}, {beside}"
            )
        exposed |= sums
        in_f = {name: exposed.pop(name) for name in (MESSAGES_OF_F, MESSAGES_OF_F + HIDDEN) if name in exposed}
        passes.add(TENSOR, ledger.total(f"{TENSOR}, F", in_f), ledger.total(f"{TENSOR}, I", exposed))

    def _hidden_by(self) -> dict[tuple[str, ...], str]:
        """Return each group of overlapped messages with the pass whose matmuls it overlaps with. A matmul hides no more
        than its own time. In a backward pass in two parts, no weight gradients overlap with the messages of I."""
        speed, in_two = self.job.stack.speed, self.candidates.kind.splits_backward
        pieces = speed.hides_tp
        beside_i = (OF_RESULTS,) * pieces + (AGAIN,) + (OF_INPUTS,) * (pieces and in_two)
        overlaps: dict[tuple[str, ...], str] = {(MESSAGES_OF_F,): "F"} if pieces else {}
        overlaps[beside_i] = "I"
        if ((pieces and not speed.copies_tokens) or speed.hides_tp_backward) and not in_two:
            overlaps[OF_INPUTS,] = "W"
        return overlaps


def head_over_tp(passes: Passes, job: Job, candidates: Candidates, tokens: Floats) -> None:
    """Add the messages of logits and loss over tp: the input as of any column-parallel matmul, and for each token the
    maximum of the logits, then the sum of exponentials and the target's logit, in fp32 (Shoeybi et al., arXiv
    1909.08053, section 3)."""
    over = _OverTp(passes, job, candidates, has_whole=not job.stack.tp_by_matrix)
    over.input(tokens * job.model.d_model * job.element_bytes, "input", narrow=False)
    if job.stack.shares_logits:
        over.terms[MESSAGES_OF_F] |= loss_sums(passes, job, candidates, tokens, np.ones(len(candidates)))
    else:
        over.add(MESSAGES_OF_F, tokens * job.model.vocab_size * job.element_bytes, "logits", all_gather, all_gather)
    over.price()


def loss_sums(passes: Passes, job: Job, candidates: Candidates, tokens: Floats, chunks: Floats) -> dict[str, Floats]:
    """Return the seconds of the loss's all-reduces over tp, by name: one number for each token, then two."""
    seconds = {}
    for what, n_bytes in (("maxima of logits", 4.0), ("sums of exponentials, targets", 8.0)):
        message = PricedMessage(f"{what}, all-reduce", all_reduce, n_bytes * tokens / chunks, candidates.tp, 1, chunks)
        seconds[message.what] = passes.send(job, message, TENSOR)
    return seconds


def over_tp(
    passes: Passes,
    job: Job,
    candidates: Candidates,
    n_bytes: Floats,
    what: str,
    on_shards: CollectiveCost | None,
    whole: CollectiveCost | None,
    forward: str = "",
) -> dict[str, Floats]:
    """Return the seconds of one collective over tp, whose ranks are consecutive, by its name: `on_shards` with token
    shards, else `whole`; each may be None. `forward`: see `Passes.record`."""
    shards = candidates.sequence_parallel
    seconds: dict[str, Floats] = {}
    for collective, used in ((on_shards, shards), (whole, ~shards)):
        if collective is not None and used.any():
            message = PricedMessage(
                f"{what}, {named(collective)}", collective, n_bytes, candidates.tp, 1, used.astype(int)
            )
            seconds[message.what] = passes.send(job, message, TENSOR, forward)
    return seconds


def hidden(
    message_s: Floats,
    beside_s: Floats,
    interference: Floats | float,
    least_s: Floats | float = 0.0,
    *,
    what: str,
    beside: str,
    windows: Floats | float = 1.0,
    chunks: int = 1,
) -> Floats:
    """Return the time that overlapped communication adds: its exposed part, at least `least_s`, and the slowdown of the
    overlapping computation, as a fraction of the overlapped part. In the ledger `what` names the communication, and the
    argument after it the computation. Where a rank has several `chunks`, the communication of all chunks overlaps with
    `windows` times the computation, and the communication of the last one only with its own part of it."""
    if not message_s.any():
        return np.zeros_like(message_s)
    f = Formulas("s", {"least_s": least_s, "interference": interference})
    f.add({what: message_s, beside: beside_s})
    message, work, least = f[what], f[beside], f.least_s
    if chunks > 1:
        f.add(windows=windows, chunks=chunks)
        least, work = np.maximum(least, (message - work) / f.chunks), f.windows * work
    exposed = np.maximum(message - work, least)
    return f(f"{what}{HIDDEN}", exposed + f.interference * (message - exposed))


def context(passes: Passes, job: Job, candidates: Candidates, tokens: Floats, block: BlockShape) -> None:
    """Add the communication of attention over cp; only keys and values of kv heads are sent.

    |              | forward                         | backward                                                      |
    | ------------ | ------------------------------- | ------------------------------------------------------------- |
    | zigzag, ring | cp - 1 hops of keys and values  | the same, and cp - 1 hops of their gradients in fp32          |
    | allgather    | all-gather of keys and values   | the same, and an all-to-all of their gradients                |
    | ulysses      | two all-to-alls: queries, keys  | the same two                                                  |
    |              | and values; results             |                                                               |

    Hops overlap with attention to the keys that have arrived; a gradient follows its keys one hop behind, so the last
    hop of the gradients is exposed. The output of each hop is merged by its log-sum-exp. The messages of allgather and
    ulysses are exposed. With ulysses and fewer kv heads than ranks every rank gets one head: n ranks, n heads sent.
    With a window a rank gets the window - 1 keys before each of its chunks, from one rank or more, and no others; an
    all-to-all brings them in allgather. If the window is a chunk of the model, these are the keys since its start.
    """
    if np.all(candidates.cp == 1):
        return
    spec, e = job.model, job.element_bytes
    heads, kv_heads = spec.n_heads / candidates.tp, np.maximum(spec.n_kv_heads / candidates.tp, 1)
    value_dim = spec.qk_dim if job.stack.pads_values and spec.latent_attention else spec.head_dim
    key_and_value = tokens * (spec.qk_dim + value_dim)

    def send(what: str, collective: CollectiveCost, n_bytes: Floats, forward: str = "") -> dict[str, Floats]:
        message = PricedMessage(what, collective, n_bytes, candidates.cp, candidates.tp)
        return {what: passes.send(job, message, CONTEXT, forward)}

    if candidates.shared.cp_method == "ulysses":
        received = heads * spec.qk_dim * tokens + np.maximum(kv_heads, candidates.cp) * key_and_value
        sent = [
            send(f"queries, keys and values, all-to-all{back}", all_to_all, received * e, forward)
            | send(f"results, all-to-all{back}", all_to_all, heads * value_dim * tokens * e, forward)
            for back, forward in (("", CONTEXT), (" of gradients", ""))
        ]
        passes.add(
            CONTEXT, *(ledger.total(f"{CONTEXT}, {name}", terms) for name, terms in zip("FI", sent, strict=True))
        )
        return
    kv = kv_heads * key_and_value * _reached(job, candidates, block.window, chunked=block.chunked)
    if candidates.shared.cp_method == "allgather":
        gathered = send("keys and values, all-gather", all_gather, kv * candidates.cp * e, CONTEXT)
        again = send("keys and values again, all-gather", all_gather, kv * candidates.cp * e)
        again |= send("gradients of keys and values, all-to-all", all_to_all, kv * candidates.cp * e)
        if merge_bytes := job.stack.speed.merge_bytes:
            for terms, name, moved in ((gathered, "merging", merge_bytes), (again, "gradients merged", MERGE_BYTES)):
                f = Formulas(
                    "s", cp=candidates.cp, merge_bytes=moved, T=tokens, heads=spec.n_heads, c=spec.head_dim,
                    tp=candidates.tp, element_rate=reached_bytes_per_s(job),
                )  # fmt: skip
                n_bytes = (f.cp - 1) * f.merge_bytes * f.T * f.heads * f.c / f.tp
                terms[name] = f(name, n_bytes / f.element_rate)
        passes.add(CONTEXT, ledger.total(f"{CONTEXT}, F", gathered), ledger.total(f"{CONTEXT}, I", again))
        return
    _ring(passes, job, candidates, tokens, kv)


def states(passes: Passes, job: Job, candidates: Candidates, tokens: Floats) -> None:
    """Add the communication of linear attention over cp (`parallel/linear_attention.py`): all-gathers of the tails of
    the convolution and of the maps of states, in fp32 or wider, and in the backward pass of their gradients. All are
    exposed. Ignored: the composition of the maps, P products of matrices."""
    linear = job.model.linear_attention
    if linear is None or np.all(candidates.cp == 1):
        return
    pieces = chunks_of_ring_rank(candidates.shared.cp_method)
    rows = pieces * candidates.micro_batch * candidates.cp / candidates.tp
    tail = np.minimum(linear.conv_width - 1, tokens / candidates.micro_batch / pieces) * linear.qkv_width
    sizes = {
        "tails of the convolution": rows * tail * job.element_bytes,
        "maps of states": rows * linear.map_numel * max(4.0, job.element_bytes),
    }
    sent = []
    for back, forward in (("", CONTEXT), ("gradients of ", "")):
        seconds = {}
        for what, n_bytes in sizes.items():
            message = PricedMessage(f"{back}{what}, all-gather", all_gather, n_bytes, candidates.cp, candidates.tp)
            seconds[message.what] = passes.send(job, message, CONTEXT, forward)
        sent.append(seconds)
    passes.add(CONTEXT, *(ledger.total(f"{CONTEXT}, {name}", terms) for name, terms in zip("FI", sent, strict=True)))


def _reached(job: Job, candidates: Candidates, window: int, *, chunked: bool) -> Floats:
    """Return the share of the other ranks' keys that a rank needs: all, or the window - 1 before each of its chunks, or
    those since the start of the model's chunk (`_before_in_chunks`)."""
    if not window:
        return np.ones(len(candidates))
    chunks = chunks_of_ring_rank(candidates.shared.cp_method)
    others = job.seq_len * np.maximum(1 - 1 / candidates.cp, 1e-9)
    if chunked:
        degrees = np.unique(candidates.cp)
        most = {int(cp): _before_in_chunks(job.seq_len, int(cp), chunks, window) for cp in degrees}
        return np.minimum(1.0, np.vectorize(most.__getitem__, otypes=[float])(candidates.cp) / others)
    return np.minimum(1.0, chunks * (window - 1) / others)


def _before_in_chunks(seq_len: int, cp: int, n_pieces: int, chunk: int) -> float:
    """Return the most keys of other ranks that a rank needs if a token attends to its chunk of the sequence alone: the
    keys from the start of the chunk to the start of each of its `n_pieces` pieces of the sequence."""
    length, most = seq_len / (n_pieces * cp), 0.0
    for rank in range(cp):
        early, late = rank * length, (2 * cp - 1 - rank) * length
        needed = early % chunk
        if n_pieces == 2:
            start = late - late % chunk
            if start <= early:  # the keys before the late piece include the keys before the early piece
                needed = late % chunk - length
            else:
                needed += late % chunk - max(0.0, early + length - start)
        most = max(most, needed)
    return most


def _ring(passes: Passes, job: Job, candidates: Candidates, tokens: Floats, kv: Floats) -> None:
    """Add the hops round a ring of `kv` elements of keys and values, and of their gradients."""
    spec, hops = job.model, candidates.cp - 1

    def hop(what: str, n_bytes: Floats, forward: str = "") -> Floats:
        message = PricedMessage(what, point_to_point, n_bytes, candidates.cp, candidates.tp, hops, CONTEXT)
        passes.record(message, forward)
        return replace(message, calls=1).seconds(job.cluster)

    keys = hop("keys and values", kv * job.element_bytes, CONTEXT)
    passes.record(replace(passes.messages[-1], what="keys and values again"))
    sums = hop("gradients of keys and values", kv * max(job.element_bytes, 4.0))
    f = Formulas(
        "s", cp=candidates.cp, T=tokens, heads=spec.n_heads, c=spec.head_dim, tp=candidates.tp,
        merge_bytes=MERGE_BYTES, element_rate=reached_bytes_per_s(job), keys_and_values=keys,
        gradients_of_keys_and_values=sums, attention_F=passes.forward["attention"],
        attention_I=passes.backward_input["attention"],
    )  # fmt: skip
    f("merging", f.merge_bytes * f.T * f.heads * f.c / f.tp / f.element_rate)
    exposed = np.maximum(f.keys_and_values - f.attention_F / f.cp, 0)
    forward = f(f"{CONTEXT}, F", (f.cp - 1) * (exposed + f.merging))
    # The first hop has keys and values alone, the last gradients alone, and those between have both.
    ends = np.maximum(f.keys_and_values - f.attention_I / f.cp, 0) + f.gradients_of_keys_and_values
    between = np.maximum(f.keys_and_values + f.gradients_of_keys_and_values - f.attention_I / f.cp, 0)
    hops_s = np.minimum(f.cp - 1, 1) * ends + np.maximum(f.cp - 2, 0) * between
    backward = f(f"{CONTEXT}, I", hops_s + (f.cp - 1) * f.merging)
    passes.add(CONTEXT, forward, backward)


def dispatch(passes: Passes, job: Job, candidates: Candidates, tokens: Floats) -> None:
    """Add dispatch and combine of experts: two all-to-alls forward, two backward, of tokens / tp x top_k x d_model x
    load of the busiest rank. Some stacks send a token to a node once. With `Speed.hides_experts` the messages of a
    micro-batch overlap with the computation of another one: in F with as much as F has, in I with the computation of I
    and W. They do not with full recomputation, or in a pipeline with one stage on a rank, as Megatron-Core requires."""
    spec = job.model
    assert spec.moe is not None
    what = "tokens of experts, all-to-all"
    f = Formulas(
        "B", T=tokens, tp=candidates.tp, top_k=spec.moe.top_k, h=spec.d_model, e=job.element_bytes,
        busiest_load=job.busiest_load(candidates.ep, placed=candidates.shared.place_experts_every > 0),
    )  # fmt: skip
    n_bytes = f("bytes to experts", f.T / f.tp * f.top_k * f.h * f.e * f.busiest_load)
    e_sent = transit_bytes(job, candidates.shared.compress_dispatch)
    by_node = partial(all_to_all_by_node, top_k=spec.moe.top_k)
    collective = by_node if job.stack.speed.copies_by_node else all_to_all
    message = PricedMessage(
        f"{what} back", collective, n_bytes, candidates.ep, np.ones_like(candidates.ep), work=EXPERT
    )
    back = passes.send(job, message, EXPERT, EXPERT)
    passes.record(replace(message, what=f"gradients of {what}", calls=2))
    out_s = passes.send(job, replace(message, what=what, n_bytes=n_bytes * e_sent / job.element_bytes), EXPERT, EXPERT)
    forward, backward = {what: out_s, f"{what} back": back}, {f"{what} back": back, f"gradients of {what}": back}
    ledger.total(f"gradients of {what}", {f"{what} back": back})
    if not (job.stack.speed.hides_experts and candidates.alternates):
        passes.add(EXPERT, ledger.total(f"{EXPERT}, F", forward), ledger.total(f"{EXPERT}, I", backward))
        return
    exposed = []
    for name, sent, inside in (("F", forward, "F"), ("I", backward, "IW")):
        what, others = f"messages of experts, {name}", f"work of another micro-batch, {name}"
        sent_s = ledger.total(what, sent)
        work = {f"{kind}, {one}": seconds for one in inside for kind, seconds in passes.parts[one].items()}
        work_s = ledger.total(others, work)
        left = hidden(sent_s, work_s, job.stack.speed.interference, what=what, beside=others)
        f = Formulas("s", {what: sent_s, what + HIDDEN: left})
        f.add(again=candidates.recompute == FULL)
        exposed.append(f(f"{EXPERT}, {name}", f[what + HIDDEN] + f.again * (f[what] - f[what + HIDDEN])))
    passes.add(EXPERT, *exposed)
