"""Seconds of a layer's forward and backward passes on one rank, by kind of work.

The passes are F (forward), I (gradient of the input) and W (gradients of weights); with recomputation I includes a
second forward pass. Each kind of work has its own formulas, and the parts of a step are their sums.
"""

from collections.abc import Iterable

import numpy as np

from shardwright.cost import activations, ledger, recompute
from shardwright.cost.attention import UNFUSED_LAUNCHES, attend, softmax_apart
from shardwright.cost.blocks import BlockShape
from shardwright.cost.collectives import all_gather, all_reduce, reduce_scatter
from shardwright.cost.formats import FORMATS
from shardwright.cost.job import FULL, RECOMPUTE, Candidates, Floats, Job
from shardwright.cost.ledger import Formulas, plus
from shardwright.cost.matmuls import Matmul, head_matmul, layer_matmuls, reached_flops_per_s
from shardwright.cost.messages import context, dispatch, head_over_tp, loss_sums, over_tp, states, tensor
from shardwright.cost.parameters import computed_share, elements, scaled_outputs, tp_shards
from shardwright.cost.passes import (
    PRODUCT_BYTES,
    Passes,
    kernel_symbols,
    reached_bytes_per_s,
    rotating_share,
    rotation_bytes,
)
from shardwright.cost.speed import ELEMENTWISE, HOST, MATMULS, TENSOR

CASTS = "casts of inputs"
BACKWARD_TRAFFIC = 1.5
"""Bytes that an element-wise operation moves in the backward pass, relative to the forward pass: two inputs instead of
one, and one output."""


def layer(job: Job, candidates: Candidates, block: BlockShape, name: str | None = None) -> Passes:
    """Return the passes of one layer of a kind; `name`: its name in the ledger, by default the kind's."""
    passes = Passes(name or block.name)
    with ledger.section(f"{passes.part[0].upper()}{passes.part[1:]}, one microbatch"):
        tokens = candidates.tokens(job.seq_len)
        _multiply(passes, job, candidates, layer_matmuls(job, candidates, block, tokens))
        if block.linear:
            _scan(passes, job, candidates, tokens)
            states(passes, job, candidates, tokens)
        else:
            attend(passes, job, candidates, tokens, block)
            context(passes, job, candidates, tokens, block)
        _elementwise(passes, job, candidates, block)
        tensor(passes, job, candidates, block, tokens)
        if block.experts:
            dispatch(passes, job, candidates, tokens)
        _recompute(passes, job, candidates, block)
        _launch(passes, job, candidates, block)
        if candidates.shared.offload_activations == "cpu":
            _copy_activations(passes, job, candidates, block)
        passes.note()
    return passes


def _copy_activations(passes: Passes, job: Job, candidates: Candidates, block: BlockShape) -> None:
    """Add the time by which copies of activations to the host, and back, exceed the pass of the layer that they overlap
    with. Ignored: small tensors, which stay on the device, and the memory bandwidth that copies take from kernels."""
    kept = activations.layer(job, candidates, block, passes.part).kept
    forward, backward_input, weight = passes.totals
    backward = backward_input if candidates.kind.splits_backward else backward_input + weight
    for name, beside in (("F", forward), ("I", backward)):
        f = Formulas(
            "s", kept=kept, host_rate=job.cluster.accelerator.host_bytes_per_s, pass_beside_it=beside,
            offloaded_share=job.stack.offloaded_share,
        )  # fmt: skip
        # Copies of a layer overlap with the layers that stay, too.
        longer = np.maximum(0 * f.kept, f.offloaded_share * f.kept / f.host_rate - f.pass_beside_it)
        longer = f(f"{HOST}, {name}", longer, "parallel/offload.py")
        passes.add(HOST, *((longer, 0.0) if name == "F" else (0.0, longer)))


CAP_ACCESSES = 6 + 7
"""Reads and writes of a capped logit: forward a quotient, a tanh and a product (2 each); backward a product (2), the
gradient of tanh (3) and a quotient (2)."""
CHUNK_CAP_ACCESSES = 8 + 9
"""The same in a chunked loss: forward a quotient, a tanh, its copy and a product (2 each); for the gradient a square, a
negation and a sum (2 each), and a product (3)."""


