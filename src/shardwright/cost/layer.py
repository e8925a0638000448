"""Seconds of a layer's forward and backward passes on one rank, by kind of work.

The passes are F (forward), I (gradient of the input) and W (gradients of weights); with recomputation I includes a
second forward pass. Each kind of work has its own formulas, and the parts of a step are their sums.
"""

from collections.abc import Iterable

import numpy as np

from shardwright.cost import activations, ledger, recompute
from shardwright.cost.blocks import Block
from shardwright.cost.collectives import all_gather, all_reduce, reduce_scatter
from shardwright.cost.formats import FORMATS
from shardwright.cost.job import FULL, RECOMPUTE, Candidates, Floats, Job
from shardwright.cost.kinds import ELEMENTWISE, HOST, MATMULS, TENSOR
from shardwright.cost.matmuls import Matmul, head_matmul, layer_matmuls, reached_flops_per_s
from shardwright.cost.messages import context, dispatch, head_over_tp, loss_sums, over_tp, tensor
from shardwright.cost.passes import Passes, reached_bytes_per_s

CASTS = "casts of inputs"
BACKWARD_TRAFFIC = 1.5
"""Bytes that an element-wise operation moves in the backward pass, relative to the forward pass: two inputs instead of
one, and one output."""


def layer(job: Job, candidates: Candidates, block: Block, name: str | None = None) -> Passes:
    """The passes of one layer of a kind; `name`: that in the ledger, by default the kind's."""
    passes = Passes(name or block.name)
    with ledger.section(f"{passes.of[0].upper()}{passes.of[1:]}, one microbatch"):
        tokens = candidates.tokens(job.seq_len)
        _multiply(passes, job, candidates, layer_matmuls(job, candidates, block, tokens))
        _attend(passes, job, candidates, tokens)
        _elementwise(passes, job, candidates, block, tokens)
        tensor(passes, job, candidates, block, tokens)
        context(passes, job, candidates, tokens)
        if block.experts:
            dispatch(passes, job, candidates, tokens)
        _recompute(passes, job, candidates, block)
        _launch(passes, job, candidates, block)
        if candidates.shared.offload_activations == "cpu":
            _copy_activations(passes, job, candidates, block)
        passes.note()
    return passes


def _copy_activations(passes: Passes, job: Job, candidates: Candidates, block: Block) -> None:
    """What copies of activations to the host, and back, take longer than the pass of a layer beside which they run.
    Ignored: tensors of few bytes, which stay, and the memory bandwidth that copies take from kernels."""
    kept = activations.layer(job, candidates, block, passes.of).kept
    forward, backward_input, weight = passes.totals
    backward = backward_input if candidates.kind.splits_backward else backward_input + weight
    for name, beside in (("F", forward), ("I", backward)):
        longer = ledger.compute(
            f"{HOST}, {name}", "max(0 * kept, kept / host_rate - pass_beside_it)", "s", "parallel/offload.py",
            kept=kept, host_rate=job.cluster.accelerator.host_bytes_per_s, pass_beside_it=beside,
        )  # fmt: skip
        passes.add(HOST, *((longer, 0.0) if name == "F" else (0.0, longer)))


def head(job: Job, candidates: Candidates) -> Passes:
    """The passes of final norm, logits and loss. The loss reads and writes the logits several times in fp32. A chunked
    loss does all of it in F."""
    if candidates.shared.loss_chunk_tokens:
        return _chunked_head(job, candidates)
    passes = Passes("the head")
    with ledger.section("Head, one microbatch"):
        tokens, spec = candidates.tokens(job.seq_len), job.model
        _multiply(passes, job, candidates, [head_matmul(job, candidates, tokens)])
        moved = [
            ledger.compute(
                f"{ELEMENTWISE}, {name}", "loss_bytes * (T * V / tp) / 2 / element_rate", "s", "cost/speed.py",
                loss_bytes=_loss_bytes(job, candidates), T=tokens, V=spec.vocab_size, tp=candidates.tp,
                element_rate=reached_bytes_per_s(job),
            ) for name in "FI"
        ]  # fmt: skip
        passes.add(ELEMENTWISE, *moved)
        head_over_tp(passes, job, candidates, tokens)
        _launch_ends(passes, job)
        passes.note()
    return passes


