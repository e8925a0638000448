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
| mixture   | scores of the router, fp32; inputs, inner activations and      | k (2 h + 3 g)            | T'     |
|           | outputs of k experts                                           |                          |        |

For GPT this is Table 2 of Korthikanti et al. (arXiv 2205.05198), T (10 + 24 / t + 5 H s / (h t)) h bytes, and the part
that weight gradients need is 32 T h, as in Qi et al. (arXiv 2401.10241, section 2.3).
Ignored: statistics of norms, biases, indices, and uneven load of experts.

torch.compile keeps what its partitioner does not find cheaper to compute again. In 16 bits it does not keep silu(gate),
since one kernel computes silu(gate) x up; it keeps that product and the norms, as matmuls of the backward pass read
them. In fp8 such a matmul reads the result of a cast, which a kernel of the backward pass makes from what the norm or
the product is made of, so neither is kept (`Stack.casts_again`): of a layer of SmolLM2-1.7B a token keeps 20 h elements
in 16 bits, and 14 h in fp8. Experts stay in 16 bits. Ignored: `precision.fp8_skip_layers`, which leaves layers in 16
bits, and `precision.fp8_experts`.
"""

from dataclasses import dataclass

import numpy as np

from shardwright.cost import ledger, recompute
from shardwright.cost.blocks import Block
from shardwright.cost.formats import FORMATS
from shardwright.cost.job import FULL, SELECTIVE, Candidates, Floats, Job
from shardwright.cost.ledger import Formulas
from shardwright.cost.parameters import vocabulary_rows


@dataclass(frozen=True)
class Layer:
    """Bytes of one layer: `kept` from forward to backward pass, of which `experts` are rows sent to experts; `waiting`:
    kept from I to W; `working`: temporary buffers of its backward pass, with recomputed activations."""

    kept: Floats
    experts: Floats
    waiting: Floats
    working: Floats


@dataclass(frozen=True)
class Ends:
    """Bytes outside of the layers. `first`: a dropout mask after the embedding; `last`: input and output of the last
    norm; `sent`: the output of a stage, if it is kept after the send; `received`: the input of a stage, if it is in a
    buffer for messages; `logits`: kept from the loss to its backward pass, `waiting_logits`: from there to W; `loss`:
    temporary buffers of the loss; `to_head`: the gradient of the head's input; `freed`: the part of `logits` that is
    freed before the gradient of the head's matrix exists."""

    first: Floats
    last: Floats
    sent: Floats
    received: Floats
    logits: Floats
    waiting_logits: Floats
    loss: Floats
    to_head: Floats
    freed: Floats


def layer(job: Job, candidates: Candidates, block: Block, name: str | None = None) -> Layer:
    """One layer of a kind, with each candidate's recomputation. Full recomputation keeps only the block's input.
    `name`: that in the ledger, by default the kind's."""
    name = name or block.name
    with ledger.section(f"Kept of a microbatch by {name}"):
        formulas = Formulas(_symbols(job, candidates) | features(job, candidates, block), "B")
        _attention(job, formulas)
        _networks(job, formulas)
        parts = ["attention", "networks"]
        if block.experts:
            _experts(job, formulas, shared=block.inner > 0)
            parts.append("experts")
        formulas("kept around them", "T_shard * h * (norms * e + branches * mask) + inputs * T_read * h * e_input")
        formulas("everything", " + ".join(["kept_around_them", *(f"kept_of_{part}" for part in parts)]))
        whole, selective = "everything", f"everything{' - scores' * (not job.stack.flash_attention)}"
        shared = candidates.shared
        if job.stack.selective in ("products", "read products"):
            selective = "listed"
            listed = " + ".join(f"listed_of_{part}" for part in parts)
            formulas("listed", f"min(T_shard * h * e + {listed}, everything)")
        elif job.stack.selective == "parts":
            # Under torch.compile only what a matmul reads as it is has to exist before it.
            cast = _CAST * (job.stack.casts_again and FORMATS[job.precision].narrow)
            whole = _without(cast, job, formulas, experts=False)
            if np.any(candidates.recomputes_parts):
                parts_again = (*cast, *shared.recompute_modules)
                selective = _without(parts_again, job, formulas, experts=bool(block.experts))
        again, rows = candidates.recompute, formulas["rows_sent"] if block.experts else 0.0
        formulas.choose(
            "all kept", again, [whole, selective, "T_shard * h * e"],
            "after Korthikanti et al., arXiv 2205.05198, table 2",
        )  # fmt: skip
        gone = (again == FULL) | ((again == SELECTIVE) & (selective == "listed"))
        formulas.values["rows_of_experts"] = np.where(gone, 0.0, rows)
        formulas(f"kept by {name}", "all_kept - rows_of_experts")
        at_once = f"max({', '.join(f'working_of_{part}' for part in parts)})"
        recomputed = f"{at_once} + everything - all_kept"
        formulas.choose(
            f"working of {name}", again, [at_once if whole == "everything" else recomputed, recomputed, recomputed]
        )
        ends = "(norms + inputs) * T" if job.stack.waits_gathered else "(norms * T_shard + inputs * T_read)"
        waiting = " + ".join([f"{ends} * h * e", *(f"{part}_for_W" for part in parts)])
        return Layer(
            kept=formulas["all_kept"],
            experts=formulas["rows_of_experts"],
            waiting=formulas("all for W", waiting),
            working=formulas[ledger.identifier(f"working of {name}")],
        )


