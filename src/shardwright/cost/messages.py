"""Exposed communication of a layer over tp, cp and ep, in seconds: the part that does not overlap with computation."""

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import ArrayLike

from shardwright.cost import ledger
from shardwright.cost.blocks import Block
from shardwright.cost.collectives import all_gather, all_reduce, all_to_all, point_to_point, reduce_scatter
from shardwright.cost.hardware import Cluster
from shardwright.cost.job import Candidates, Floats, Job
from shardwright.cost.passes import CONTEXT, EXPERT, MATMULS, TENSOR, Passes, reached_bytes_per_s

Collective = Callable[[Cluster, ArrayLike, ArrayLike, ArrayLike, str], Floats]
HIDDEN = ", exposed"
"""Suffix in the ledger of communication that overlaps with computation."""
MERGE_BYTES = 10.0
"""Bytes moved for each element of attention's output at a hop of the ring: the fp32 sum read and written, a block's
output read."""


def tensor(passes: Passes, job: Job, candidates: Candidates, block: Block, tokens: Floats) -> None:
    """Collectives over tp of each tensor-parallel region: attention, and a feed-forward network or the shared experts.
    Routed experts need none.

    |                         | forward                            | backward                                   |
    | ----------------------- | ---------------------------------- | ------------------------------------------ |
    | without token shards    | all-reduce of the region's result  | all-reduce of its input's gradient         |
    | on token shards         | all-gather in, reduce-scatter out  | all-gather out, reduce-scatter in, and the |
    |                         |                                    | input gathered again where it was not kept |

    Inputs and outputs are tokens x d_model; the input of latent attention is its latent vectors (Korthikanti et al.,
    arXiv 2205.05198, section 4.2.2). In the backward pass the reduction of the input's gradient overlaps with the
    weight gradients, and the second all-gather of the input with the input gradients; the first collective of the
    backward pass is exposed. A stack that splits matmuls and collectives into pieces overlaps all but the first piece.
    """
    speed = job.stack.speed
    result = tokens * job.model.d_model * job.element_bytes
    zero = np.zeros(len(candidates))
    forward, first, sums, again = zero, zero, zero, zero
    terms: list[dict[str, Floats]] = [{}, {}, {}, {}]
    for region in block.regions:
        given, name = tokens * region.given * job.element_bytes, region.name
        out = over_tp(job, candidates, result, f"result of {name}", reduce_scatter, all_reduce)
        back = over_tp(job, candidates, result, f"gradient of the result of {name}", all_gather, None)
        # The previous region may have gathered the input already.
        read = over_tp(job, candidates, given, f"input of {name}", all_gather, None) if region.given else {}
        summed = (
            over_tp(job, candidates, given, f"gradient of the input of {name}", reduce_scatter, all_reduce)
            if region.given
            else {}
        )
        once_more = {} if job.stack.keeps_gathered else read
        forward, first = forward + _sum(read | out), first + _sum(back)
        sums, again = sums + _sum(summed), again + _sum(once_more)
        terms = [sent | more for sent, more in zip(terms, (read | out, back, summed, once_more), strict=True)]
    names = ("messages of F", "gradients of results", "gradients of inputs", "inputs gathered again")
    for name, those, seconds in zip(names, terms, (forward, first, sums, again), strict=True):
        ledger.total(name, those, value=seconds)
    beside = [part[MATMULS] for part in (passes.forward, passes.backward_input, passes.weight)]
    if speed.hides_tp:
        forward, first = (
            hidden(seconds, beside[0], speed.interference, seconds / candidates.tp, what=name, beside=f"{MATMULS}, F")
            for name, seconds in zip(names, (forward, first), strict=False)
        )
    if speed.hides_tp or speed.hides_tp_backward:
        sums = hidden(sums, beside[2], speed.interference, what=names[2], beside=f"{MATMULS}, W")
    again = hidden(again, beside[1], speed.interference, what=names[3], beside=f"{MATMULS}, I")
    exposed = [name + HIDDEN for name in names]
    if not speed.hides_tp:
        exposed[:2] = names[:2]
        exposed[2] = names[2] + HIDDEN * speed.hides_tp_backward
    ledger.total(f"{TENSOR}, F", {exposed[0]: forward})
    backward = dict(zip(exposed[1:], (first, sums, again), strict=True))
    passes.add(TENSOR, forward, ledger.total(f"{TENSOR}, I", backward))


def _sum(terms: Mapping[str, Floats]) -> Floats:
    return sum(terms.values(), np.asarray(0.0))


def over_tp(
    job: Job, candidates: Candidates, n_bytes: Floats, what: str, on_shards: Collective, whole: Collective | None
) -> dict[str, Floats]:
    """Seconds of one collective over tp, whose ranks are consecutive, by its name: `on_shards` with token shards, else
    `whole`, which may be none."""

    def seconds(collective: Collective | None) -> Floats:
        if collective is None:
            return np.zeros(len(candidates))
        return collective(job.cluster, n_bytes, candidates.tp, 1, f"{what}, {named(collective)}")

    shards = candidates.sequence_parallel
    used = whole if whole is not None and not shards.any() else on_shards
    if shards.all() or not shards.any():
        found = seconds(on_shards if shards.all() else whole)
    else:
        found = np.where(shards, seconds(on_shards), seconds(whole))
    return {f"{what}, {named(used)}": found}


