"""Seconds of a layer's passes on one rank, by kind of work.

A microbatch passes a layer forward (F), backward for its input (I) and for its weights (W), and under recomputation a
second time forward within I. Every kind is priced on its own, so that the parts of a step add up.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from shardwright.cost.collectives import all_gather, all_reduce, all_to_all, point_to_point, reduce_scatter
from shardwright.cost.job import RECOMPUTE, Candidates, Floats, Job
from shardwright.cost.products import (
    Product,
    attention_products,
    dense_products,
    expert_products,
    head_product,
    reached_flops_per_s,
)

CAST_BYTES = 5.0
"""Moved for each element cast to fp8: read for the largest (2), read (2) and written (1)."""
SELECTIVE, FULL = RECOMPUTE.index("selective"), RECOMPUTE.index("full")
MERGE_BYTES = 10.0
"""Moved for each element of attention's result at a hop of the ring: a sum in fp32 read and written, a part read."""
EXPERT_LAUNCHES = 1.6
"""Kernels of a layer with experts for each of a plain one: the router, sorting, and two all-to-alls come on top."""
BACKWARD_TRAFFIC = 1.5
"""Bytes that an element-wise operation moves backward for each forward: two inputs instead of one, and one result."""
FLASH_BACKWARD = 2.5 / 0.85
"""Seconds of fused attention backward for each forward: five products instead of two (Dao, arXiv 2307.08691, section
3), at 0.85 of the rate (figures 5 and 6 there)."""


@dataclass
class Passes:
    """Seconds of F, I and W of one microbatch, by kind of work: each an array (n,). Kinds add up."""

    forward: dict[str, Floats] = field(default_factory=dict)
    backward_input: dict[str, Floats] = field(default_factory=dict)
    weight: dict[str, Floats] = field(default_factory=dict)

    def add(self, kind: str, forward: ArrayLike, backward_input: ArrayLike, weight: ArrayLike = 0.0) -> None:
        """More seconds of a kind."""
        for part, seconds in ((self.forward, forward), (self.backward_input, backward_input), (self.weight, weight)):
            part[kind] = part.get(kind, 0.0) + np.asarray(seconds, dtype=np.float64)

    @property
    def totals(self) -> tuple[Floats, Floats, Floats]:
        """Seconds of F, I and W."""
        forward, backward_input, weight = (
            sum(part.values(), np.zeros(1)) for part in (self.forward, self.backward_input, self.weight)
        )
        return forward, backward_input, weight


def reached_bytes_per_s(job: Job) -> float:
    """What element-wise kernels of the stack reach of the memory's bandwidth."""
    chip = job.cluster.accelerator
    reached = chip.memory_bytes_per_s * chip.memory_share * job.calibration.memory_share
    return reached * job.stack.speed.kernel_share


def layer(job: Job, of: Candidates, *, experts: bool) -> Passes:
    """One layer, with a feed-forward network or a mixture of experts."""
    passes = Passes()
    tokens = of.tokens(job.seq_len)
    inner = expert_products if experts else dense_products
    _multiply(passes, job, [*attention_products(job, of, tokens), *inner(job, of, tokens)])
    _attend(passes, job, of, tokens)
    _elementwise(passes, job, of, tokens, experts=experts)
    _tensor(passes, job, of, tokens, experts=experts)
    _context(passes, job, of, tokens)
    if experts:
        _dispatch(passes, job, of, tokens)
    _recompute(passes, job, of)
    _launch(passes, job, of, experts=experts)
    return passes


def head(job: Job, of: Candidates) -> Passes:
    """Final norm, logits and loss. Logits pass the memory in 16 bits from the product and several times in fp32. Over
    tp the input is gathered and its gradient scattered, or summed where tokens are no shards."""
    passes = Passes()
    tokens = of.tokens(job.seq_len)
    _multiply(passes, job, [head_product(job, of, tokens)])
    logits = tokens * job.model.vocab_size / of.tp
    _move(passes, job, job.stack.speed.loss_bytes * logits / 2, job.stack.speed.loss_bytes * logits / 2)
    given = tokens * job.model.d_model * job.element_bytes
    shards = of.sequence_parallel
    passes.add(
        "tensor parallel",
        np.where(shards, _tp(all_gather, job, of, given), 0.0),
        np.where(shards, _tp(reduce_scatter, job, of, given), _tp(all_reduce, job, of, given)),
    )
    return passes


