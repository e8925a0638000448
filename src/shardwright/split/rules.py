"""Rules for layouts to fit a model and a sequence length, with their arithmetic and the valid choices."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from math import lcm
from typing import Any, Literal

from shardwright.layout.keys import RECOMPUTE_MODULES
from shardwright.layout.layout import Layout
from shardwright.model.modules import layer_rows, rows
from shardwright.model.sections import MoESpec
from shardwright.model.spec import ModelSpec
from shardwright.schedule.registry import find, names
from shardwright.split import stages
from shardwright.split.tensor import vocabulary_rows
from shardwright.system.units import division, division_problem


def problems(spec: ModelSpec, layout: Layout, seq_len: int) -> list[str]:
    """Return one sentence for each rule that `layout` breaks for this model and sequence length; empty if it fits."""
    broken = [*_tensor(spec, layout.tp), *_linear(spec, layout), *_context(spec, layout), *_experts(spec, layout)]
    of_stages = list(stages.problems(spec, layout))
    broken += of_stages or [*_recomputation(spec, layout, seq_len), *_adapters(spec, layout, seq_len)]
    # The sequence length is only checked for a valid tp.
    return broken + list(
        _sequence(
            layout if tp_divides(spec, layout.tp) else replace(layout, tp=1, ep=1, place_experts_every=0), seq_len
        )
    )


TokenCall = Literal["generate", "log_probs", "weights"]
"""A call that needs the logits of each token; `weights`: of `forward_backward`."""


def token_call_problems(spec: ModelSpec, layout: Layout, call: TokenCall) -> list[str]:
    """Return one sentence for each reason why a model on a layout that fits it (`problems`) cannot run `call`."""
    broken = []
    if layout.loss_chunk_tokens:
        broken.append(
            f"{call} needs the logits of each token, and layout.loss_chunk_tokens={layout.loss_chunk_tokens} computes "
            f"them within the loss; set loss_chunk_tokens=0"
        )
    if call == "weights" and spec.mtp_modules:
        broken.append(
            f"weights with model.mtp_modules={spec.mtp_modules}: the losses of later tokens have no weights; set "
            f"mtp_modules=0"
        )
    if call == "generate":
        if layout.ways != (in_order := (tuple(range(layout.pp)),)):
            valid = [name for name in names() if find(name).ways(layout.pp, find(name).virtual_stages) == in_order]
            broken.append(
                f"generate runs one stage on each rank of pp, and layout.pp_schedule={layout.pp_schedule!r} has "
                f"{len(layout.stages_on(0))} on a rank; valid: {', '.join(valid)}"
            )
        if spec.moe is not None and spec.moe.capacity_factor:
            broken.append(
                f"generate with model.moe.capacity_factor={spec.moe.capacity_factor:g}: an expert would drop tokens "
                f"of a prompt because of the other prompts; set capacity_factor=0"
            )
    if call != "weights" and spec.moe is not None and spec.moe.force_balance:
        broken.append(f"{call} with model.moe.force_balance: the experts of a token are drawn; set force_balance=False")
    return broken


def pair_loss_problems(kind: str, spec: ModelSpec | None, layout: Layout | None) -> Iterator[str]:
    """Yield the reasons why a model or a layout cannot compute the loss of pairs, in training and in evaluation."""
    if spec and spec.mtp_modules:
        yield (
            f"preference.kind={kind!r} with model.mtp_modules={spec.mtp_modules}: a pair has no loss of later tokens; "
            f"set model.mtp_modules=0"
        )
    if layout and layout.loss_chunk_tokens:
        yield (
            f"preference.kind={kind!r} with layout.loss_chunk_tokens={layout.loss_chunk_tokens}: the gradient of a "
            f"token depends on all tokens of its pair, so no chunk is complete on its own; set loss_chunk_tokens=0"
        )


def batch_invariance_problems(spec: ModelSpec, layout: Layout) -> list[str]:
    """Return one sentence for each reason why a model on a layout cannot compute equal bits in training, scoring and
    generation (`model/batch_invariant.py`)."""
    broken = []
    if layout.tp > 2:
        broken.append(
            f"batch invariance with layout.tp={layout.tp}: an all-reduce of more than two ranks adds their parts of a "
            f"number in an order that depends on its place in the message; valid: 1, 2"
        )
    if layout.cp > 1:
        broken.append(
            f"batch invariance with layout.cp={layout.cp}: ranks of cp merge the attention of their own keys, and the "
            f"rank of a key depends on the length of the sequence; valid: 1"
        )
    if spec.latent_attention is not None:
        broken.append(
            "batch invariance with latent attention: training multiplies the matrix of keys by latent vectors, "
            "decoding by queries, which rounds differently; valid: models with keys and values of heads"
        )
    if spec.linear_attention is not None:
        broken.append(
            "batch invariance with linear attention: training computes chunks of tokens, decoding one token after "
            "another, which rounds differently; valid: models with softmax attention in every layer"
        )
    if spec.moe is not None and spec.moe.capacity_factor:
        broken.append(
            f"batch invariance with model.moe.capacity_factor={spec.moe.capacity_factor:g}: an expert drops tokens by "
            f"the number of tokens of the pass, padding included; valid: 0"
        )
    return broken


def expert_call_problems(spec: ModelSpec, layout: Layout, compiled: bool = False) -> list[str]:
    """Return one sentence for each reason why the experts of tokens cannot be recorded or replayed."""
    if spec.moe is None:
        return ["the model has no experts (model.moe), so no choices of experts can be recorded or replayed"]
    broken = []
    if spec.moe.force_balance:
        broken.append("choices of experts with model.moe.force_balance: experts are drawn; set force_balance=False")
    if layout.pp_schedule in ("dualpipe", "dualpipe-v"):
        broken.append(
            f"choices of experts with layout.pp_schedule={layout.pp_schedule!r}: micro-batches arrive at a stage from "
            f"both ends of the pipeline; valid: 1f1b, or another schedule with one direction"
        )
    if compiled:
        broken.append(
            "choices of experts with compile: a compiled block cannot take them one after another; set it to False"
        )
    return broken


def _tensor(spec: ModelSpec, tp: int) -> Iterator[str]:
    for what, size in (("query heads (model.n_heads)", spec.n_heads), ("ffn features (model.d_ffn)", spec.d_ffn)):
        if problem := division_problem("layout.tp", tp, size, f"{size} {what}", partial(_valid_tp, spec)):
            yield problem
    kv = spec.n_kv_heads
    if spec.n_heads % tp == 0 and not heads_divide(spec.n_heads, kv, tp):
        yield (
            f"layout.tp={tp} neither divides {kv} kv heads (model.n_kv_heads) nor is a multiple of them "
            f"{division(kv, tp) if tp < kv else division(tp, kv)}, so kv heads can be neither sharded nor replicated "
            f"evenly; valid: {_listed(_valid_tp(spec))}"
        )
    elif not _vocabulary_reaches(spec, tp):
        yield (
            f"layout.tp={tp} leaves a rank without a row of the vocabulary: {spec.vocab_size} rows in shards of "
            f"{-(-spec.vocab_size // tp)}; valid: {_listed(_valid_tp(spec))}"
        )


def _linear(spec: ModelSpec, layout: Layout) -> Iterator[str]:
    """Yield the rules of linear attention layers."""
    linear = spec.linear_attention
    if linear is not None:
        what = f"{linear.n_k_heads} key heads (model.linear_attention.n_k_heads)"
        if problem := division_problem("layout.tp", layout.tp, linear.n_k_heads, what, partial(_valid_tp, spec)):
            yield problem


def _valid_tp(spec: ModelSpec) -> list[int]:
    """Return every valid tp degree of the model."""
    return [tp for tp in range(1, spec.n_heads + 1) if tp_divides(spec, tp)]


def _listed(values: Iterable[int]) -> str:
    return ", ".join(map(str, values))


def tp_divides(spec: ModelSpec, tp: int) -> bool:
    """Return whether heads, kv heads, ffn features and vocabulary can be sharded over `tp` ranks."""
    return layers_divide(spec, tp) and _vocabulary_reaches(spec, tp)


def layers_divide(spec: ModelSpec, tp: int) -> bool:
    """Return whether heads, kv heads and ffn features can be sharded over `tp` ranks, or kv heads replicated evenly."""
    heads = heads_divide(spec.n_heads, spec.n_kv_heads, tp)
    return bool(heads) and spec.d_ffn % tp == 0 and _linear_heads_divide(spec, tp)


def _linear_heads_divide(spec: ModelSpec, tp: int) -> bool:
    """Return whether `tp` divides the key heads of linear attention; without linear attention every degree does."""
    return spec.linear_attention is None or spec.linear_attention.n_k_heads % tp == 0


def _vocabulary_reaches(spec: ModelSpec, tp: int) -> bool:
    return all(vocabulary_rows(spec.vocab_size, tp, rank) for rank in range(tp))


def _context(spec: ModelSpec, layout: Layout) -> Iterator[str]:
    degree, tp = layout.cp_ulysses, layout.tp
    if degree == 1 or not tp_divides(spec, tp):
        return
    heads, kv = heads_of_rank(spec, tp)
    name = "cp" if layout.cp_method == "ulysses" else "ulysses_degree"
    if not heads_divide(heads, kv, degree):
        valid = ", ".join(str(n) for n in range(1, heads + 1) if heads_divide(heads, kv, n))
        yield (
            f"layout.{name}={degree} partitions the heads of a rank, with tp={tp} {heads} query and {kv} kv heads: it "
            f"has to divide {heads} {division(heads, degree)}, and to divide {kv} or be a multiple of it; valid: "
            f"{valid}; cp_method='zigzag' has no such limit"
        )


def heads_of_rank(spec: ModelSpec, tp: Any) -> tuple[Any, Any]:
    """Return the query heads and the kv heads of a rank of tp. `tp`: an integer, or an array of integers, which gives
    arrays."""
    return spec.n_heads // tp, spec.n_kv_heads // tp + (spec.n_kv_heads < tp)


def heads_divide(heads: Any, kv: Any, degree: Any) -> Any:
    """Return whether query heads and kv heads can be partitioned over `degree` ranks, each kv head on one of them or
    replicated evenly. The arguments are integers, or arrays of integers, which give an array of booleans."""
    return (heads % degree == 0) & ((kv % degree == 0) | (degree % kv == 0))


def expert_sizes(spec: ModelSpec) -> dict[str, int]:
    """Return the sizes of the second dim of the parameters of routed experts, by the key of the run file."""
    adapted = any(row.adapter and row.kind == "expert" for row in rows(spec).values())
    sizes = {"model.moe.d_ffn": spec.moe.d_ffn, "model.d_model": spec.d_model} if spec.moe else {}
    return sizes | ({"lora.rank": spec.lora.rank} if spec.lora and adapted else {})


def experts_divide(spec: ModelSpec, ep: int) -> bool:
    """Return whether `ep` divides the experts of the model; without experts only 1 does."""
    return experts_problem("ep", ep, spec.n_experts) is None


def experts_problem(key: str, ep: int, n_experts: int, what: str = "experts") -> str | None:
    """Return why `ep`, the value of `key`, does not divide the experts of a model, or None. `what`: their name."""
    if n_experts == 0:
        return f"{key}={ep} shards experts, and the model has none; valid: 1" if ep > 1 else None
    return division_problem(key, ep, n_experts, f"{n_experts} {what}")


def expert_shards_fit(moe: MoESpec, size: int, zero: Any, tp: Any, ep: Any, ranks: Any) -> Any:
    """Return whether ZeRO can shard the experts of a rank over `ranks` ranks: by experts, or along a dim of `size`
    elements, or with other parameters if neither tp nor ep shards them. The last four arguments are integers, or arrays
    of integers, which give an array of booleans."""
    return ((moe.n_experts // ep) % ranks == 0) | (size % ranks == 0) | (zero == 0) | (ep * tp == 1)


def _experts(spec: ModelSpec, layout: Layout) -> Iterator[str]:
    moe, experts = spec.moe, spec.n_experts
    if problem := experts_problem("layout.ep", layout.ep, experts, "experts (model.moe.n_experts)"):
        yield problem
    if moe is None:
        return
    if layout.tp > 1 and not layout.sequence_parallel:
        yield (
            f"layout.tp={layout.tp} with model.moe needs layout.sequence_parallel=true: ranks of tp with the same "
            f"tokens would each send all of them to the experts"
        )
    together, of_rank = moe.movable_together, experts // layout.ep
    if layout.place_experts_every and together <= of_rank:
        yield (
            f"layout.place_experts_every={layout.place_experts_every}: with model.moe.groups_per_token="
            f"{moe.groups_per_token} experts move within their group of {together}, and a rank has {of_rank} experts, "
            f"the whole group; set ep above {moe.n_groups}, or place_experts_every=0"
        )
    ranks = layout.expert_dp_shard
    for name, size in expert_sizes(spec).items():
        if not expert_shards_fit(moe, size, layout.zero, layout.tp, layout.ep, ranks):
            yield (
                f"layout.zero={layout.zero} shards the experts of a rank over {ranks} ranks (dp_shard x cp x tp / ep), "
                f"which divide neither the {experts // layout.ep} experts nor {name}={size}; choose a larger ep"
                f"{' or another rank' if name == 'lora.rank' else ''}"
            )


def _recomputation(spec: ModelSpec, layout: Layout, seq_len: int) -> Iterator[str]:
    """Yield problems of the recomputation settings. The stages must be valid."""
    if layout.recompute_layers is not None:
        most = stages.most_layers(spec, layout, seq_len)
        if layout.recompute_layers > most:
            cap = "a stage has at most" if layout.pp > 1 else "the model has"
            yield (
                f"layout.recompute_layers={layout.recompute_layers}: {cap} {most} layers; valid: 1 to {most}, or leave "
                f"it out, for all"
            )
    latent = spec.latent_attention is not None
    missing = {"experts": spec.moe is None, "mla_up": not latent, "rope": not (latent or spec.qk_norm)}
    if layout.recomputes_parts and all(missing.get(part) for part in layout.recompute_modules):
        valid = ", ".join(part for part in RECOMPUTE_MODULES if not missing.get(part))
        yield (
            f"layout.recompute_modules={list(layout.recompute_modules)}: the model has none of these parts, so nothing "
            f"would be recomputed; valid: {valid}"
        )


def _adapters(spec: ModelSpec, layout: Layout, seq_len: int) -> Iterator[str]:
    """Yield the reasons why bytes of a quantised base would be sent as integers of other values, and why the backward
    pass would not start a stage: its output has no gradient."""
    if spec.lora is not None and spec.lora.base != "compute" and layout.compress_weights != "none":
        yield (
            f"layout.compress_weights={layout.compress_weights!r} with lora.base={spec.lora.base!r}: the frozen "
            f"matrices are sent in {spec.lora.base} already; set compress_weights='none'"
        )
    if spec.lora is not None and layout.place_experts_every:
        yield (
            f"layout.place_experts_every={layout.place_experts_every} with lora.rank={spec.lora.rank}: no checkpoint "
            f"has the frozen experts, so a run that rolls back would not know their order; set place_experts_every=0"
        )
    if spec.lora is None or layout.pp == 1:
        return
    adapted = [layer for layer in range(spec.n_blocks) if any(row.adapter for row in layer_rows(spec, layer))]
    first = stages.stage_layers(spec, layout, seq_len)[0]
    if adapted and adapted[0] >= first.stop:
        yield (
            f"layout.pp={layout.pp}: the first pipeline stage has layers 0 to {first.stop - 1}, and the first layer "
            f"with an adapter is {adapted[0]}; add a target to lora.targets that layer 0 has, or lower pp"
        )


def zigzag_chunks(ring: Any) -> Any:
    """Return the chunks of a sequence in a zigzag ring of `ring` ranks: two a rank, and one in all for one rank.
    `ring`: an integer, or an array of integers, which gives an array."""
    return 2 * ring - (ring == 1)


def _sequence(layout: Layout, seq_len: int) -> Iterator[str]:
    cuts = sequence_cuts(layout)
    local, rest = divmod(seq_len, cuts)
    if rest:
        rules = {words: parts for words, parts in _cuts(layout).items() if parts == cuts} or _cuts(layout)
        what = next(iter(rules)) if len(rules) == 1 or cuts in rules.values() else f"{cuts}, for {' and '.join(rules)}"
        nearest = f"{local * cuts} or {(local + 1) * cuts}" if local else str(cuts)
        yield f"batch.seq_len={seq_len} is not a multiple of {what} {division(seq_len, cuts)}; nearest: {nearest}"


def sequence_cuts(layout: Layout) -> int:
    """Return the number that must divide the sequence length, so that all ranks have the same number of tokens."""
    return lcm(*_cuts(layout).values())


def sequence_parts(method: str, ring: Any, cp: Any, shards: Any) -> tuple[Any, Any]:
    """Return the numbers of equal parts into which a sequence is partitioned: the chunks of a ring, and the shards of
    tokens over cp and tp. `shards`: the ranks of tp that shard tokens. The last three arguments are integers, or arrays
    of integers, which give arrays."""
    return 1 if method == "ring" else zigzag_chunks(ring), cp * shards


def _cuts(layout: Layout) -> dict[str, int]:
    """Return each partition of a sequence into equal parts: its description -> the number of parts."""
    cuts = {}
    shards = layout.tp if layout.token_shards else 1
    chunks, of_tokens = sequence_parts(layout.cp_method, layout.cp_ring, layout.cp, shards)
    if chunks > 1:
        cuts[f"2 x {layout.cp_ring} = {chunks} chunks (cp_method={layout.cp_method!r})"] = chunks
    if of_tokens > 1:
        axes = [f"{axis}={n}" for axis, n in (("cp", layout.cp), ("tp", shards)) if n > 1]
        product = f" = {of_tokens}" if len(axes) > 1 else ""
        cuts[f"{' x '.join(axes)}{product}{' (sequence_parallel)' if shards > 1 else ''}"] = of_tokens
    return cuts