def head(job: Job, candidates: Candidates) -> Passes:
    """Return the passes of final norm, logits and loss. The loss reads and writes the logits several times in fp32. A
    chunked loss does all of it in F."""
    if candidates.shared.loss_chunk_tokens:
        return _chunked_head(job, candidates)
    passes = Passes("the head")
    with ledger.section("Head, one microbatch"):
        tokens, spec = candidates.tokens(job.seq_len), job.model
        _multiply(passes, job, candidates, [head_matmul(job, candidates, tokens)])
        f = Formulas(
            "s", loss_bytes=_loss_bytes(job, candidates), T=tokens, V=spec.vocab_size,
            tp=candidates.tp if job.stack.shares_logits else np.ones_like(candidates.tp),
            element_rate=reached_bytes_per_s(job),
        )  # fmt: skip
        half = f.loss_bytes * (f.T * f.V / f.tp) / 2 / f.element_rate
        if spec.logits_divided_by != 1:  # the output of the last norm is divided
            f.add(h=spec.d_model, product_bytes=PRODUCT_BYTES, e=job.element_bytes)
            half = half + f.T * f.h * f.product_bytes * f.e / 2 / f.element_rate
        passes.add(ELEMENTWISE, *(f(f"{ELEMENTWISE}, {name}", half, "cost/speed.py") for name in "FI"))
        head_over_tp(passes, job, candidates, tokens)
        _launch_ends(passes, job)
        passes.note()
    return passes


def _loss_bytes(job: Job, candidates: Candidates) -> Floats:
    """Return the bytes that the loss and the soft cap of logits move for a logit, forward and backward. Ignored: a
    chunked loss multiplies no logits by the gradient of the loss, and a compiled cap is fused."""
    speed, over_tp = job.stack.speed, candidates.tp > 1
    narrow = speed.loss_cast_bytes + speed.loss_over_tp_bytes * over_tp
    accesses = CHUNK_CAP_ACCESSES if candidates.shared.loss_chunk_tokens else CAP_ACCESSES
    cap = accesses * job.element_bytes if job.model.logit_softcap else 0
    return np.asarray(speed.loss_bytes + narrow * (job.element_bytes < 4) + cap, dtype=np.float64)