def _loss_bytes(job: Job, candidates: Candidates) -> Floats:
    """Bytes that the loss moves for a logit, forward and backward. Ignored: a chunked loss multiplies no logits by the
    gradient of the loss."""
    speed, over_tp = job.stack.speed, candidates.tp > 1
    narrow = speed.loss_cast_bytes + speed.loss_over_tp_bytes * over_tp
    return np.asarray(speed.loss_bytes + narrow * (job.element_bytes < 4), dtype=np.float64)


def _chunked_head(job: Job, candidates: Candidates) -> Passes:
    """The three matmuls and the loss of each chunk, all in F. In 16 bits each gradient of the matrix is written, read,
    and added to a sum in fp32; I multiplies the gradients that are kept by that of the loss. The input is gathered over
    tp once, as it is kept."""
    passes = Passes("the head")
    with ledger.section("Head, one microbatch"):
        tokens, spec = candidates.tokens(job.seq_len), job.model
        chunk = np.minimum(tokens, candidates.shared.loss_chunk_tokens)
        one, e = head_matmul(job, candidates, chunk), job.element_bytes
        inside = {each.name: each.seconds(job) for each in (one, one.for_input, one.for_weight)}
        symbols: ledger.Inputs = {
            "T": tokens, "C": chunk, "V": spec.vocab_size, "tp": candidates.tp, "h": spec.d_model, "e": e,
            "sum_bytes": max(4, e), "loss_bytes": _loss_bytes(job, candidates),
            "element_rate": reached_bytes_per_s(job),
            "matmuls_of_a_chunk": ledger.total("matmuls of a chunk", inside),
        }  # fmt: skip
        passes.add(MATMULS, ledger.compute(f"{MATMULS}, F", "ceil(T / C) * matmuls_of_a_chunk", **symbols), 0.0)
        added = "2 * sum_bytes" + " + 2 * e" * (e < 4)
        forward = ledger.compute(
            f"{ELEMENTWISE}, F",
            f"(loss_bytes * (T * V / tp) + ceil(T / C) * ({added}) * (V / tp * h)) / element_rate",
            "s",
            "cost/speed.py; sum of the gradients over chunks",
            **symbols,
        )
        backward = ledger.compute(
            f"{ELEMENTWISE}, I", "(2 * sum_bytes + e) * (V / tp * h) / element_rate", "s",
            "gradients times that of the loss", **symbols,
        )  # fmt: skip
        passes.add(ELEMENTWISE, forward, backward)
        given = tokens * spec.d_model * e
        both = over_tp(passes, job, candidates, given, "input", all_gather, None)
        both |= over_tp(passes, job, candidates, given, "gradient of the input", reduce_scatter, all_reduce)
        both |= loss_sums(passes, job, candidates, tokens, np.ceil(tokens / chunk))
        passes.add(TENSOR, ledger.total(f"{TENSOR}, F", both), 0.0)
        _launch_ends(passes, job)
        passes.note()
    return passes


def embedding(job: Job, candidates: Candidates) -> Passes:
    """The passes of the embedding lookup. Over tp each rank holds a shard of the rows, so the outputs are summed, and
    with token shards the gradients are all-gathered."""
    passes = Passes("the embedding")
    with ledger.section("Embedding, one microbatch"):
        tokens, h = candidates.tokens(job.seq_len), job.model.d_model
        moved = [
            ledger.compute(
                f"{ELEMENTWISE}, {name}", "2 * (T * h * e) / element_rate", "s", "rows read and written", T=tokens,
                h=h, e=job.element_bytes, element_rate=reached_bytes_per_s(job),
            ) for name in "FI"
        ]  # fmt: skip
        passes.add(ELEMENTWISE, *moved)
        n_bytes = tokens * h * job.element_bytes
        forward = over_tp(passes, job, candidates, n_bytes, "rows", reduce_scatter, all_reduce)
        backward = over_tp(passes, job, candidates, n_bytes, "gradients of rows", all_gather, None)
        passes.add(TENSOR, ledger.total(f"{TENSOR}, F", forward), ledger.total(f"{TENSOR}, I", backward))
        passes.note()
    return passes