def embedding(job: Job, of: Candidates) -> Passes:
    """Rows looked up, and their gradients added up. Over tp each rank has a part of the rows, so that results are
    summed, and on token shards gradients gathered."""
    passes = Passes()
    rows = of.tokens(job.seq_len) * job.model.d_model * job.element_bytes
    _move(passes, job, 2 * rows, 2 * rows)
    shards = of.sequence_parallel
    passes.add(
        "tensor parallel",
        np.where(shards, _tp(reduce_scatter, job, of, rows), _tp(all_reduce, job, of, rows)),
        np.where(shards, _tp(all_gather, job, of, rows), 0.0),
    )
    return passes


def _multiply(passes: Passes, job: Job, products: Iterable[Product]) -> None:
    """Products of weights, forward and for both gradients. In fp8 their inputs are cast first, each from 16 bits."""
    those = list(products)

    def seconds(pick: Callable[[Product], Product]) -> Floats:
        return sum((pick(each).seconds(job) for each in those), np.asarray(0.0))

    passes.add(
        "matrix products",
        seconds(lambda each: each),
        seconds(lambda each: each.for_input),
        seconds(lambda each: each.for_weight),
    )
    if job.precision == "fp8":
        cast = [each for each in those if not each.precision]
        forward = sum((each.batch * each.k * (each.m + each.n) for each in cast), np.asarray(0.0))
        backward = sum((each.batch * each.m * (each.k + each.n) for each in cast), np.asarray(0.0))
        _move(passes, job, CAST_BYTES * forward, CAST_BYTES * backward)


def _move(passes: Passes, job: Job, forward_bytes: ArrayLike, backward_bytes: ArrayLike) -> None:
    """Operations that memory bounds: bytes / (bandwidth x share reached)."""
    rate = reached_bytes_per_s(job)
    passes.add("element-wise", np.asarray(forward_bytes) / rate, np.asarray(backward_bytes) / rate)


def _attend(passes: Passes, job: Job, of: Candidates, tokens: Floats) -> None:
    """Scores and their product with values. Fused attention runs the half that a causal mask leaves, at a share of the
    peak that grows with the width of a head; stored scores run the whole square as batched products, and pass the
    memory between them."""
    spec, fitted = job.model, job.calibration
    heads = spec.n_heads / of.tp
    width = (spec.qk_dim + spec.head_dim) / 2
    square_flops = 4.0 * tokens * job.seq_len * heads * width
    if job.stack.flash_attention:
        share = fitted.flash(job.cluster.accelerator.name) * width / (width + fitted.flash_width)
        rate = reached_flops_per_s(job, job.wide_precision) * share * job.stack.speed.flash_gain
        # What a mask leaves of the blocks on the diagonal counts whole.
        flops = square_flops * (0.5 + 64 / job.seq_len)
        passes.add("attention", flops / rate, flops * FLASH_BACKWARD / rate)
        return
    queries, keys, batch = job.seq_len / of.cp, float(job.seq_len), of.micro_batch * heads
    products = [
        Product(queries, spec.qk_dim, keys, batch, job.wide_precision),
        Product(queries, keys, spec.head_dim, batch, job.wide_precision),
    ]
    forward = sum(each.seconds(job) for each in products)
    backward = sum(each.for_input.seconds(job) + each.for_weight.seconds(job) for each in products)
    scores = tokens * job.seq_len * heads
    rate = reached_bytes_per_s(job)
    passes.add(
        "attention",
        np.asarray(forward + fitted.score_bytes * scores / rate),
        np.asarray(backward + fitted.score_bytes_backward * scores / rate),
    )