def _chunked_head(job: Job, candidates: Candidates) -> Passes:
    """Return the passes of a chunked loss: the three matmuls and the loss of each chunk, all in F. In 16 bits each
    gradient of the matrix is written, read, and added to a sum in fp32. I multiplies the kept gradients by the gradient
    of the loss. The input is gathered over tp once, because it is kept."""
    passes = Passes("the head")
    with ledger.section("Head, one microbatch"):
        tokens, spec = candidates.tokens(job.seq_len), job.model
        chunk = np.minimum(tokens, candidates.shared.loss_chunk_tokens)
        one, e = head_matmul(job, candidates, chunk), job.element_bytes
        matmuls = [one, one.for_input] + [one.for_weight] * (not one.frozen)
        inside = {matmul.name: matmul.seconds(job) for matmul in matmuls}
        f = Formulas(
            "s", T=tokens, C=chunk, V=spec.vocab_size, tp=candidates.tp, h=spec.d_model, e=e, sum_bytes=max(4, e),
            loss_bytes=_loss_bytes(job, candidates), element_rate=reached_bytes_per_s(job),
            matmuls_of_a_chunk=ledger.total("matmuls of a chunk", inside),
        )  # fmt: skip
        passes.add(MATMULS, f(f"{MATMULS}, F", np.ceil(f.T / f.C) * f.matmuls_of_a_chunk), 0.0)
        added = 2 * f.sum_bytes + 2 * f.e if e < 4 else 2 * f.sum_bytes
        moved = f.loss_bytes * (f.T * f.V / f.tp)
        source = "cost/speed.py; sum of the gradients over chunks"
        if not one.frozen:
            moved = moved + np.ceil(f.T / f.C) * added * (f.V / f.tp * f.h)
        forward = f(f"{ELEMENTWISE}, F", moved / f.element_rate, source)
        moved = (2 * f.sum_bytes + f.e) * (f.V / f.tp * f.h) if not one.frozen else 0 * f.T
        backward = f(f"{ELEMENTWISE}, I", moved / f.element_rate, "gradients times that of the loss")
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
    """Return the passes of the embedding lookup. Over tp each rank has a shard of the rows, so the outputs are summed,
    unless each rank has all rows (`Stack.tp_by_matrix`); with token shards the gradients are all-gathered."""
    passes = Passes("the embedding")
    with ledger.section("Embedding, one microbatch"):
        tokens, h = candidates.tokens(job.seq_len), job.model.d_model
        f = Formulas("s", T=tokens, h=h, e=job.element_bytes, element_rate=reached_bytes_per_s(job))
        moved, source = 2 * (f.T * f.h * f.e) / f.element_rate, "rows read and written"
        if job.model.embedding_scale != 1:
            moved, source = 2 * moved, "rows read and written, and their product with embedding_scale"
        passes.add(ELEMENTWISE, *(f(f"{ELEMENTWISE}, {name}", moved, source) for name in "FI"))
        n_bytes = tokens * h * job.element_bytes
        sums = (None, None) if job.stack.tp_by_matrix else (reduce_scatter, all_reduce)
        forward = over_tp(passes, job, candidates, n_bytes, "rows", *sums)
        backward = over_tp(passes, job, candidates, n_bytes, "gradients of rows", all_gather, None)
        passes.add(TENSOR, ledger.total(f"{TENSOR}, F", forward), ledger.total(f"{TENSOR}, I", backward))
        passes.note()
    return passes


def _multiply(passes: Passes, job: Job, candidates: Candidates, matmuls: Iterable[Matmul]) -> None:
    """Add the matmuls with weights, forward and for both gradients. In formats of fewer than 16 bits their inputs are
    cast first. Inputs that are gathered over tp are cast before the gather if the format and the stack allow it, and
    weights once a step if the casts are kept. A matmul whose result is reduced over tp meanwhile has fewer
    multiprocessors (`Matmul.beside_reduction`)."""
    those = list(matmuls)
    trained = [matmul for matmul in those if not matmul.frozen]
    forward = [matmul.beside_reduction(job) for matmul in those] if job.stack.speed.hides_tp else those
    in_each_pass = (forward, [matmul.for_input for matmul in those], [matmul.for_weight for matmul in trained])
    seconds = (
        ledger.total(f"{MATMULS}, {name}", {matmul.name: matmul.seconds(job) for matmul in inside})
        for name, inside in zip("FIW", in_each_pass, strict=True)
    )
    passes.add(MATMULS, *seconds)
    weights = sum((np.asarray(matmul.batch * matmul.k * matmul.n) for matmul in trained), np.zeros(1))
    if sum_bytes := job.stack.speed.sum_bytes:
        f = Formulas("s", sum_bytes=sum_bytes, elements=weights, element_rate=reached_bytes_per_s(job))
        summed = f(f"{ELEMENTWISE}, W", f.sum_bytes * f.elements / f.element_rate, "sums of gradients in fp32")
        passes.add(ELEMENTWISE, 0.0, 0.0, summed)
    form = FORMATS[job.precision]
    cast = [matmul for matmul in those if not matmul.precision] if form.narrow else []
    if cast:
        early = job.stack.speed.gathers_narrow and form.gathered_bytes < job.element_bytes
        inputs = sum(matmul.batch * matmul.m * matmul.k / (matmul.input_shards if early else 1) for matmul in cast)
        of_results = sum(matmul.batch * matmul.m * matmul.n / (matmul.output_shards if early else 1) for matmul in cast)
        of_weights = sum(matmul.batch * matmul.k * matmul.n for matmul in cast)
        again = sum(matmul.batch * matmul.m * matmul.k for matmul in cast)
        times = candidates.microbatches(job.global_batch) if job.stack.keeps_casts else 1
        moved = []
        for name, elements in (("F", inputs + of_weights / times), ("I", again + of_results)):
            cast_bytes = form.casts(job.stack.speed.fuses_casts)
            f = Formulas("s", cast_bytes=cast_bytes, elements=elements, element_rate=reached_bytes_per_s(job))
            moved.append(f(f"{CASTS}, {name}", f.cast_bytes * f.elements / f.element_rate, "cost/formats.py"))
        passes.add(ELEMENTWISE, *moved)
    if quantised := [matmul for matmul in those if matmul.stored]:
        moved = []
        for name in "FI":
            elements = sum(DECODED_BYTES[matmul.stored] * matmul.batch * matmul.k * matmul.n for matmul in quantised)
            f = Formulas("s", decoded_bytes=elements, element_rate=reached_bytes_per_s(job))
            moved.append(f(f"{CASTS}, {name}", f.decoded_bytes / f.element_rate, "decoding, model/quantised.py"))
        passes.add(ELEMENTWISE, *moved)