_CAST = ("norms", "activation")
"""The parts of a block whose outputs matmuls alone read."""


def _without(parts: tuple[str, ...], job: Job, formulas: Formulas, *, experts: bool) -> str:
    """The formula of everything but the outputs of some parts, those of experts only with `experts`."""
    if not parts:
        return "everything"
    latent = job.model.latent_attention is not None
    less = recompute.not_kept(formulas, tuple(dict.fromkeys(parts)), latent=latent, experts=experts)
    return f"everything - ({less})"


def ends(job: Job, candidates: Candidates) -> Ends:
    """Activations before the first layer and after the last.

    The loss overwrites logits with their gradient, and copies a part of 16-bit ones to fp32 at a time. In other systems
    all of them are copied, and the softmax is kept; `Stack.logit_peak_bytes` is the maximum of logits, copies and
    gradients together. In fp32 there are no copies, but softmax and gradients. Modules of multi-token prediction have
    logits of their own.

    A chunked loss (`layout.loss_chunk_tokens`) has the logits of C tokens, with what is beside them in its sums, and
    keeps the gradients of the head's input and matrix instead of logits; the latter is a sum in 32 bits or more.
    """
    stack, e = job.stack, job.element_bytes
    kept = np.maximum(stack.logit_kept_bytes, e)
    with ledger.section("Kept of a microbatch around the layers"):
        formulas = Formulas(_symbols(job, candidates), "B")
        rows = vocabulary_rows(job.model, candidates.tp, multiple=stack.vocabulary_multiple)
        cut = np.where(candidates.tp > 1, stack.logit_cut_bytes, 0.0)
        formulas.values |= {"vocabulary_rows": rows, "logit_bytes": kept, "keeps_outputs": stack.keeps_outputs}
        formulas.values["receives_ahead"] = stack.receives_ahead
        formulas.values["predictions"] = 1 + job.model.mtp_modules
        times = "predictions * " * (job.model.mtp_modules > 0)
        formulas.values["loss_bytes_a_logit"] = cut + np.maximum(stack.logit_peak_bytes, kept + e) - kept
        formulas.values |= {"sum_bytes": max(4.0, e), "copied": int(e < 4), "logits_together": stack.logits_together}
        formulas.values["loss_buffers"] = np.where(stack.compiles_loss & (candidates.tp == 1), 2, int(e < 4))
        first = formulas("dropout mask", "T_shard * h * mask")
        last = formulas("around the last norm", "(T_shard + T_read) * h * e")
        sent = formulas("sent on", "T_shard * h * e * keeps_outputs")
        received = formulas("in a buffer", "T_shard * h * e * receives_ahead")
        if candidates.shared.loss_chunk_tokens:
            return Ends(first, last, sent, received, *_chunked_loss(candidates, formulas, times))
        logits = formulas("logits of a microbatch", f"{times}T * vocabulary_rows * logit_bytes")
        waiting = formulas("logits for W of a microbatch", f"{times}T * vocabulary_rows * e")
        in_loss = "T * vocabulary_rows * loss_bytes_a_logit"
        if stack.logits_together:
            in_loss = "min(T * vocabulary_rows, logits_together) * sum_bytes * loss_buffers"
        loss = formulas("loss", in_loss, "logits, copies, gradients; cost/stack.py")
        to_head = formulas("gradient of the head's input", "T * h * e")
        return Ends(first, last, sent, received, logits, waiting, loss, to_head, logits - waiting)