def _multiply(passes: Passes, job: Job, candidates: Candidates, matmuls: Iterable[Matmul]) -> None:
    """Matmuls with weights, forward and for both gradients. In formats of fewer than 16 bits their inputs are cast
    first: those that are gathered over tp before that, if the format and the stack allow it, and weights once a step
    where the casts are kept."""
    those = list(matmuls)
    in_each_pass = (those, [each.for_input for each in those], [each.for_weight for each in those])
    seconds = (
        ledger.total(f"{MATMULS}, {name}", {each.name: each.seconds(job) for each in inside})
        for name, inside in zip("FIW", in_each_pass, strict=True)
    )
    passes.add(MATMULS, *seconds)
    weights = sum((np.asarray(each.batch * each.k * each.n) for each in those), np.zeros(1))
    if sum_bytes := job.stack.speed.sum_bytes:
        summed = ledger.compute(
            f"{ELEMENTWISE}, W", "sum_bytes * elements / element_rate", "s", "sums of gradients in fp32",
            sum_bytes=sum_bytes, elements=weights, element_rate=reached_bytes_per_s(job),
        )  # fmt: skip
        passes.add(ELEMENTWISE, 0.0, 0.0, summed)
    form = FORMATS[job.precision]
    cast = [each for each in those if not each.precision] if form.narrow else []
    if cast:
        early = job.stack.speed.gathers_narrow and form.gathered_bytes < job.element_bytes
        inputs = sum(each.batch * each.m * each.k / (each.input_shards if early else 1) for each in cast)
        of_results = sum(each.batch * each.m * each.n / (each.output_shards if early else 1) for each in cast)
        of_weights = sum(each.batch * each.k * each.n for each in cast)
        again = sum(each.batch * each.m * each.k for each in cast)
        times = candidates.microbatches(job.global_batch) if job.stack.keeps_casts else 1
        elements = (inputs + of_weights / times, again + of_results)
        moved = [
            ledger.compute(
                f"{CASTS}, {name}", "cast_bytes * elements / element_rate", "s", "cost/formats.py",
                cast_bytes=form.casts(job.stack.speed.fuses_casts), elements=n, element_rate=reached_bytes_per_s(job),
            ) for name, n in zip("FI", elements, strict=True)
        ]  # fmt: skip
        passes.add(ELEMENTWISE, *moved)


def _attend(passes: Passes, job: Job, candidates: Candidates, tokens: Floats) -> None:
    """The matmuls of attention. Fused attention computes the half of the scores that is not masked, but whole blocks on
    the diagonal, at a fraction of the peak that grows with the head width and the length. Without it batched matmuls
    compute the whole square, and the scores are written to memory and read between them. With cp_method "ring" the last
    rank of cp has the most scores, 2 - 1 / cp of the mean.

    Within documents fused attention computes the scores of each document, document_tokens in place of s; for "ring"
    that share is then an upper bound. Stored scores are of the whole sequence, and masked.
    """
    attended, n_attended = job.attended
    spec, fitted, chip = job.model, job.calibration, job.cluster.accelerator
    width = (spec.qk_dim + spec.head_dim) / 2
    symbols: ledger.Inputs = {"T": tokens, "s": job.seq_len, "heads": spec.n_heads, "c": width, "tp": candidates.tp}
    symbols |= {"cp": candidates.cp, attended: n_attended}
    if job.stack.flash_attention:
        symbols["FLOPs_of_attention"] = ledger.compute(
            "FLOPs of attention",
            f"4 * T * {attended} * (heads / tp) * c * (0.5 + 64 / {attended})",
            "FLOP",
            "of F",
            **symbols,
        )
        symbols["rate_of_attention"] = ledger.compute(
            "rate of attention", f"rate * (flash_share * c / (c + c0) * {attended} / ({attended} + s0)) * flash_gain",
            "FLOP/s", "cost/calibration.toml, cost/speed.py", c=width, c0=fitted.flash_width, s0=fitted.flash_length,
            rate=reached_flops_per_s(job, job.wide_precision), flash_share=fitted.flash(chip.die),
            flash_gain=job.stack.speed.on(chip.die).flash_gain, **{attended: n_attended},
        )  # fmt: skip
        symbols["flash_backward"] = fitted.flash_backward
        formulas = [f"FLOPs_of_attention{times} / rate_of_attention" for times in ("", " * flash_backward")]
    else:
        queries, keys, batch = (
            job.seq_len / candidates.cp,
            float(job.seq_len),
            candidates.micro_batch * (spec.n_heads / candidates.tp),
        )
        products = [
            Matmul("scores", queries, spec.qk_dim, keys, batch, job.wide_precision),
            Matmul("scores by values", queries, keys, spec.head_dim, batch, job.wide_precision),
        ]
        gradients = [(each.for_input, each.for_weight) for each in products]
        for each in (*products, *gradients[0], *gradients[1]):
            symbols[ledger.identifier(each.name)] = each.seconds(job)
        symbols |= {"element_rate": reached_bytes_per_s(job), "score_bytes": fitted.score_bytes}
        symbols["score_bytes_I"] = fitted.score_bytes_backward
        forward = " + ".join(ledger.identifier(each.name) for each in products)
        backward = " + ".join(f"({ledger.identifier(i.name)} + {ledger.identifier(w.name)})" for i, w in gradients)
        moved = "* (T * s * (heads / tp)) / element_rate"
        formulas = [f"{forward} + score_bytes {moved}", f"{backward} + score_bytes_I {moved}"]
    if candidates.shared.cp_method == "ring" and np.any(candidates.cp > 1):
        formulas = [f"({formula}) + ({formula}) * (1 - 1 / cp)" for formula in formulas]
    source = "Dao, arXiv 2307.08691, section 3" if job.stack.flash_attention else "stored scores; cost/calibration.toml"
    seconds = [ledger.compute(f"attention, {name}", formula, "s", source, **symbols)
               for name, formula in zip("FI", formulas, strict=True)]  # fmt: skip
    passes.add("attention", *seconds)


