"""Bytes that a microbatch leaves behind in the layers of a rank, from its forward to its backward pass.

Notation: h d_model, H heads, K kv heads of a rank, c head_dim, f d_ffn, E experts, k of a token, g their d_ffn, s
tokens of a sequence, t tp, e bytes of an element. T = micro_batch x s / cp are a rank's tokens; T' = T / t under
sequence parallelism, else T, those between the products of a block. All arrays have shape (n,).

Kept for each token, times the tokens in the last column:

| part      | what                                                              | elements              | of  |
| --------- | ----------------------------------------------------------------- | --------------------- | --- |
| attention | residual stream; its norm, read by q, k, v                        | 2 h                   | T'  |
|           | q, k, v, and what attention gives, read by o                      | (2 H c + 2 K c) / t   | T   |
|           | log-sum-exp of fused attention, fp32; else scores: softmax, and   | H / t; H s / t,       | T   |
|           | where they are dropped a mask of one byte and the dropped ones    | 2.5 H s / t with e=2  |     |
| network   | residual stream; its norm, read by up (and gate)                  | 2 h                   | T'  |
|           | gate, up, what down reads; unless fused silu(gate)                | 2 f / t, 3 f / t, 4 f / t | T |
| both      | a mask of one byte where they are dropped                         | h bytes               | T'  |
| mixture   | scores of the router, fp32; what k experts read, make and give    | k (2 h + 3 g)         | T'  |

For GPT this is Table 2 of Korthikanti et al. (arXiv 2205.05198), T (10 + 24 / t + 5 H s / (h t)) h bytes, and for its
weight gradients alone 32 T h, as Qi et al. count them (arXiv 2401.10241, section 2.3).
Ignored: statistics of norms, biases, indices; experts get equal shares of the tokens.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.job import RECOMPUTE, Candidates, Floats, Ints, Job
from shardwright.cost.parameters import vocabulary_rows

Array = Floats | Ints
NONE, SELECTIVE, FULL = range(len(RECOMPUTE))


@dataclass(frozen=True)
class Layer:
    """Of one layer, in bytes: `kept` from forward to backward pass, of which `experts` are rows sent to experts;
    `waiting` from I to W; `working`: what its backward pass needs at once on top, things computed again among it."""

    kept: Floats
    experts: Floats
    waiting: Floats
    working: Floats


@dataclass(frozen=True)
class Ends:
    """Outside the layers, in bytes: `first`: a mask after the embedding; `last`: around the last norm; `logits` from
    the loss to its backward pass, `waiting_logits` from there to W, and `loss`, what the loss takes on top."""

    first: Floats
    last: Floats
    sent: Floats
    logits: Floats
    waiting_logits: Floats
    loss: Floats


@dataclass
class _Part:
    """Of attention or of a network: `kept` in all, of which `scores`, `listed` by torchtitan and rows of `experts`."""

    kept: Floats
    listed: Floats
    waiting: Floats
    working: Floats
    scores: Array | float = 0.0
    experts: Array | float = 0.0


@dataclass(frozen=True)
class _Sizes:
    """`tokens` are T, `outside` T', `read` those of which a product keeps what it reads after a norm; `cut`: whether T'
    is less than T; `visiting`: keys and values of other ranks of cp, in units of a rank's own. `of_e` are the bytes of
    an element, `of_input` of the kept input of a product."""

    tokens: Floats
    outside: Floats
    read: Floats
    tp: Ints
    cut: NDArray[np.bool_]
    visiting: Floats
    of_e: float
    of_input: float
    drops: bool


def plain(job: Job, candidates: Candidates) -> Layer:
    """A layer without experts."""
    sizes = _sizes(job, candidates)
    return _layer(job, candidates, sizes, _attention(job, sizes), _network(job, sizes, job.model.d_ffn))


def mixture(job: Job, candidates: Candidates) -> Layer:
    """A layer with experts; the model has some."""
    sizes = _sizes(job, candidates)
    return _layer(job, candidates, sizes, _attention(job, sizes), _experts(job, sizes))


def ends(job: Job, candidates: Candidates) -> Ends:
    """Before the first layer and after the last.

    A logit of 16 bits is copied to fp32 for the loss, which keeps its softmax; `Stack.logit_peak_bytes` counts what is
    there at most: logits, copies, gradients. Under fp32 nothing is copied, but the softmax and gradient are made.
    """
    sizes, h, stack = _sizes(job, candidates), job.model.d_model, job.stack
    rows = vocabulary_rows(job.model, sizes.tp, multiple=stack.vocabulary_multiple)
    logits = sizes.tokens * rows
    kept = max(stack.logit_kept_bytes, sizes.of_e)
    peak = np.where(sizes.tp > 1, stack.logit_cut_bytes, 0.0) + max(stack.logit_peak_bytes, kept + sizes.of_e)
    return Ends(
        first=sizes.outside * h * sizes.drops,
        last=(sizes.outside + sizes.read) * h * sizes.of_e,
        sent=sizes.outside * h * sizes.of_e * stack.keeps_outputs,
        logits=logits * kept,
        waiting_logits=logits * sizes.of_e,
        loss=logits * (peak - kept),
    )


def _sizes(job: Job, candidates: Candidates) -> _Sizes:
    tokens = candidates.tokens(job.seq_len)
    outside = tokens / candidates.token_shards
    return _Sizes(
        tokens=tokens,
        outside=outside,
        read=tokens if job.stack.keeps_gathered else outside,
        tp=candidates.tp,
        cut=candidates.token_shards > 1,
        # A ring has the keys and values at work and those on their way.
        visiting=np.where(candidates.cp > 1, candidates.cp if candidates.shared.cp_method == "allgather" else 2.0, 0.0),
        of_e=job.element_bytes,
        of_input=job.stack.fp8_input_bytes if job.precision == "fp8" else job.element_bytes,
        drops=job.model.dropout > 0 or job.stack.dropout_masks,
    )


def _layer(job: Job, candidates: Candidates, sizes: _Sizes, attention: _Part, network: _Part) -> Layer:
    """The two halves of a block, under each candidate's recomputation.

    Full: the block's input is kept, and its backward pass makes all the rest again.
    """
    block_input = sizes.outside * job.model.d_model * sizes.of_e
    everything = attention.kept + network.kept
    if job.stack.selective == "scores":
        selective = everything - attention.scores
    else:
        selective = block_input + attention.listed + network.listed
    selective = np.minimum(selective, everything)
    again, full = candidates.recompute, candidates.recompute == FULL
    kept = np.select([again == NONE, again == SELECTIVE], [everything, selective], block_input)
    rows = np.where(full | ((again == SELECTIVE) & (job.stack.selective != "scores")), 0.0, network.experts)
    working = np.maximum(attention.working, network.working)
    return Layer(
        kept=kept,
        experts=rows,
        waiting=attention.waiting + network.waiting,
        working=working + everything - kept,
    )


def _attention(job: Job, sizes: _Sizes) -> _Part:
    model, e, latent = job.model, sizes.of_e, job.model.latent_attention
    h, tokens, outside, t = model.d_model, sizes.tokens, sizes.outside, sizes.tp
    heads = model.n_heads / t
    kv_heads = np.maximum(model.n_kv_heads / t, 1)
    q, k = heads * model.qk_dim, kv_heads * model.qk_dim
    v, out = kv_heads * model.head_dim, heads * model.head_dim
    qkv = q + k + v
    extra: Array | float = 0.0
    narrow = 0
    if latent is not None:
        narrow = 2 * (latent.q_rank + latent.kv_rank) + latent.rope_dim
    elif model.qk_norm:
        extra = tokens * (q + k) * e
    square = heads * job.seq_len
    scores = tokens * heads * 4
    if not job.stack.flash_attention:
        scores = tokens * square * (2 * e + 1 if sizes.drops else e)
    in_norms = outside * (h * (e + sizes.drops) + narrow * e) + sizes.read * h * sizes.of_input
    if job.stack.pads_values:
        # The kernel's values and results, beside the results without zeros that o reads.
        extra = extra + tokens * heads * (2 * model.qk_dim - model.head_dim) * e * (model.qk_dim > model.head_dim)
    kept = in_norms + extra + tokens * (qkv * e + out * sizes.of_input) + scores
    gradients = tokens * (qkv + out) * e + outside * 2 * h * e
    gathered = np.where(sizes.cut, tokens * h * e, 0.0) + sizes.visiting * tokens * (k + v) * e
    if not job.stack.flash_attention:
        gradients = gradients + 2 * tokens * square * e
    return _Part(
        kept=kept,
        listed=tokens * (q + v + out) * e,
        waiting=(outside * (h + narrow) + sizes.read * h) * e + tokens * (out + qkv) * e,
        working=gradients + gathered,
        scores=scores if not job.stack.flash_attention else 0.0,
    )


def _network(job: Job, sizes: _Sizes, width: float) -> _Part:
    model, e = job.model, sizes.of_e
    h, tokens, outside = model.d_model, sizes.tokens, sizes.outside
    inner = width / sizes.tp
    inputs = 2 if model.activation == "swiglu" else 1
    made = inputs + (inputs == 2 and not job.stack.fused_gate)
    in_norms = outside * h * (e + sizes.drops) + sizes.read * h * sizes.of_input
    kept = in_norms + tokens * inner * (made * e + sizes.of_input)
    gathered = np.where(sizes.cut, 2 * tokens * h * e, 0.0)
    return _Part(
        kept=kept,
        listed=tokens * inner * e + outside * h * e * (job.stack.selective == "products"),
        waiting=(outside + sizes.read) * h * e + tokens * inner * (1 + inputs) * e,
        working=gathered + outside * 2 * h * e + tokens * inner * (1 + inputs) * e,
    )


def _experts(job: Job, sizes: _Sizes) -> _Part:
    """The router, the experts of a token's choice, which never lie over tp, and shared ones, which do."""
    model, moe, e = job.model, job.model.moe, sizes.of_e
    assert moe is not None
    h, rows = model.d_model, sizes.outside * moe.top_k
    inputs = 2 if model.activation == "swiglu" else 1
    made = inputs + (inputs == 2 and not job.stack.fused_gate)
    common = _network(job, sizes, moe.n_shared * moe.d_ffn)
    copied = job.stack.wide_router and e < 4
    unweighted = not job.stack.weighs_outputs and inputs == 1
    sent = rows * h * (sizes.of_input + e * job.stack.weighs_outputs)
    inner = rows * moe.d_ffn * ((made + unweighted) * e + sizes.of_input)
    scores = sizes.outside * (moe.n_experts * 2 * 4 + h * 4 * copied)
    if copied and not moe.n_shared:
        # What the router read is kept in fp32, and no one else reads it.
        scores = scores - sizes.read * h * sizes.of_input
    gradients = rows * (2 * h + (1 + inputs) * moe.d_ffn) * e
    return _Part(
        kept=common.kept + sent + inner + scores,
        listed=common.listed,
        waiting=common.waiting + rows * (2 * h + (1 + inputs) * moe.d_ffn) * e,
        working=np.maximum(common.working, gradients + sizes.outside * h * e),
        experts=sent,
    )