def _chunked_loss(candidates: Candidates, formulas: Formulas, times: str) -> tuple[Floats, ...]:
    """`logits` and what follows it in `Ends`; `times`: factor of what each prediction keeps."""
    tokens = formulas["T"]
    formulas.values["C"] = np.minimum(tokens, candidates.shared.loss_chunk_tokens)
    kept = formulas(
        "gradients kept by the loss", f"{times}(T_shard * h * e + vocabulary_rows * h * sum_bytes)", "parallel/loss.py"
    )
    chunk = "C * vocabulary_rows * e + min(C * vocabulary_rows, logits_together) * sum_bytes * loss_buffers"
    product = "(C * vocabulary_rows + vocabulary_rows * h) * e * copied"
    loss = formulas(
        "loss", f"max({chunk}, {product}) + cut * 2 * T * h * e", "logits of a chunk; gathered inputs; parallel/loss.py"
    )
    nothing = np.zeros_like(kept)
    return kept, nothing, loss, nothing, nothing


def _symbols(job: Job, candidates: Candidates) -> ledger.Inputs:
    tokens, fp8 = candidates.tokens(job.seq_len), FORMATS[job.precision].narrow
    outside = tokens / candidates.token_shards
    # A ring has a buffer of keys and values to read and one to receive into.
    gathers = candidates.shared.cp_method == "allgather"
    visiting = candidates.cp if gathers else 2.0
    # Without kv groups the gradients alone; ulysses has all tokens of few heads, as one process has.
    expands = job.stack.expands_heads and candidates.shared.cp_method != "ulysses"
    expanded = (1 + (job.model.n_heads > job.model.n_kv_heads)) * (candidates.cp - 1 if gathers else 1) * expands
    return {
        "T": tokens,
        "T_shard": outside,
        "T_read": tokens if job.stack.keeps_gathered else outside,
        "s": job.seq_len,
        "h": job.model.d_model,
        "tp": candidates.tp,
        "e": job.element_bytes,
        "e_input": job.stack.fp8_input_bytes if fp8 else job.element_bytes,
        "mask": int(job.model.dropout > 0 or job.stack.dropout_masks),
        "cut": (candidates.token_shards > 1).astype(np.int64),
        "visiting": np.where(candidates.cp > 1, visiting, 0.0),
        "expanded": np.where(candidates.cp > 1, expanded, 0),
    }


