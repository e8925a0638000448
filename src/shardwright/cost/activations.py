"""Activation memory: bytes that a micro-batch keeps in the layers of a rank, from its forward to its backward pass.

Notation: h d_model, H heads, K kv heads of a rank, c head_dim, f d_ffn, E experts, k experts of a token, g their d_ffn,
s tokens of a sequence, t tp, e bytes of an element. T = micro_batch x s / cp are a rank's tokens. Between the matmuls
of a block a rank has T' tokens: T / t with sequence parallelism, else T. All arrays have shape (n,).

A layer keeps the product of elements a token and tokens:

| part      | activations                                                    | elements a token         | tokens |
| --------- | -------------------------------------------------------------- | ------------------------ | ------ |
| attention | residual stream; its norm, read by q, k, v                     | 2 h                      | T'     |
|           | q, k, v, and the output of attention, read by o                | (2 H c + 2 K c) / t      | T      |
|           | fused: log-sum-exp, fp32; else stored scores: softmax, and     | H / t; H s / t,          | T      |
|           | with dropout the scores after it and a mask of one byte        | 2.5 H s / t with e=2     |        |
| network   | residual stream; its norm, read by up (and gate)               | 2 h                      | T'     |
|           | up, input of down; gated also gate; unfused also silu(gate)    | 2 f / t, 3 f / t, 4 f /t | T      |
| both      | with dropout a mask of one byte                                | h bytes                  | T'     |
| shared    | output of shared experts, if a gate multiplies it              | h                        | T'     |
| mixture   | scores of the router, fp32; inputs, inner activations and      | k (2 h + 3 g)            | T'     |
|           | outputs of k experts                                           |                          |        |
| adapters  | outputs of A, rank r                                           | r for each adapter       | T      |
|           | with DoRA outputs of its matrices before they are scaled       | out / t, or out          | T, T'  |

Eager norms with an offset (`model.norm_offset`) keep a copy of their input in fp32 instead of their input. With `norms`
or `rope` as a recomputed part only the input in 16 bits is kept.

With adapters the input of a matmul is kept only if an adapter reads it too, or another operation of the backward pass.

For GPT this is Table 2 of Korthikanti et al. (arXiv 2205.05198), T (10 + 24 / t + 5 H s / (h t)) h bytes, and the part
that weight gradients need is 32 T h, as in Qi et al. (arXiv 2401.10241, section 2.3).
Ignored: statistics of norms, biases, indices, and uneven load of experts.

torch.compile does not keep tensors that its partitioner finds cheaper to compute again. In 16 bits it does not keep
silu(gate), since one kernel computes silu(gate) x up; it keeps that product and the norms, because matmuls of the
backward pass read them. In fp8 such a matmul reads the result of a cast, and a kernel of the backward pass makes the
cast from the inputs of the norm or the product, so neither is kept (`Stack.casts_again`): of a layer of SmolLM2-1.7B a
token keeps 20 h elements in 16 bits, and 14 h in fp8. Experts stay in 16 bits. Ignored: `precision.fp8_skip_layers`,
which leaves layers in 16 bits, and `precision.fp8_experts`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.cost import ledger, recompute
from shardwright.cost.blocks import BlockShape
from shardwright.cost.formats import FORMATS
from shardwright.cost.job import FULL, SELECTIVE, Candidates, Floats, Ints, Job
from shardwright.cost.ledger import Formulas, greatest, plus
from shardwright.cost.parameters import computed_share, elements, scaled_outputs
from shardwright.model.linear_sizes import LinearAttentionSpec
from shardwright.model.pieces import ROWS_TOGETHER
from shardwright.model.sections import MoESpec
from shardwright.split.sequence import chunks_of_ring_rank


@dataclass(frozen=True)
class LayerActivations:
    """Bytes of one layer. `kept`: from forward to backward pass, including `experts`, the rows sent to experts.
    `waiting`: kept from I to W. `working`: temporary buffers of its backward pass, with recomputed activations."""

    kept: Floats
    experts: Floats
    waiting: Floats
    working: Floats


def layer(job: Job, candidates: Candidates, block: BlockShape, name: str | None = None) -> LayerActivations:
    """Return the activations of one layer of a kind, with each candidate's recomputation. Full recomputation keeps only
    the block's input. `name`: its name in the ledger, by default the kind's."""
    name = name or block.name
    with ledger.section(f"Kept of a microbatch by {name}"):
        f = Formulas("B", symbols(job, candidates) | features(job, candidates, block))
        parts, rows = _parts(job, candidates, f, block)
        e_norm = f.e_norm if job.widens_layer_norms else f.e
        norms_and_masks = f.T_shard * f.h * (f.norms * e_norm + f.branches * f.mask)
        f("kept around them", norms_and_masks + f.inputs * f.T_read * f.h * f.e_input)
        f("everything", plus(f.kept_around_them, *(f[f"kept of {part}"] for part in parts)))
        whole, selective = _whole_and_selective(job, candidates, f, block, parts)
        again = candidates.recompute
        kept = f.choose(
            "all kept", again, [whole, selective, f.T_shard * f.h * f.e],
            "after Korthikanti et al., arXiv 2205.05198, table 2",
        )  # fmt: skip
        without_rows = job.stack.selective in ("products", "read products") or recomputes_mixture(job, candidates)
        gone = (again == FULL) | ((again == SELECTIVE) & without_rows)
        experts = np.where(gone, 0.0, rows)
        f.add(rows_of_experts=experts)
        f(f"kept by {name}", f.all_kept - f.rows_of_experts)
        of_parts = [f[f"working of {part}"] for part in parts]
        # Attention runs when networks have freed theirs, unless W reads them or copies to the host are on their way.
        if not candidates.kind.splits_backward and candidates.shared.offload_activations == "none":
            of_parts[0] = of_parts[0] - plus(*(f[f"kept of {part}"] for part in parts if part in _AFTER_ATTENTION))
        at_once = greatest(*of_parts)
        if quantised := [row for row in block.rows if row.stored]:
            sizes = [elements(job.model, row, candidates.tp, candidates.ep) for row in quantised]
            f.add(largest_matrix=np.max(sizes, axis=0))
            at_once = at_once + f("decoded matrix", f.e * f.largest_matrix, "model/quantised.py")
        recomputed = at_once + f.everything - f.all_kept
        not_again = at_once if whole is f.everything else recomputed
        working = f.choose(f"working of {name}", again, [not_again, recomputed, recomputed])
        gathered = job.stack.waits_gathered
        ends = (f.norms + f.inputs) * f.T if gathered else f.norms * f.T_shard + f.inputs * f.T_read
        waiting = f("all for W", plus(ends * f.h * f.e, *(f[f"{part} for W"] for part in parts)))
        return LayerActivations(kept, experts, waiting, working)


def _parts(job: Job, candidates: Candidates, f: Formulas, block: BlockShape) -> tuple[list[str], Floats | float]:
    """Add the formulas of each part of a block. Return the parts, and the rows sent to experts."""
    _attention(job, candidates, f, block)
    _networks(job, f, gated=block.gates_shared, frozen=block.frozen)
    parts = ["attention", "networks"]
    rows: Floats | float = 0.0
    if block.experts:
        rows = _experts(f, shared=block.inner > 0, frozen=block.frozen)
        parts.append("experts")
    if block.adapters:
        kept = f.T * f.ranks_of_adapters * f.e
        if block.scaled:
            kept = kept + (f.T * f.outputs_scaled + f.T_shard * f.results_scaled) * f.e
        f("kept of adapters", kept)
        for what in ("listed of adapters", "adapters for W", "working of adapters"):
            f(what, 1 * f.kept_of_adapters)
        parts.append("adapters")
    return parts, rows


def _whole_and_selective(
    job: Job, candidates: Candidates, f: Formulas, block: BlockShape, parts: Sequence[str]
) -> tuple[Floats, Floats]:
    """Return the bytes that a block keeps without recomputation and with selective recomputation."""
    if job.stack.selective in ("products", "read products"):
        listed = plus(f.T_shard * f.h * f.e, *(f[f"listed of {part}"] for part in parts))
        f("listed", np.minimum(listed, f.everything))
        return f.everything, f.listed
    if job.stack.selective == "parts":
        # Under torch.compile only tensors that a matmul reads uncast have to exist before it.
        cast = _CAST * (job.stack.casts_again and FORMATS[job.precision].narrow)
        whole = _without(cast, job, f, experts=False)
        if not np.any(candidates.recomputes_parts):
            return whole, f.everything
        parts_again = (*cast, *recompute.parts_of(job, candidates))
        return whole, _without(parts_again, job, f, experts=bool(block.experts))
    return f.everything, f.everything if job.stack.flash_attention else f.everything - f.scores


def recomputes_mixture(job: Job, candidates: Candidates) -> bool:
    """Return whether selective recomputation keeps nothing of a mixture of experts."""
    return job.stack.selective == "parts" and "moe" in recompute.parts_of(job, candidates)


_AFTER_ATTENTION = ("networks", "experts")
_CAST = ("norms", "activation")
"""The parts of a block whose outputs only matmuls read."""


def _without(parts: tuple[str, ...], job: Job, f: Formulas, *, experts: bool) -> Floats:
    """Return everything except the outputs of some parts; the outputs of experts are left out only with `experts`."""
    if not parts:
        return f.everything
    latent = job.model.latent_attention is not None
    return f.everything - recompute.not_kept(job, f, tuple(dict.fromkeys(parts)), latent=latent, experts=experts)


def symbols(job: Job, candidates: Candidates) -> ledger.Inputs:
    """Return the symbols of the notation above, except the features of a layer."""
    tokens, fp8 = candidates.tokens(job.seq_len), FORMATS[job.precision].narrow
    outside = tokens / candidates.token_shards
    # A ring has a buffer of keys and values to read and one to receive into.
    gathers = candidates.shared.cp_method == "allgather"
    visiting = candidates.cp if gathers else 2.0
    return {
        "T": tokens,
        "T_shard": outside,
        "T_read": tokens if job.stack.keeps_gathered else outside,
        "s": job.seq_len,
        "h": job.model.d_model,
        "tp": candidates.tp,
        "e": job.element_bytes,
        "e_input": job.stack.fp8_input_bytes if fp8 else job.element_bytes,
        "e_norm": 4 if job.widens_norms else job.element_bytes,
        "mask": int(job.model.dropout > 0 or job.stack.dropout_masks),
        "cut": (candidates.token_shards > 1).astype(np.int64),
        "visiting": np.where(candidates.cp > 1, visiting, 0.0),
    }


def features(job: Job, candidates: Candidates, block: BlockShape) -> ledger.Inputs:
    """Return the features and counts of one layer on a rank."""
    model, latent, stack = job.model, job.model.latent_attention, job.stack
    heads = model.n_heads / candidates.tp
    kv_heads = np.maximum(model.n_kv_heads / candidates.tp, 1)
    repeats = job.keeps_all_heads(candidates, block.window)
    repeated = (heads - kv_heads) * (model.qk_dim + model.head_dim) * repeats
    result: ledger.Inputs = {
        "heads": model.n_heads,
        "q": heads * model.qk_dim,
        "k": kv_heads * model.qk_dim,
        "v": kv_heads * model.head_dim,
        "out": heads * model.head_dim,
        "narrow": 0 if latent is None else 2 * (latent.q_rank + latent.kv_rank) + latent.rope_dim,
        # Normed queries and keys, also before weights of each head; the kernel's padded values and outputs, and the
        # unpadded outputs that o reads; with gates their sigmoid, the output before them, and next to raw queries the
        # raw gates; keys and values that are repeated for all heads.
        "padding": (heads + kv_heads) * model.qk_dim * block.norms_heads * (1 + model.qk_norm_heads) * (latent is None)
        + heads * (2 * model.qk_dim - model.head_dim) * (stack.pads_values and model.qk_dim > model.head_dim)
        + heads * model.head_dim * (2 + block.norms_heads) * model.attention_gate
        + repeated,
        "widened": _widened_heads(job, block) * (heads + kv_heads) * model.qk_dim,
        "expanded": _expanded(job, candidates, repeats),
        "norms": block.norms,
        "branches": block.branches,
        "inputs": block.inputs,
        "normed_inputs": block.normed_inputs,
        "inner": block.inner,
        "inner_read": block.inner_read,
        "ranks_of_adapters": sum(
            row.shape[-2] * computed_share(model, row, candidates.tp) for row in block.adapters if row.adapter == "a"
        ),
        **scaled_outputs(model, block, candidates.tp),
        "gated_outputs": int(block.gates_shared),
        # Gate, up and, unless fused, silu(gate).
        "made": 2 + (not (stack.fused_gate or model.activation == "swiglu_clamped")) if block.gated else 1,
        # Between the messages of ep experts are not compiled.
        "eager_gate": ((candidates.ep > 1) & (job.compiled and block.gated)).astype(np.int64),
        "tensors": 2 + block.gated,
        "frees_inputs": int(stack.frees_inputs),
        "expert_inner": block.expert_inner,
        # The normed input of a router in 16 bits is kept only in fp32 if no shared experts read it.
        "copied_alone": int(
            bool(block.experts)
            and block.inner == 0
            and stack.wide_router
            and job.element_bytes < 4
            and not block.frozen
        ),
    }
    result |= recompute.features(model, block, heads, kv_heads, repeated)
    if block.linear and model.linear_attention is not None:
        result |= _linear_features(model.linear_attention, job, candidates)
    if block.experts and model.moe is not None:
        result |= _expert_features(model.moe, job, candidates, block)
    return result


def _expert_features(moe: MoESpec, job: Job, candidates: Candidates, block: BlockShape) -> ledger.Inputs:
    stack = job.stack
    return {
        "top_k": moe.top_k,
        "n_experts": moe.n_experts,
        "exchanged": (candidates.ep > 1) + 0,
        "weighed": int(stack.weighs_outputs and not moe.scale_input),
        "unweighted": int(not stack.weighs_outputs and not block.gated),
        "copied": int(stack.wide_router and job.element_bytes < 4 and not block.frozen),
        "reads_rows": int(block.reads_rows),
        "reads_inner": int(block.reads_expert_inner),
    }


def _expanded(job: Job, candidates: Candidates, repeats: Ints) -> Ints:
    """Return the keys and values with all query heads, and their gradients, that the backward pass of attention has, as
    a multiple of the queries' and the output's features. Without groups of heads only the gradients count; ulysses has
    all tokens of few heads, like a single process, where repeated keys and values are kept."""
    grouped, method = job.model.n_heads > job.model.n_kv_heads, candidates.shared.cp_method
    over_ring = (1 + grouped) * (candidates.cp - 1 if method == "allgather" else 1) * job.stack.expands_heads
    return np.where((candidates.cp > 1) & (method != "ulysses"), over_ring, grouped * repeats)


def _widened_heads(job: Job, block: BlockShape) -> bool:
    """Return whether the norms of queries and keys keep their inputs in fp32."""
    model = job.model
    offset = block.norms_heads and model.qk_norm_weight and not model.qk_norm_heads and model.latent_attention is None
    return offset and job.widens_layer_norms


def _linear_features(linear: LinearAttentionSpec, job: Job, candidates: Candidates) -> ledger.Inputs:
    """Return the features of linear attention on a rank: it keeps its projections and its output, and while it computes
    backward the tensors of a scan and their gradients, in 32 bits. With cp it also keeps the states and half of the
    maps of its pieces, and the tails before them, and has the maps of all pieces while they are composed."""
    pieces = chunks_of_ring_rank(candidates.shared.cp_method)
    of_pieces = np.where(candidates.cp > 1, pieces * candidates.micro_batch / candidates.tp, 0.0)
    wide = max(4.0, job.element_bytes)
    keys, values = linear.n_k_heads * linear.k_dim / candidates.tp, linear.n_v_heads * linear.v_dim / candidates.tp
    gates_and_values = linear.projected_width / candidates.tp - 2 * keys
    nothing = {"heads": 0, "padding": 0, "rotated": 0, "padded_out": 0, "placed_keys": 0, "visiting": 0, "expanded": 0}
    over_cp = {
        "kept_maps": of_pieces * (linear.map_numel * wide + linear.window_numel * job.element_bytes),
        "gathered_maps": candidates.cp * of_pieces * linear.map_numel * wide,
    }
    scanned = 2 * linear.scan_numel / candidates.tp
    return {"q": keys, "k": keys, "v": gates_and_values, "out": values, "scanned": scanned, **over_cp, **nothing}


def _attention(job: Job, candidates: Candidates, f: Formulas, block: BlockShape) -> None:
    stored, linear = not job.stack.flash_attention, block.linear
    if stored:
        a_score = 2 * f.e + f.mask if job.model.dropout > 0 or job.stack.dropout_masks else f.e
        f("scores", f.T * f.heads / f.tp * f.s * a_score, "stored")
    elif linear:
        f("scores", 1 * f.kept_maps, "none; states, maps and tails of pieces over cp")
    else:
        f("scores", f.T * f.heads / f.tp * 4, "log-sum-exp, fp32")
    kept = f.T * ((f.q + f.k + f.v + f.padding) * f.e + f.out * f.e_input) + f.T_shard * f.narrow * f.e + f.scores
    if _widened_heads(job, block):
        kept = kept + f.T * f.widened * (f.e_norm - f.e)
    f("kept of attention", kept)
    # For a mixture in eager mode, torchtitan recomputes the whole attention. It keeps inputs and outputs of the norms
    # around it, which no recomputed module contains (distributed/activation_checkpoint.py since 0943771, 2025-09).
    apart = job.model.moe is not None and job.stack.selective == "products"
    f("listed of attention", 2 * f.T_shard * f.h * f.e if apart else f.T * (f.q + f.v + f.out) * f.e)
    f("attention for W", f.T * (f.q + f.k + f.v + f.out) * f.e + f.T_shard * f.narrow * f.e)
    features = f.q + f.k + f.v + f.out + f.cut * f.h + f.visiting * (f.k + f.v) + f.expanded * (f.q + f.out)
    working = (f.T * features + 2 * f.T_shard * f.h) * f.e
    if linear:
        working = working + 4 * f.T * f.scanned + f.gathered_maps
    if stored:
        working = working + 2 * f.T * f.s * f.heads / f.tp * f.e
    elif not linear and np.any(in_memory := job.scores_in_memory(candidates, block.window)):
        _scores_in_rows(job, candidates, f, block, in_memory)
        working = working + f.scores_in_rows
    f("working of attention", working, "gradients, and inputs gathered over tp and cp")


def _scores_in_rows(job: Job, candidates: Candidates, f: Formulas, block: BlockShape, in_memory: Ints) -> None:
    """Add the bytes of the scores of the rows that are computed together: in the backward pass the scores, the slope of
    a soft cap and the gradient, in fp32 or wider.

    The keys are the tokens of a ring rank, at most a window and the rows. A ring computes all sequences of a
    micro-batch together, and with `allgather` all keys before a rank's last chunk, if no rule and no documents cut them
    into pieces (`parallel.context`). Ignored: that documents have fewer keys, and the mask of one byte, which all heads
    share."""
    ring, capped = candidates.cp_ring, job.model.attention_softcap > 0
    keys = job.seq_len / ring
    rows = np.minimum(keys, min(block.window or ROWS_TOGETHER, ROWS_TOGETHER))
    sequences = np.ones_like(ring)
    if block.window:
        keys = np.minimum(keys, block.window if block.chunked else block.window - 1 + rows)
    elif not job.has_rule(block.window) and job.document_tokens is None:
        sequences = np.where(ring > 1, candidates.micro_batch, 1)
        if candidates.shared.cp_method == "allgather":
            keys = np.maximum(keys, job.seq_len - keys)
    f.add(
        rows_together=rows * in_memory, keys_together=keys, sequences_together=sequences,
        head_shards=candidates.tp * candidates.cp // ring,
    )  # fmt: skip
    n_tensors = f.constant(3 if capped else 2)
    scores_bytes = n_tensors * max(4.0, job.element_bytes) * f.rows_together * f.keys_together * f.sequences_together
    source = f"scores,{' slope of a soft cap' if capped else ''} and gradient; model/blocks.py"
    f("scores in rows", scores_bytes * (f.heads / f.head_shards), source)


def _networks(job: Job, f: Formulas, *, gated: bool, frozen: bool) -> None:
    """Add the networks that compute all tokens: a feed-forward network, or shared experts, possibly `gated`. If their
    matrices are `frozen`, their last input is kept only for an adapter."""
    inner = f.T * f.inner / f.tp
    kept = inner * (f.made * f.e + f.e_input)
    if frozen:
        kept = inner * f.made * f.e + f.T * f.inner_read / f.tp * f.e_input
    if gated:
        kept = kept + f.T_shard * f.h * f.e * f.gated_outputs
    f("kept of networks", kept)
    listed = inner * f.e
    f("listed of networks", listed + f.T_shard * f.h * f.e if job.stack.selective == "products" else listed)
    f("networks for W", inner * f.tensors * f.e)
    gradients = 2 * f.T * f.cut * f.h + 2 * f.T_shard * f.h + inner * (f.tensors - f.frees_inputs)
    f("working of networks", gradients * f.e, "gradients, inputs")


def _experts(f: Formulas, *, shared: bool, frozen: bool) -> Floats:
    """Add the router and the routed experts, never sharded over tp. Return the bytes of rows sent to experts. `frozen`
    matrices keep their inputs only for adapters."""
    e_input, e_inner = (f.reads_rows * f.e_input, f.reads_inner * f.e_input) if frozen else (f.e_input, f.e_input)
    sent = f("rows sent", f.T_shard * f.top_k * f.h * (e_input + f.e * f.weighed))
    router = f.T_shard * (f.constant(2) * 4 * f.n_experts + 4 * f.h * f.copied)
    if not shared and not frozen:  # the router's input is kept in fp32, and no other matmul keeps it in 16 bits
        router = router - f.T_read * f.h * f.e_input * f.copied
    f("router", router, "scores in fp32")
    made = f.T_shard * f.top_k * f.expert_inner * ((f.made + f.eager_gate + f.unweighted) * f.e + e_inner)
    f("kept of experts", f.rows_sent + f.router + made)
    f("listed of experts", 2 * f.T_shard * f.top_k * f.h * f.e * f.exchanged, "outputs of both all-to-alls")
    f("experts for W", f.T_shard * f.top_k * (2 * f.h + f.tensors * f.expert_inner) * f.e)
    freed = f.top_k * f.expert_inner * f.frees_inputs
    f("working of experts", f.experts_for_W + f.T_shard * (f.h - freed) * f.e, "gradients")
    return sent