DECODED_BYTES = {"int8": 11.0, "nf4": 22.5}
"""Bytes that the kernels of `model.quantised.decode` read and write for an element in 16 bits. int8: a code, its
product with the scale in fp32, which is read again, and the result: 1 + 4 + 4 + 2. nf4: 4 bits of code, their index in
32 bits for two elements, the value in fp32, its product with the scale, and the result: 0.5 + 2 + 2 + 4 + 4 + 4 + 4 +
2. No GPU measured it."""


def _scan(passes: Passes, job: Job, candidates: Candidates, tokens: Floats) -> None:
    """Add the scan of linear attention: its matmuls, at the peak that matmuls reach, and the tensors of its chunks,
    which are written and read in 32 bits. The backward pass computes the scan again. With cp the maps of states are
    computed first, and in the backward pass the gradients of states, as much work as a scan. No measured run has linear
    layers, so nothing is fitted. Ignored: the triangular solve, and the wait for the state of the previous chunk."""
    linear = job.model.linear_attention
    assert linear is not None
    f = Formulas(
        "s", T=tokens, tp=candidates.tp, scan_flops=linear.scan_flops, scan_numel=linear.scan_numel,
        rate=reached_flops_per_s(job, job.wide_precision), element_rate=reached_bytes_per_s(job),
    )  # fmt: skip
    computing = f.scan_flops / f.rate + 8 * f.scan_numel / f.element_rate
    f("scan, once", f.T / f.tp * computing, "arXiv 2412.06464, section 3.3")
    forward, backward = 1 * f.scan_once, 3 * f.scan_once
    if np.any(candidates.cp > 1):
        f.add(map_flops=linear.map_flops, over_cp=(candidates.cp > 1).astype(np.int64))
        forward = forward + f.over_cp * (f.T / f.tp * f.map_flops / f.rate)
        backward = backward + f.over_cp * f.scan_once
    passes.add("attention", f("attention, F", forward), f("attention, I", backward))