def _elementwise(passes: Passes, job: Job, candidates: Candidates, block: Block, tokens: Floats) -> None:
    """Norms, residual additions, activations, rotary embedding, permutation of heads, sorting of tokens by expert."""
    spec, speed = job.model, job.stack.speed
    symbols: ledger.Inputs = {
        "norms": block.norms, "norm_bytes": speed.norm_bytes if spec.norm == "layernorm" else speed.rmsnorm_bytes,
        "branches": block.branches, "residual_bytes": speed.residual_bytes,
        "dropout_bytes": speed.dropout_bytes if spec.dropout else 0.0,
        "T": tokens, "T_shard": tokens / candidates.token_shards, "h": spec.d_model, "tp": candidates.tp,
        "heads": spec.n_heads, "kv_heads": spec.n_kv_heads, "c": spec.head_dim, "qk_dim": spec.qk_dim,
        "heads_bytes": speed.heads_bytes,
        "rope_bytes": speed.rope_bytes, "top_k": 0 if spec.moe is None else spec.moe.top_k,
        "inner": block.inner, "expert_inner": block.expert_inner, "permute_bytes": speed.permute_bytes,
        "activation_bytes": speed.gated_bytes if block.gated else speed.gelu_bytes,
        "e": job.element_bytes, "element_rate": reached_bytes_per_s(job),
    }  # fmt: skip
    formulas = {
        "norms and residuals": "T_shard * h * (norms * norm_bytes + branches * residual_bytes"
        " + branches * dropout_bytes)",
        "laying out heads": "T * heads * c / tp * heads_bytes",
        "rotation": "T * qk_dim * (heads + kv_heads) / tp * rope_bytes" * (spec.positions == "rope"),
        "activation": "(T / tp * top_k * expert_inner + T * inner / tp) * activation_bytes",
        "sorting by expert": "T / tp * top_k * h * permute_bytes" * bool(block.experts),
    }
    moved = {
        f"bytes of {what}": ledger.compute(f"bytes of {what}", formula, "B", "of F, for elements of 2 bytes", **symbols)
        for what, formula in formulas.items()
        if formula
    }
    symbols["bytes_moved"] = ledger.total("bytes moved", moved, "B", "cost/speed.py")
    casts = {"F": passes.forward.get(ELEMENTWISE), "I": passes.backward_input.get(ELEMENTWISE)}
    seconds = {
        name: ledger.compute(
            f"operations, {name}", f"e / 2 * bytes_moved{times} / element_rate", "s", "memory bounds them", **symbols
        )
        for name, times in (("F", ""), ("I", f" * {BACKWARD_TRAFFIC}"))
    }
    passes.add(ELEMENTWISE, *seconds.values())
    for name, part in (("F", passes.forward), ("I", passes.backward_input)):
        cast = casts[name]
        terms = {f"operations, {name}": seconds[name]} | ({} if cast is None else {f"{CASTS}, {name}": cast})
        ledger.total(f"{ELEMENTWISE}, {name}", terms, value=part[ELEMENTWISE])