def named(collective: Collective) -> str:
    """`all-gather`."""
    return collective.__name__.replace("_", "-")


def hidden(
    message_s: Floats, beside_s: Floats, interference: float, least_s: Floats | float = 0.0, *, what: str, beside: str
) -> Floats:
    """The time that overlapped communication adds: its exposed part, at least `least_s`, and the slowdown of the
    computation that it overlaps with, a fraction of the rest. In the ledger `what` names the communication, and
    `beside` the computation."""
    if not message_s.any():
        return np.zeros_like(message_s)
    message, work = ledger.identifier(what), ledger.identifier(beside)
    return ledger.compute(
        f"{what}{HIDDEN}", f"max({message} - {work}, least_s) + interference * min({message}, {work})",
        least_s=least_s, interference=interference, **{message: message_s, work: beside_s},
    )  # fmt: skip


def context(passes: Passes, job: Job, candidates: Candidates, tokens: Floats) -> None:
    """Communication of attention over cp.

    zigzag, ring: keys and values are sent round the ring, overlapped with attention; in the backward pass also their
    gradients in fp32, whose last hop is exposed. The output of each hop is merged by its log-sum-exp. allgather: keys
    and values are all-gathered before attention, their gradients reduce-scattered after it. ulysses: all-to-alls
    reshard queries, keys, values and outputs from tokens to heads. The last two are exposed.
    """
    if np.all(candidates.cp == 1):
        return
    spec, e = job.model, job.element_bytes
    # Elements of keys and values of a rank's tokens.
    kv = tokens * np.maximum(spec.n_kv_heads / candidates.tp, 1) * (spec.qk_dim + spec.head_dim)

    def message(collective: Collective, n_bytes: Floats, what: str) -> dict[str, Floats]:
        return {what: collective(job.cluster, n_bytes, candidates.cp, candidates.tp, what)}

    if candidates.shared.cp_method == "ulysses":
        queries = tokens * spec.n_heads / candidates.tp * (spec.qk_dim + spec.head_dim)
        sent = message(all_to_all, (kv + queries) * e, "queries, keys, values and results, all-to-all")
        passes.add(CONTEXT, ledger.total(f"{CONTEXT}, F", sent), ledger.total(f"{CONTEXT}, I", sent))
        return
    if candidates.shared.cp_method == "allgather":
        gathered = message(all_gather, kv * candidates.cp * e, "keys and values, all-gather")
        scattered = message(reduce_scatter, kv * candidates.cp * 4.0, "gradients of keys and values, reduce-scatter")
        backward = ledger.total(f"{CONTEXT}, I", gathered | scattered)
        passes.add(CONTEXT, ledger.total(f"{CONTEXT}, F", gathered), backward)
        return
    (hop,) = message(point_to_point, kv * e, "keys and values").values()
    (hop_back,) = message(point_to_point, kv * (e + 4.0), "keys, values and gradients").values()
    (last,) = message(point_to_point, kv * 4.0, "gradients on their way home").values()
    home = np.where(candidates.cp > 1, last, 0.0)
    symbols: ledger.Inputs = {
        "cp": candidates.cp, "T": tokens, "heads": spec.n_heads, "c": spec.head_dim, "tp": candidates.tp,
        "merge_bytes": MERGE_BYTES, "element_rate": reached_bytes_per_s(job),
        "keys_and_values": hop, "keys_values_and_gradients": hop_back,
        "gradients_on_their_way_home": home, "attention_F": passes.forward["attention"],
        "attention_I": passes.backward_input["attention"],
    }  # fmt: skip
    symbols["merging"] = ledger.compute("merging", "merge_bytes * T * heads * c / tp / element_rate", **symbols)
    forward = ledger.compute(
        f"{CONTEXT}, F", "(cp - 1) * (max(keys_and_values - attention_F / cp, 0) + merging)", **symbols
    )
    backward = ledger.compute(
        f"{CONTEXT}, I",
        "(cp - 1) * (max(keys_values_and_gradients - attention_I / cp, 0) + merging) + gradients_on_their_way_home",
        **symbols,
    )
    passes.add(CONTEXT, forward, backward)


def dispatch(passes: Passes, job: Job, candidates: Candidates, tokens: Floats) -> None:
    """Dispatch and combine of experts: two all-to-alls forward, two backward, of tokens / tp x top_k x d_model."""
    spec = job.model
    assert spec.moe is not None
    what = "tokens of experts, all-to-all"
    n_bytes = ledger.compute(
        "bytes to experts", "T / tp * top_k * h * e", "B", T=tokens, tp=candidates.tp, top_k=spec.moe.top_k,
        h=spec.d_model, e=job.element_bytes,
    )  # fmt: skip
    once = all_to_all(job.cluster, n_bytes, candidates.ep, np.ones_like(candidates.ep), what)
    sent = {what: once, f"{what} back": once}
    ledger.total(f"{what} back", {what: once})
    passes.add(EXPERT, ledger.total(f"{EXPERT}, F", sent), ledger.total(f"{EXPERT}, I", sent))
