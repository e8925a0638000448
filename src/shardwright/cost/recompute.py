"""Recomputation: the activations that selective recomputation does not keep, and the work and messages that the
backward pass repeats.

The parts are the parts of `layout.recompute_modules` (model/recompute.py), and modules of Megatron-Core that other
programs recompute (`FOREIGN_PARTS`). Notation of cost/activations.py, and a the
number of a network's matrices before its last (2 if gated), m the number of tensors of inner features that it keeps in
addition to the last matrix's input, C and V widths of a key and a value head, N the unrotated part of a key, P the
rotated part.

| part       | bytes that are not kept                                         | computed again                        |
| ---------- | --------------------------------------------------------------- | ------------------------------------- |
| norms      | outputs that matmuls read, T' h e each; of latent vectors       | norms                                 |
| activation | T f / t (m - a + 1) e; likewise for k experts                   | silu(gate) x up, or gelu              |
| rope       | with norms of heads q and k, T (H + K) C / t e; latent:         | norms, rotation, concatenation        |
|            | T (H (2 C - N - V) / t - P) e                                   |                                       |
| mla_up     | T (2 H C / t - P) e, including rope                             | the matmul from latent vectors, rope  |
| attention  | its output, padded and not, the log-sum-exp, and keys and       | attention, with its communication     |
|            | values that it repeats for all heads                            |                                       |
| experts    | T' k g (m + 1) e, including activation                          | first matrices of experts, activation |
| moe_act    | T' k g (m - a + 1) e                                            | silu(gate) x up, or gelu of experts   |
| mlp        | T f / t (m + 1) e, of layers without experts                    | the network, with its messages        |
| shared_experts | T f / t (m + 1) e, of shared experts                        | the network, with its messages        |
| moe        | all of router, experts and shared experts                       | all of them, with their messages      |

If norms keep their inputs in fp32 (cost/activations.py), norms leave out T' h (4 - e) more for each norm, and rope
T (H + K) C / t (4 - e) more.
So a Llama layer with the default, norms and activation, keeps T (2 h + 2 H c + 2 K c + 2 f) e bytes and the
log-sum-exp. Ignored: the all-gather of latent vectors over tp that mla_up repeats.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import replace

import numpy as np

from shardwright.cost import ledger
from shardwright.cost.blocks import BlockShape, FusedRows
from shardwright.cost.job import FULL, Candidates, Floats, Job
from shardwright.cost.ledger import Formulas, plus
from shardwright.cost.matmuls import layer_matmuls
from shardwright.cost.messages import result_of
from shardwright.cost.passes import Passes, kernel_symbols, rotation_bytes
from shardwright.cost.speed import CONTEXT, EXPERT, TENSOR
from shardwright.layout.keys import RECOMPUTE_MODULES
from shardwright.model.spec import ModelSpec

_NOT_KEPT: dict[str, Callable[[Formulas], Floats]] = {
    "norms": lambda f: (
        (f.normed_inputs - f.copied_alone) * f.T_read * f.h * f.e_input + f.T_shard * f.narrow_norms * f.e
    ),
    "activation": lambda f: f.T * f.inner / f.tp * ((f.made - f.tensors + 1) * f.e + f.e_input),
    "rope": lambda f: f.T * f.rotated * f.e,
    "mla_up": lambda f: f.T * f.keys_and_values * f.e,
    "attention": lambda f: f.T * (f.padded_out * f.e + f.out * f.e_input) + f.scores,
    "experts": lambda f: f.T_shard * f.top_k * f.expert_inner * ((f.made + f.eager_gate) * f.e + f.e_input),
    "moe_act": lambda f: _activation_of_experts(f),
    "mlp": lambda f: f.kept_of_networks,
    "shared_experts": lambda f: f.kept_of_networks,
    "moe": lambda f: f.kept_of_networks + f.kept_of_experts,
}
"""The bytes of a layer that are not kept with a part of `layout.recompute_modules`, or with a foreign part."""
FOREIGN_PARTS = ("moe_act", "mlp", "shared_experts", "moe")
"""Modules that Megatron-Core recomputes and Shardwright does not."""
assert tuple(_NOT_KEPT) == (*RECOMPUTE_MODULES, *FOREIGN_PARTS)
_OF_EXPERTS = {"experts", "moe_act", "shared_experts", "moe"}
_IN_MOE = {"experts", "moe_act", "shared_experts"}
_NETWORKS = {"mlp", "shared_experts", "moe"}


def parts_of(job: Job, candidates: Candidates) -> tuple[str, ...]:
    """Return the parts that selective recomputation computes again, also of other programs."""
    return job.stack.recomputed_parts or candidates.shared.recompute_modules


def not_kept(job: Job, f: Formulas, parts: Sequence[str], *, latent: bool, experts: bool) -> Floats:
    """Return the bytes of a layer that are not kept, and record the bytes of each part."""
    terms = []
    for name in _alone(parts, latent=latent, experts=experts):
        n_bytes = _NOT_KEPT[name](f)
        if name == "activation" and experts and "experts" not in parts:
            n_bytes = n_bytes + _activation_of_experts(f)
        if name == "rope" and "attention" not in parts:  # which keeps repeated keys instead of placed ones
            n_bytes = n_bytes - f.T * f.placed_keys * f.e
        if name in ("norms", "rope") and job.widens_layer_norms:
            features = f.T_shard * f.norms * f.h if name == "norms" else f.T * f.widened
            n_bytes = n_bytes + features * (f.e_norm - f.e)
        f(f"not kept of {name}", n_bytes, "cost/recompute.py")
        terms.append(f[f"not kept of {name}"])
    return plus(*terms) if terms else 0 * f.T


def _activation_of_experts(f: Formulas) -> Floats:
    of_an_expert = (f.made + f.eager_gate - f.tensors + 1) * f.e + f.e_input
    n_bytes: Floats = f.T_shard * f.top_k * f.expert_inner * of_an_expert
    return n_bytes


def features(model: ModelSpec, block: BlockShape, heads: Floats, kv_heads: Floats, repeated: Floats) -> ledger.Inputs:
    """Return the symbols of `not_kept` for the heads of a rank, in elements a token; `repeated`: of the keys and values
    that attention itself repeats for all heads."""
    latent, wide = model.latent_attention, max(model.qk_dim, model.head_dim)
    if latent is None:
        placed = (heads + kv_heads) * model.qk_dim * block.norms_heads * (1 + model.qk_norm_heads)
        keys = kv_heads * model.qk_dim * block.norms_heads * (repeated > 0)
        return {"rotated": placed, "placed_keys": keys, "keys_and_values": 0, "padded_out": repeated, "narrow_norms": 0}
    both = heads * (model.qk_dim + wide) - latent.rope_dim
    return {
        "placed_keys": 0,
        "rotated": both - heads * (latent.nope_dim + latent.v_dim),
        "keys_and_values": both,
        "padded_out": heads * wide * (wide > model.head_dim),
        "narrow_norms": latent.q_rank + latent.kv_rank,
    }


def seconds(passes: Passes, job: Job, candidates: Candidates, block: BlockShape) -> Floats:
    """Return the seconds in which the backward pass of a layer computes the parts again; `passes`: without them."""
    spec, tokens = job.model, candidates.tokens(job.seq_len)
    parts = parts_of(job, candidates)
    recomputed = _alone(parts, latent=spec.latent_attention is not None, experts=bool(block.experts))
    places = block.norms_heads or (spec.latent_attention is not None and not block.linear)
    spread = "mla_up" in recomputed or ("rope" in recomputed and places)
    f = kernel_symbols(job, candidates, block)
    moved = {}
    if "norms" in recomputed:
        moved["norms"] = f.T_shard * f.h * f.norms * f.norm_bytes
    if {"activation", *_NETWORKS} & set(recomputed):
        moved["activation"] = f.T * f.inner / f.tp * f.activation_bytes
    if block.experts and {"activation", "experts", "moe_act", "moe"} & set(parts):
        moved["activation of experts"] = f.T / f.tp * f.top_k * f.expert_inner * f.activation_bytes
    if "moe" in recomputed:
        moved["sorting of tokens"] = f.T / f.tp * f.top_k * f.h * f.permute_bytes
    if spread:
        rotated = rotation_bytes(f, job)
        of_heads = rotated + f.norm_bytes if block.norms_heads else rotated
        moved["heads"] = f.T * f.qk_dim * (f.heads + f.kv_heads) / f.tp * of_heads
    n_bytes = {name: f(name, formula) for what, formula in moved.items() if (name := f"bytes of {what} again")}
    terms = {}
    if n_bytes:
        f.add(bytes_moved_again=ledger.total("bytes moved again", n_bytes, "B"))
        again_s = f.e / 2 * f.bytes_moved_again / f.element_rate
        terms["element-wise, again"] = f("element-wise, again", again_s, "memory bounds them", unit="s")
    if "attention" in recomputed:
        terms |= {f"{kind}, F": passes.forward[kind] for kind in ("attention", CONTEXT) if kind in passes.forward}
    if _NETWORKS & set(recomputed) and TENSOR in passes.forward:  # half of the messages are of the network
        terms["messages of the network"] = passes.forward[TENSOR] / 2
    if "moe" in recomputed:
        terms[f"{EXPERT}, F"] = passes.forward[EXPERT]
    wanted = {group.name for group in block.matmuls if _again(group, recomputed, block)}
    for matmul in layer_matmuls(job, candidates, block, tokens) if wanted else ():
        if matmul.name in wanted:
            terms[matmul.name] = matmul.seconds(job)
    return ledger.total("selective recomputation", terms)


def last_matmul(job: Job, block: BlockShape) -> FusedRows | None:
    """Return the matmul that full recomputation leaves out; of a target not its adapter, which runs before. It stops at
    the last tensor that the backward pass reads, which is this matmul's input. Return None if a later tensor is read:
    the outputs of routed experts, to be weighted, the input of a norm after the branch, the tensors that dropout keeps,
    or an output that DoRA scales."""
    last = next(group for group in reversed(block.matmuls) if not group.rows[0].adapter)
    reads_later = block.experts or block.norms_after or job.model.dropout or last.rows[0] in block.scaled_matrices
    return last if job.stack.stops_early and not reads_later else None


def left_out(passes: Passes, job: Job, candidates: Candidates, block: BlockShape) -> dict[str, Floats]:
    """Return the seconds that full recomputation leaves out, by name: the last matmul, and its message over tp."""
    last, tokens = last_matmul(job, block), candidates.tokens(job.seq_len)
    if last is None:
        return {}
    by_name = {
        matmul.name: matmul.seconds(job)
        for matmul in layer_matmuls(job, candidates, block, tokens)
        if matmul.name == last.name
    }
    of_result = f"{result_of(block.regions[-1])}, "
    sent = [message for message in passes.forward_messages.get(TENSOR, []) if message.what.startswith(of_result)]
    by_name |= {message.what: message.seconds(job.cluster) for message in sent}
    return {name: seconds for name, seconds in by_name.items() if np.any(seconds)}


def record_messages(passes: Passes, job: Job, candidates: Candidates, but: Container[str]) -> None:
    """Add the messages that recomputation repeats: with full recomputation all messages of F, except those named in the
    last argument; with attention or moe as a part, its messages. Ignored: the messages of networks over tp."""
    full = (candidates.recompute == FULL).astype(int)
    by_part = {CONTEXT: "attention", EXPERT: "moe"}
    for kind, messages in passes.forward_messages.items():
        part = candidates.recomputes_parts * (by_part.get(kind) in parts_of(job, candidates))
        calls = full + part
        for message in messages:
            if message.what not in but:
                passes.record(replace(message, what=f"{message.what}, again", calls=message.calls * calls))


def _again(group: FusedRows, parts: Sequence[str], block: BlockShape) -> bool:
    """Return whether a matmul is computed again: from latent vectors to keys and values, of experts, of networks."""
    first = group.rows[0]
    if first.split == "experts":
        return "moe" in parts or ("experts" in parts and "experts.down" not in first.name)
    if first.kind == "router":
        return "moe" in parts
    if _NETWORKS & set(parts) and any(first in (last, *into) for last, into in block.networks.items()):
        return True
    return "mla_up" in parts and any(row.module.endswith("kv_up") for row in group.rows)


def _alone(parts: Sequence[str], *, latent: bool, experts: bool) -> list[str]:
    """Return the parts that a layer has and that no other of these parts includes."""
    without = {"mlp"} if experts else set(_OF_EXPERTS)
    without |= _IN_MOE if "moe" in parts else set()
    without |= ({"rope"} if "mla_up" in parts else set()) if latent else {"mla_up"}
    return [name for name in _NOT_KEPT if name in parts and name not in without]