def _recompute(passes: Passes, job: Job, candidates: Candidates, block: Block) -> None:
    """The recomputation in I. full: the forward pass, up to what the backward pass reads last. selective: the parts
    that the layout names, or in other stacks attention between its matmuls with weights, or with torchtitan's list
    half of the matmuls and of the tp communication and all element-wise work."""
    again = np.zeros(len(candidates))
    if np.any(candidates.recompute):
        once: ledger.Inputs = {ledger.identifier(f"{kind}, F"): seconds for kind, seconds in passes.forward.items()}
        whole = " + ".join(name for name, seconds in once.items() if np.any(seconds))
        left_out = recompute.left_out(passes, job, candidates, block)
        once |= {ledger.identifier(name): seconds for name, seconds in left_out.items()}
        whole += "".join(f" - {ledger.identifier(name)}" for name in left_out)
        recompute.record_messages(passes, job, candidates, left_out)
        selective = "attention_F"
        if job.stack.selective == "parts" and np.any(candidates.recomputes_parts):
            selective = "selective_recomputation"
            once[selective] = recompute.seconds(passes, job, candidates, block)
        elif job.stack.selective in ("products", "read products"):
            selective = "matmuls_F / 2 + element_wise_F" + " + tensor_parallel_F / 2" * bool(np.any(candidates.tp > 1))
        by_recompute = {"none": "0", "selective": selective, "full": whole}
        again = ledger.Formulas(once, "s").choose(
            "recomputation, I",
            candidates.recompute,
            [by_recompute[each] for each in RECOMPUTE],
            "recomputed in the backward pass",
        )
    passes.add("recomputation", np.zeros_like(again), again)


def _launch(passes: Passes, job: Job, candidates: Candidates, block: Block) -> None:
    """The host launches kernels one by one; the time of a pass is at least that of its launches. A backward pass in two
    parts launches half of its kernels in each. Where the accelerator is the host itself, launches add to the work."""
    speed = job.stack.speed
    total_f, total_i, total_w = passes.totals
    inputs: ledger.Inputs = {
        "launch_s": speed.launch_s, "kernels": job.calibration.expert_launches if block.experts else 1.0,
        "again": candidates.recompute == FULL, "launch_backward": speed.launch_backward,
        "work_of_F": total_f, "work_of_I": total_i, "work_of_W": total_w,
    }  # fmt: skip
    for name, part in passes.parts.items():
        ledger.total(f"work of {name}", {f"{kind}, {name}": seconds for kind, seconds in part.items()})
    in_two = candidates.kind.splits_backward and not speed.adds_launches
    if in_two:
        inputs["launch_backward"] = speed.launch_backward / 2
    left_F, left_I = (" - work_of_F", " - work_of_I" if in_two else " - work_of_I - work_of_W")
    if speed.adds_launches:
        left_F = left_I = ""
    waits = bool(block.experts) and speed.waits_for_counts
    forward = ledger.compute(
        "launch, F", "launch_s * kernels" if waits else f"max(launch_s * kernels{left_F}, 0)", **inputs
    )
    backward = ledger.compute(
        "launch, I",
        f"max(launch_s * kernels * launch_backward + again * (launch_s * kernels){left_I}, 0)",
        **inputs,
    )
    weight = np.zeros(1)
    if in_two:
        weight = ledger.compute("launch, W", "max(launch_s * kernels * launch_backward - work_of_W, 0)", **inputs)
    passes.add("launch", forward, backward, weight)


def _launch_ends(passes: Passes, job: Job) -> None:
    """Where launches add to the work, those of embedding, head and loss."""
    speed = job.stack.speed
    if speed.adds_launches:
        symbols: ledger.Inputs = {
            "launch_s": speed.launch_s, "head_launches": speed.head_launches, "launch_backward": speed.launch_backward,
        }  # fmt: skip
        times = (("F", ""), ("I", " * launch_backward"))
        passes.add("launch", *(
            ledger.compute(f"launch, {name}", f"launch_s * head_launches{more}", **symbols) for name, more in times
        ))  # fmt: skip