def _elementwise(passes: Passes, job: Job, candidates: Candidates, block: BlockShape) -> None:
    """Add norms, residual additions, activations, rotary embedding, permutation of heads, sorting by expert."""
    spec, f = job.model, kernel_symbols(job, candidates, block)
    around = f.norms * f.norm_bytes + f.branches * f.residual_bytes + f.branches * f.dropout_bytes
    formulas = {
        "norms and residuals": f.T_shard * f.h * around,
        "laying out heads": f.T * f.heads * f.c / f.tp * f.heads_bytes,
    }
    rotating = rotating_share(spec)
    placed = f.T * f.qk_dim * (f.heads + f.kv_heads) / f.tp
    if block.norms_heads:
        formulas["norms of heads"] = placed * f.norm_bytes
    if spec.positions == "rope" and not block.linear:
        formulas["rotation"] = placed * rotation_bytes(f, job)
        if spec.temperature_scale and rotating < 1:
            f.add(product_bytes=PRODUCT_BYTES)
            formulas["scaling queries"] = f.T * f.qk_dim * f.heads / f.tp * f.product_bytes * (1 - rotating)
    if spec.branch_scale != 1:
        f.add(product_bytes=PRODUCT_BYTES)
        formulas["scaling branches"] = f.T_shard * f.h * f.branches * f.product_bytes
    inner = f.T / f.tp * f.top_k * f.expert_inner + f.T * f.inner / f.tp
    formulas["activation"] = inner * f.activation_bytes
    if block.adapters:
        f.add(outputs_of_adapters=sum(
            row.shape[-2] / tp_shards(spec, row.split, candidates.tp) * computed_share(spec, row, candidates.tp)
            for row in block.adapters if row.adapter == "b"
        ), residual_bytes=job.stack.speed.residual_bytes)  # fmt: skip
        formulas["adding adapters"] = f.T * f.outputs_of_adapters * f.residual_bytes
    if block.scaled:
        f.add(scaled_outputs(spec, block, candidates.tp), product_bytes=PRODUCT_BYTES)
        formulas["scaling outputs"] = (f.T * f.outputs_scaled + f.T_shard * f.results_scaled) * f.product_bytes
    if spec.lora is not None and spec.lora.dropout:
        f.add(inputs_of_adapters=sum(
            row.shape[-1] / tp_shards(spec, row.split, candidates.tp) for row in block.adapters if row.adapter == "a"
        ), dropped_bytes=4 + job.stack.speed.dropout_bytes)  # fmt: skip
        formulas["dropping inputs of adapters"] = f.T * f.inputs_of_adapters * f.dropped_bytes
    if block.experts:
        formulas["sorting by expert"] = f.T / f.tp * f.top_k * f.h * f.permute_bytes
    source = "of F, for elements of 2 bytes"
    moved = {name: f(name, formula, source) for what, formula in formulas.items() if (name := f"bytes of {what}")}
    f.add(bytes_moved=ledger.total("bytes moved", moved, "B", "cost/speed.py"))
    casts = {"F": passes.forward.get(ELEMENTWISE), "I": passes.backward_input.get(ELEMENTWISE)}
    once = f.e / 2 * f.bytes_moved
    seconds = {
        name: f(f"operations, {name}", n_bytes / f.element_rate, "memory bounds them", unit="s")
        for name, n_bytes in (("F", once), ("I", once * BACKWARD_TRAFFIC))
    }
    passes.add(ELEMENTWISE, *seconds.values())
    norms = {}
    if block.scaled:
        f.add(row_bytes=_bytes_of_rows(job, candidates, block))
        norms["norms of rows, F"] = f("norms of rows, F", f.row_bytes / f.element_rate, "model/matmul.py", unit="s")
        passes.add(ELEMENTWISE, norms["norms of rows, F"], 0.0)
    for name, part in (("F", passes.forward), ("I", passes.backward_input)):
        cast = casts[name]
        terms = {f"operations, {name}": seconds[name]} | ({} if cast is None else {f"{CASTS}, {name}": cast})
        terms |= norms if name == "F" else {}
        ledger.total(f"{ELEMENTWISE}, {name}", terms, value=part[ELEMENTWISE])


def _bytes_of_rows(job: Job, candidates: Candidates, block: BlockShape) -> Floats:
    """Return the bytes that are read in a forward pass to compute the norms of the rows of W + s B A: W for its squares
    and for W A^T, and what decodes a quantised W. Ignored: products of rank r, and that B A is multiplied by itself."""
    n_bytes = np.zeros(len(candidates))
    for row in block.scaled_matrices:
        n = elements(job.model, row, candidates.tp, candidates.ep)
        n_bytes = n_bytes + (2 * job.element_bytes + DECODED_BYTES.get(row.stored, 0.0)) * n
    return n_bytes