def features(job: Job, candidates: Candidates, block: Block) -> ledger.Inputs:
    """Features and counts of one layer on a rank."""
    model, latent, moe, stack = job.model, job.model.latent_attention, job.model.moe, job.stack
    heads = model.n_heads / candidates.tp
    kv_heads = np.maximum(model.n_kv_heads / candidates.tp, 1)
    found: ledger.Inputs = {
        "heads": model.n_heads,
        "q": heads * model.qk_dim,
        "k": kv_heads * model.qk_dim,
        "v": kv_heads * model.head_dim,
        "out": heads * model.head_dim,
        "narrow": 0 if latent is None else 2 * (latent.q_rank + latent.kv_rank) + latent.rope_dim,
        # Normed queries and keys; the kernel's padded values and outputs, beside the unpadded outputs that o reads.
        "padding": (heads + kv_heads) * model.qk_dim * (model.qk_norm and latent is None)
        + heads * (2 * model.qk_dim - model.head_dim) * (stack.pads_values and model.qk_dim > model.head_dim),
        "norms": block.norms,
        "branches": block.branches,
        "inputs": block.inputs,
        "inner": block.inner,
        # Gate, up and, unless fused, silu(gate).
        "made": 2 + (not stack.fused_gate) if block.gated else 1,
        # Between the messages of ep experts are not compiled.
        "eager_gate": ((candidates.ep > 1) & (job.compiled and block.gated)).astype(np.int64),
        "tensors": 2 + block.gated,
        "frees_inputs": int(stack.frees_inputs),
        "expert_inner": block.expert_inner,
        # The normed input of a router in 16 bits is kept in fp32 alone where no shared experts read it.
        "copied_alone": int(bool(block.experts) and block.inner == 0 and stack.wide_router and job.element_bytes < 4),
    }
    found |= recompute.features(model, heads, kv_heads)
    if block.experts and moe is not None:
        found |= {
            "top_k": moe.top_k,
            "n_experts": moe.n_experts,
            "exchanged": (candidates.ep > 1) + 0,
            "weighed": int(stack.weighs_outputs),
            "unweighted": int(not stack.weighs_outputs and not block.gated),
            "copied": int(stack.wide_router and job.element_bytes < 4),
        }
    return found


def _attention(job: Job, formulas: Formulas) -> None:
    stored = not job.stack.flash_attention
    a_score = "(2 * e + mask)" if formulas["mask"] else "e"
    formulas(
        "scores", f"T * heads / tp * {f's * {a_score}' if stored else 4}", "stored" if stored else "log-sum-exp, fp32"
    )
    formulas("kept of attention", "T * ((q + k + v + padding) * e + out * e_input) + T_shard * narrow * e + scores")
    # Of a mixture in eager mode, torchtitan recomputes the attention whole. It keeps what the norms around it read and
    # write, which no recomputed module contains (distributed/activation_checkpoint.py since 0943771, 2025-09).
    apart = job.model.moe is not None and job.stack.selective == "products"
    formulas("listed of attention", "2 * T_shard * h * e" if apart else "T * (q + v + out) * e")
    formulas("attention for W", "T * (q + k + v + out) * e + T_shard * narrow * e")
    formulas(
        "working of attention",
        "(T * (q + k + v + out + cut * h + visiting * (k + v) + expanded * (q + out)) + 2 * T_shard * h) * e"
        + " + 2 * T * s * heads / tp * e" * stored, "gradients, and inputs gathered over tp and cp",
    )  # fmt: skip


def _networks(job: Job, formulas: Formulas) -> None:
    """Networks that compute all tokens: a feed-forward network, or shared experts."""
    formulas("kept of networks", "T * inner / tp * (made * e + e_input)")
    formulas("listed of networks", "T * inner / tp * e" + " + T_shard * h * e" * (job.stack.selective == "products"))
    formulas("networks for W", "T * inner / tp * tensors * e")
    formulas(
        "working of networks",
        "(2 * T * cut * h + 2 * T_shard * h + T * inner / tp * (tensors - frees_inputs)) * e", "gradients, inputs",
    )  # fmt: skip


def _experts(job: Job, formulas: Formulas, *, shared: bool) -> None:
    """The router and the routed experts, which are never sharded over tp."""
    formulas("rows sent", "T_shard * top_k * h * (e_input + e * weighed)")
    # The router's input is kept in fp32; without shared experts no other matmul keeps it in 16 bits.
    less = "" if shared else " - T_read * h * e_input * copied"
    formulas("router", f"T_shard * (2 * 4 * n_experts + 4 * h * copied){less}", "scores in fp32")
    made = "T_shard * top_k * expert_inner * ((made + eager_gate + unweighted) * e + e_input)"
    formulas("kept of experts", f"rows_sent + router + {made}")
    formulas("listed of experts", "2 * T_shard * top_k * h * e * exchanged", "outputs of both all-to-alls")
    formulas("experts for W", "T_shard * top_k * (2 * h + tensors * expert_inner) * e")
    formulas(
        "working of experts", "experts_for_W + T_shard * (h - top_k * expert_inner * frees_inputs) * e", "gradients"
    )