def _elementwise(passes: Passes, job: Job, of: Candidates, tokens: Floats, *, experts: bool) -> None:
    """Norms, residuals, activation, rotation, and the rearranging of heads and of tokens for their experts."""
    spec, speed = job.model, job.stack.speed
    scale = job.element_bytes / 2
    outside = tokens / of.token_shards * spec.d_model
    heads = tokens * spec.n_heads * spec.head_dim / of.tp
    queries_keys = tokens * spec.qk_dim * (spec.n_heads + spec.n_kv_heads) / of.tp
    branch_bytes = (speed.norm_bytes if spec.norm == "layernorm" else speed.rmsnorm_bytes) + speed.residual_bytes
    if spec.dropout:
        branch_bytes += speed.dropout_bytes
    moved = 2 * outside * branch_bytes + heads * speed.heads_bytes
    if spec.positions == "rope":
        moved = moved + queries_keys * speed.rope_bytes
    if experts:
        assert spec.moe is not None
        rows = tokens / of.tp * spec.moe.top_k
        inner = rows * spec.moe.d_ffn + tokens * spec.moe.d_ffn * spec.moe.n_shared / of.tp
        moved = moved + inner * speed.gated_bytes + rows * spec.d_model * speed.permute_bytes
    elif spec.activation == "swiglu":
        moved = moved + tokens * spec.d_ffn / of.tp * speed.gated_bytes
    else:
        moved = moved + tokens * spec.d_ffn / of.tp * speed.gelu_bytes
    _move(passes, job, scale * moved, scale * moved * BACKWARD_TRAFFIC)


def _tensor(passes: Passes, job: Job, of: Candidates, tokens: Floats, *, experts: bool) -> None:
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
    spec, speed = job.model, job.stack.speed
    latent, moe = spec.latent_attention, spec.moe
    width = spec.d_model if latent is None else (latent.q_rank or spec.d_model) + latent.kv_rank + latent.rope_dim
    result = tokens * spec.d_model * job.element_bytes
    regions = [tokens * width * job.element_bytes]
    if not experts or (moe is not None and moe.n_shared):
        regions.append(result)
    zero = np.zeros(len(of))
    forward, first, sums, again = zero, zero, zero, zero
    for given in regions:
        gather_in, scatter_in = _tp(all_gather, job, of, given), _tp(reduce_scatter, job, of, given)
        gather_out, scatter_out = _tp(all_gather, job, of, result), _tp(reduce_scatter, job, of, result)
        shards = of.sequence_parallel
        forward = forward + np.where(shards, gather_in + scatter_out, _tp(all_reduce, job, of, result))
        first = first + np.where(shards, gather_out, 0.0)
        sums = sums + np.where(shards, scatter_in, _tp(all_reduce, job, of, given))
        again = again + np.where(shards & (not job.stack.keeps_gathered), gather_in, 0.0)
    if speed.hides_tp:
        beside = passes.forward["matrix products"]
        forward, first = (hidden(time, beside, speed.interference, time / of.tp) for time in (forward, first))
    if speed.hides_tp or speed.hides_tp_backward:
        sums = hidden(sums, passes.weight["matrix products"], speed.interference)
    again = hidden(again, passes.backward_input["matrix products"], speed.interference)
    passes.add("tensor parallel", forward, first + sums + again)


def _tp(collective: Callable[..., Floats], job: Job, of: Candidates, n_bytes: Floats) -> Floats:
    """One collective over tp, whose ranks are neighbours."""
    return collective(job.cluster, n_bytes, of.tp, 1)


def hidden(message_s: Floats, beside_s: Floats, interference: float, least_s: Floats | float = 0.0) -> Floats:
    """What a message adds to work that it runs beside: what sticks out, at least `least_s`, and the share of the rest
    by which it slows the work."""
    return np.maximum(message_s - beside_s, least_s) + interference * np.minimum(message_s, beside_s)


