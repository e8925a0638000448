"""Seconds of what ranks of tp, cp and ep send each other in a layer, and what of them is not hidden by other work."""

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
"""In the ledger, after the name of messages that run beside other work."""
MERGE_BYTES = 10.0
"""Moved for each element of attention's result at a hop of the ring: a sum in fp32 read and written, a part read."""


def tensor(passes: Passes, job: Job, of: Candidates, block: Block, tokens: Floats) -> None:
    """What ranks of tp send for each region that they work on together: attention, and a feed-forward network or the
    shared experts; a mixture itself works on each rank's tokens.

    |                         | forward                            | backward                                   |
    | ----------------------- | ---------------------------------- | ------------------------------------------ |
    | without token shards    | all-reduce of the region's result  | all-reduce of its input's gradient         |
    | on token shards         | all-gather in, reduce-scatter out  | all-gather out, reduce-scatter in, and the |
    |                         |                                    | input gathered again where it was not kept |

    In and out are tokens x d_model; into latent attention go its narrow vectors (Korthikanti et al., arXiv 2205.05198,
    section 4.2.2). Hidden are, backward, the sum of the input's gradients beside the product for weights and the second
    gathering beside the product for inputs; while the first message backward has nothing beside it. A stack that cuts
    products and messages into pieces hides them all, but for the first piece.
    """
    speed = job.stack.speed
    result = tokens * job.model.d_model * job.element_bytes
    zero = np.zeros(len(of))
    forward, first, sums, again = zero, zero, zero, zero
    terms: list[dict[str, Floats]] = [{}, {}, {}, {}]
    for region in block.regions:
        given, name = tokens * region.given * job.element_bytes, region.name
        out = over_tp(job, of, result, f"result of {name}", reduce_scatter, all_reduce)
        back = over_tp(job, of, result, f"gradient of the result of {name}", all_gather, None)
        # What a region reads may be there from the one before.
        read = over_tp(job, of, given, f"input of {name}", all_gather, None) if region.given else {}
        summed = (
            over_tp(job, of, given, f"gradient of the input of {name}", reduce_scatter, all_reduce)
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
            hidden(seconds, beside[0], speed.interference, seconds / of.tp, what=name, beside=f"{MATMULS}, F")
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
    job: Job, of: Candidates, n_bytes: Floats, what: str, on_shards: Collective, whole: Collective | None
) -> dict[str, Floats]:
    """Seconds of one collective over tp, whose ranks are neighbours, by its name: one where tokens are shards, another
    or none where every rank has all of them."""

    def seconds(collective: Collective | None) -> Floats:
        if collective is None:
            return np.zeros(len(of))
        return collective(job.cluster, n_bytes, of.tp, 1, f"{what}, {named(collective)}")

    shards = of.sequence_parallel
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
    """What a message adds to work that it runs beside: what sticks out, at least `least_s`, and the share of the rest
    by which it slows the work. In the ledger the message is called `what`, and the work `beside`."""
    if not message_s.any():
        return np.zeros_like(message_s)
    message, work = ledger.identifier(what), ledger.identifier(beside)
    return ledger.compute(
        f"{what}{HIDDEN}", f"max({message} - {work}, least_s) + interference * min({message}, {work})",
        least_s=least_s, interference=interference, **{message: message_s, work: beside_s},
    )  # fmt: skip


def context(passes: Passes, job: Job, of: Candidates, tokens: Floats) -> None:
    """How attention reaches the tokens of other ranks of cp.

    zigzag, ring: keys and values go round beside attention, backward with their gradients in fp32, which at the end go
    home with nothing beside them; what each hop gives is merged into the result by its log-sum-exp. allgather: keys and
    values are gathered before, their gradients scattered after. ulysses: queries, keys, values and results change from
    parts of the tokens to parts of the heads. Of the last two nothing is hidden.
    """
    if np.all(of.cp == 1):
        return
    spec, e = job.model, job.element_bytes
    # Elements of keys and values of a token on this rank.
    kv = tokens * np.maximum(spec.n_kv_heads / of.tp, 1) * (spec.qk_dim + spec.head_dim)

    def message(collective: Collective, n_bytes: Floats, what: str) -> dict[str, Floats]:
        return {what: collective(job.cluster, n_bytes, of.cp, of.tp, what)}

    if of.shared.cp_method == "ulysses":
        queries = tokens * spec.n_heads / of.tp * (spec.qk_dim + spec.head_dim)
        sent = message(all_to_all, (kv + queries) * e, "queries, keys, values and results, all-to-all")
        passes.add(CONTEXT, ledger.total(f"{CONTEXT}, F", sent), ledger.total(f"{CONTEXT}, I", sent))
        return
    if of.shared.cp_method == "allgather":
        gathered = message(all_gather, kv * of.cp * e, "keys and values, all-gather")
        scattered = message(reduce_scatter, kv * of.cp * 4.0, "gradients of keys and values, reduce-scatter")
        backward = ledger.total(f"{CONTEXT}, I", gathered | scattered)
        passes.add(CONTEXT, ledger.total(f"{CONTEXT}, F", gathered), backward)
        return
    (hop,) = message(point_to_point, kv * e, "keys and values").values()
    (hop_back,) = message(point_to_point, kv * (e + 4.0), "keys, values and gradients").values()
    (last,) = message(point_to_point, kv * 4.0, "gradients on their way home").values()
    home = np.where(of.cp > 1, last, 0.0)
    symbols: ledger.Inputs = {
        "cp": of.cp, "T": tokens, "heads": spec.n_heads, "c": spec.head_dim, "tp": of.tp, "merge_bytes": MERGE_BYTES,
        "element_rate": reached_bytes_per_s(job), "keys_and_values": hop, "keys_values_and_gradients": hop_back,
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


def dispatch(passes: Passes, job: Job, of: Candidates, tokens: Floats) -> None:
    """Tokens to their experts and back: two all-to-alls forward, two backward, of tokens / tp x top_k x d_model."""
    spec = job.model
    assert spec.moe is not None
    what = "tokens of experts, all-to-all"
    n_bytes = ledger.compute(
        "bytes to experts", "T / tp * top_k * h * e", "B", T=tokens, tp=of.tp, top_k=spec.moe.top_k, h=spec.d_model,
        e=job.element_bytes,
    )  # fmt: skip
    once = all_to_all(job.cluster, n_bytes, of.ep, np.ones_like(of.ep), what)
    sent = {what: once, f"{what} back": once}
    ledger.total(f"{what} back", {what: once})
    passes.add(EXPERT, ledger.total(f"{EXPERT}, F", sent), ledger.total(f"{EXPERT}, I", sent))