def _recompute(passes: Passes, job: Job, candidates: Candidates, block: BlockShape) -> None:
    """Add the recomputation in I. full: the forward pass, up to the last tensor that the backward pass reads.
    selective: the parts that the layout names; in other stacks attention between its matmuls with weights, or with
    torchtitan's list half of the matmuls and of the tp communication and all element-wise work."""
    again = np.zeros(len(candidates))
    if np.any(candidates.recompute):
        f = Formulas("s", {f"{kind}, F": seconds for kind, seconds in passes.forward.items()})
        left_out = recompute.left_out(passes, job, candidates, block)
        whole = plus(*(f[f"{kind}, F"] for kind, seconds in passes.forward.items() if np.any(seconds)))
        f.add(left_out)
        for name in left_out:
            whole = whole - f[name]
        recompute.record_messages(passes, job, candidates, left_out)
        selective = f["attention, F"]
        if job.stack.selective == "parts" and np.any(candidates.recomputes_parts):
            parts_s = recompute.seconds(passes, job, candidates, block)
            f.add(selective_recomputation=parts_s)
            selective = f.selective_recomputation if np.any(parts_s) else f.constant(0)
        elif job.stack.selective in ("products", "read products"):
            selective = f[f"{MATMULS}, F"] / 2 + f[f"{ELEMENTWISE}, F"]
            if np.any(candidates.tp > 1):
                selective = selective + f[f"{TENSOR}, F"] / 2
        by_recompute = {"none": f.constant(0), "selective": selective, "full": whole}
        formulas = [by_recompute[choice] for choice in RECOMPUTE]
        again = f.choose("recomputation, I", candidates.recompute, formulas, "recomputed in the backward pass")
    passes.add("recomputation", np.zeros_like(again), again)


def _launch(passes: Passes, job: Job, candidates: Candidates, block: BlockShape) -> None:
    """Add launch time: the host launches kernels one by one, and a pass takes at least that long. A backward pass in
    two parts launches half of them in each. If the accelerator is the host itself, launches add to the work. A CUDA
    graph launches a layer at once."""
    speed = job.stack.speed
    if speed.graphs == "step" or (speed.graphs == "blocks" and not block.experts):
        passes.add("launch", np.zeros(1), np.zeros(1), np.zeros(1))
        return
    total_f, total_i, total_w = passes.totals
    in_two = candidates.kind.splits_backward and not speed.adds_launches
    kernels = (job.calibration.expert_launches if block.experts else 1.0) * np.ones(len(candidates))
    f = Formulas(
        "s", launch_s=speed.launch_s, kernels=kernels + UNFUSED_LAUNCHES * softmax_apart(job, candidates),
        again=candidates.recompute == FULL, launch_backward=speed.launch_backward / (2 if in_two else 1),
        work_of_F=total_f, work_of_I=total_i, work_of_W=total_w,
    )  # fmt: skip
    for name, part in passes.parts.items():
        ledger.total(f"work of {name}", {f"{kind}, {name}": seconds for kind, seconds in part.items()})
    waits = bool(block.experts) and speed.waits_for_counts and speed.graphs == "none"
    once = f.launch_s * f.kernels
    left_F, left_I = once, once * f.launch_backward + f.again * once
    if not speed.adds_launches:
        left_F, left_I = left_F - f.work_of_F, left_I - f.work_of_I
    if not speed.adds_launches and not in_two:
        left_I = left_I - f.work_of_W
    forward = f("launch, F", once if waits else np.maximum(left_F, 0))
    backward = f("launch, I", np.maximum(left_I, 0))
    weight = np.zeros(1)
    if in_two:
        weight = f("launch, W", np.maximum(once * f.launch_backward - f.work_of_W, 0))
    passes.add("launch", forward, backward, weight)


def _launch_ends(passes: Passes, job: Job) -> None:
    """Add the launches of embedding, head and loss, if launches add to the work."""
    speed = job.stack.speed
    if speed.adds_launches:
        f = Formulas(
            "s", launch_s=speed.launch_s, head_launches=speed.head_launches, launch_backward=speed.launch_backward
        )  # fmt: skip
        once = f.launch_s * f.head_launches
        passes.add("launch", f("launch, F", once), f("launch, I", once * f.launch_backward))