def _context(passes: Passes, job: Job, of: Candidates, tokens: Floats) -> None:
    """How attention reaches the tokens of other ranks of cp.

    zigzag, ring: keys and values go round beside attention, backward with their gradients in fp32, which at the end go
    home with nothing beside them; what each hop gives is merged into the result by its log-sum-exp. On a contiguous
    ring the last rank has the scores of all that came before, 2 - 1 / cp of the mean. allgather: keys and values are
    gathered before, their gradients scattered after. ulysses: queries, keys, values and results are dealt out by head.
    Of the last two nothing is hidden.
    """
    if np.all(of.cp == 1):
        return
    spec, cluster = job.model, job.cluster
    # Elements of keys and values of a token on this rank.
    kv = tokens * np.maximum(spec.n_kv_heads / of.tp, 1) * (spec.qk_dim + spec.head_dim)
    if of.shared.cp_method == "ulysses":
        queries = tokens * spec.n_heads / of.tp * (spec.qk_dim + spec.head_dim)
        seconds = all_to_all(cluster, (kv + queries) * job.element_bytes, of.cp, of.tp)
        passes.add("context parallel", seconds, seconds)
        return
    if of.shared.cp_method == "allgather":
        gathered = kv * of.cp
        passes.add(
            "context parallel",
            all_gather(cluster, gathered * job.element_bytes, of.cp, of.tp),
            all_gather(cluster, gathered * job.element_bytes, of.cp, of.tp)
            + reduce_scatter(cluster, gathered * 4.0, of.cp, of.tp),
        )
        return
    if of.shared.cp_method == "ring":
        more = 1 - 1 / of.cp
        passes.add("attention", passes.forward["attention"] * more, passes.backward_input["attention"] * more)
    hop = point_to_point(cluster, kv * job.element_bytes, of.cp, of.tp)
    hop_back = point_to_point(cluster, kv * (job.element_bytes + 4.0), of.cp, of.tp)
    home = np.where(of.cp > 1, point_to_point(cluster, kv * 4.0, of.cp, of.tp), 0.0)
    beside, beside_back = passes.forward["attention"] / of.cp, passes.backward_input["attention"] / of.cp
    merge = MERGE_BYTES * tokens * spec.n_heads * spec.head_dim / of.tp / reached_bytes_per_s(job)
    hops = of.cp - 1
    passes.add(
        "context parallel",
        hops * (np.maximum(hop - beside, 0) + merge),
        hops * (np.maximum(hop_back - beside_back, 0) + merge) + home,
    )


def _dispatch(passes: Passes, job: Job, of: Candidates, tokens: Floats) -> None:
    """Tokens to their experts and back: two all-to-alls forward, two backward, of tokens / tp x top_k x d_model."""
    spec = job.model
    assert spec.moe is not None
    rows = tokens / of.tp * spec.moe.top_k
    seconds = 2 * all_to_all(job.cluster, rows * spec.d_model * job.element_bytes, of.ep, np.ones_like(of.ep))
    passes.add("expert parallel", seconds, seconds)


def _recompute(passes: Passes, job: Job, of: Candidates) -> None:
    """What I computes again: the whole forward pass, or selectively what attention makes between its products, or all
    but attention, every other product and half of the messages (torchtitan's list)."""
    once = passes.forward
    whole = sum(once.values(), np.asarray(0.0))
    selective = once["attention"]
    if job.stack.selective != "scores":
        selective = (once["matrix products"] + once["tensor parallel"]) / 2 + once["element-wise"]
    again = np.select([of.recompute == FULL, of.recompute == SELECTIVE], [whole, selective], 0.0)
    passes.add("recomputation", np.zeros_like(again), again)


def _launch(passes: Passes, job: Job, of: Candidates, *, experts: bool) -> None:
    """The processor hands out kernels one by one; a pass takes no less time than that, however small its work."""
    forward = job.stack.speed.launch_s * (EXPERT_LAUNCHES if experts else 1.0)
    again = np.where(of.recompute == FULL, forward, 0.0)
    total_f, total_i, total_w = passes.totals
    wait_f = np.maximum(forward - total_f, 0)
    wait_b = np.maximum(forward * job.stack.speed.launch_backward + again - total_i - total_w, 0)
    passes.add("launch", wait_f, wait_b)
