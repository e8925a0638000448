"""Seconds of the matmuls of attention: fused, with scores in memory some rows at a time, or with all scores stored."""

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.blocks import BlockShape
from shardwright.cost.job import Candidates, Floats, Job
from shardwright.cost.ledger import Formulas, plus
from shardwright.cost.matmuls import Matmul, fp32_or_wide, reached_flops_per_s
from shardwright.cost.passes import Passes, reached_bytes_per_s
from shardwright.model.pieces import ROWS_TOGETHER

ROW_ACCESSES = 14, 16
"""Reads and writes of a score that is in memory (`model.blocks`). Forward: written by the matmul (1), masked (2), a
log-sum-exp of its largest, a difference, an exponential and a sum (1 + 2 + 2 + 1), a difference and an exponential (2
each), read by the matmul (1). Backward: the same scores again (1 + 2), a difference and an exponential (2 each), read
for the gradient of values (1), the gradient of probabilities (1), its difference (2) and product (3), and read for the
gradients of queries and keys (2)."""
ROW_CAP_ACCESSES = 6, 17
"""Reads and writes that a soft cap adds: a quotient, a tanh and a product (2 each); backward these again, the slope of
quotient, hidden scores, square and difference (2 each), and its product with the gradient (3)."""
ROW_FLOPS_BACKWARD = 2.5
"""FLOPs of attention, backward relative to forward: five matmuls, of scores again and of the gradients of
probabilities, values, queries and keys, relative to two (`model.blocks`, `_dense_gradient`)."""

SOFTMAX_TOGETHER = 4
"""Megatron-LM's fused softmax computes the scores of this number of heads together (`is_kernel_available` of
`fused_kernels`: heads of a rank times micro-batch)."""
UNFUSED_BYTES, UNFUSED_BYTES_I = 33, 34
"""Bytes that a softmax moves for a 16-bit score beyond the fused one. Forward: a cast to fp32 (6), a product (8), a
mask (9), a softmax (8) and a cast (6), instead of 4. Backward: a cast (6), a softmax (12), a mask (8), a product (8)
and a cast (6), instead of 6."""
UNFUSED_LAUNCHES = 0.25
"""Kernels of these five, less the fused one, relative to the 16 that launch a layer of Megatron-LM."""


def softmax_apart(job: Job, candidates: Candidates) -> NDArray[np.bool_]:
    """Return whether the softmax of stored scores is several kernels, (n,): the heads of a rank and a micro-batch are
    no multiple of `SOFTMAX_TOGETHER`. Ignored: kernels of 2022 take no more than 2,048 tokens."""
    heads = candidates.micro_batch * (job.model.n_heads // candidates.tp)
    return np.asarray((heads % SOFTMAX_TOGETHER != 0) & (not job.stack.flash_attention))


def attend(passes: Passes, job: Job, candidates: Candidates, tokens: Floats, block: BlockShape) -> None:
    """Add the matmuls of attention, fused or with stored scores.

    With cp_method "ring" the last rank of cp has the most scores, 2 - 1 / cp of the mean, or 2 s / (2 s - w) with a
    window w; of chunks of w tokens the rank with the end of one, 2 - s / (cp w) of the mean, or the mean if it has
    whole ones. Within documents (`document_tokens` instead of s) that share is an upper bound.
    """
    attended, n_attended = job.attended
    spec, window = job.model, block.window
    width = (spec.qk_dim + spec.head_dim) / 2
    f = Formulas("s", T=tokens, s=job.seq_len, heads=spec.n_heads, c=width, tp=candidates.tp, cp=candidates.cp)
    f.add({attended: n_attended})
    if job.stack.flash_attention:
        source, formulas = _fused(f, job, candidates, block)
    else:
        source, formulas = _stored(f, job, candidates)
    if candidates.shared.cp_method == "ring" and np.any(candidates.cp > 1):
        longer = 1 - 1 / f.cp
        if job.stack.flash_attention and 0 < window < n_attended:
            most = 1 - f.s / f.cp / f.window if block.chunked else f.window / (2 * f[attended] - f.window)
            longer = np.maximum(0, np.minimum(longer, most))
        formulas = [formula + formula * longer for formula in formulas]
    passes.add("attention", *(f(f"attention, {name}", term, source) for name, term in zip("FI", formulas, strict=True)))


def _fused(f: Formulas, job: Job, candidates: Candidates, block: BlockShape) -> tuple[str, list[Floats]]:
    """Return the source and the seconds of fused attention, forward and backward.

    It computes the half of the scores that is not masked, but whole blocks on the diagonal, at a fraction of the peak
    that grows with the head width and the length. Within documents it computes the scores of each document, with
    document_tokens instead of s; with a window w, w (2 s - w) / s of the scores of s tokens; with n whole chunks of w
    and one of r, (n w^2 + r^2) / s. If no kernel has the scores (`Job.scores_in_memory`), scores are computed in
    fp32, some rows at a time, and each operation on them reads and writes them. A kernel with a soft cap is priced as
    one without; no GPU has measured it. A kernel that pads heads computes the padding too (`Speed.kernel_width`).
    """
    attended, n_attended = job.attended
    fitted, chip, window = job.calibration, job.cluster.accelerator, block.window
    length = f[attended]
    if 0 < window < n_attended:
        f.add(window=window)
        whole = length // f.window * f.window
        of_chunks = (whole * f.window + (length - whole) * (length - whole)) / length
        of_window = f.window * (2 * length - f.window) / length
        length = f.let("attended_tokens", of_chunks if block.chunked else of_window)
    in_memory = job.scores_in_memory(candidates, block.window)
    edge: Floats | int = 64
    if np.any(in_memory):
        f.add(edge=np.where(in_memory, ROWS_TOGETHER / 2, edge))
        edge = f.edge
    f("FLOPs of attention", 4 * f.T * length * (f.heads / f.tp) * f.c * (0.5 + edge / length), "of F", unit="FLOP")
    flops = f.FLOPs_of_attention
    if np.all(in_memory):
        return _in_rows(f, job, flops)
    speed = job.stack.speed.on(chip.die)
    f.add(
        c0=fitted.flash_width, s0=fitted.flash_length, rate=reached_flops_per_s(job, job.wide_precision),
        flash_share=(speed.attention_share or fitted.flash(chip.die)) / fitted.attention_time,
        flash_gain=speed.flash_gain * (speed.latent_gain if job.model.latent_attention else 1.0),
        flash_backward=fitted.flash_backward,
        kernel_width=speed.kernel_width((job.model.qk_dim + job.model.head_dim) / 2),
    )  # fmt: skip
    reached = f.flash_share * f.c / (f.kernel_width + f.c0) * length / (length + f.s0)
    f("rate of attention", f.rate * reached * f.flash_gain, "cost/calibration.toml, cost/speed.py", unit="FLOP/s")
    seconds = [flops / f.rate_of_attention, flops * f.flash_backward / f.rate_of_attention]
    if np.any(in_memory):
        f.add(in_memory=in_memory)
        in_rows = zip(seconds, _in_rows(f, job, flops)[1], strict=True)
        seconds = [fused + f.in_memory * (other - fused) for fused, other in in_rows]
    return "Dao, arXiv 2307.08691, section 3", seconds


def _in_rows(f: Formulas, job: Job, flops: Floats) -> tuple[str, list[Floats]]:
    """Return the source and the seconds of attention with scores in memory, some rows at a time, forward and
    backward."""
    capped = job.model.attention_softcap > 0
    accesses, accesses_I = (own + capped * of_cap for own, of_cap in zip(ROW_ACCESSES, ROW_CAP_ACCESSES, strict=True))
    n_bytes = max(4, job.element_bytes)
    f.add(wide_rate=reached_flops_per_s(job, fp32_or_wide(job)), element_rate=reached_bytes_per_s(job))
    f.add(row_score_bytes=accesses * n_bytes, row_score_bytes_I=accesses_I * n_bytes, row_flops_I=ROW_FLOPS_BACKWARD)
    scores = flops / (4 * f.c)
    return "scores in memory, in fp32; model/blocks.py", [
        flops / f.wide_rate + f.row_score_bytes * scores / f.element_rate,
        f.row_flops_I * flops / f.wide_rate + f.row_score_bytes_I * scores / f.element_rate,
    ]


def _stored(f: Formulas, job: Job, candidates: Candidates) -> tuple[str, list[Floats]]:
    """Return the source and the seconds of attention with stored scores, forward and backward. Batched matmuls compute
    the whole square of the whole sequence, masked, and the scores are written to memory and read between them, by fused
    kernels (to which `score_bytes` is fitted) in eager stacks too."""
    spec, fitted = job.model, job.calibration
    queries, keys, batch = (
        job.seq_len / candidates.cp,
        float(job.seq_len),
        candidates.micro_batch * (spec.n_heads / candidates.tp),
    )
    products = [
        Matmul("scores", queries, spec.qk_dim, keys, batch, job.wide_precision),
        Matmul("scores by values", queries, keys, spec.head_dim, batch, job.wide_precision),
    ]
    gradients = [one for product in products for one in (product.for_input, product.for_weight)]
    f.add({matmul.name: matmul.seconds(job) for matmul in (*products, *gradients)})
    speed = job.stack.speed.on(job.cluster.accelerator.die)
    f.add(score_bytes=fitted.score_bytes, score_bytes_I=fitted.score_bytes_backward)
    f.add(element_rate=reached_bytes_per_s(job), kernel_share=speed.kernel_share)
    fused_rate = f.element_rate / f.kernel_share
    forward = plus(*(f[product.name] for product in products))
    backward = plus(*(f[product.for_input.name] + f[product.for_weight.name] for product in products))
    scores = f.T * f.s * (f.heads / f.tp)
    moving, moving_I = f.score_bytes / fused_rate, f.score_bytes_I / fused_rate
    if np.any(apart := softmax_apart(job, candidates)):
        f.add(softmax_apart=apart.astype(int), unfused_bytes=UNFUSED_BYTES, unfused_bytes_I=UNFUSED_BYTES_I)
        moving = moving + f.softmax_apart * f.unfused_bytes / f.element_rate
        moving_I = moving_I + f.softmax_apart * f.unfused_bytes_I / f.element_rate
    return "stored scores; cost/calibration.toml", [
        forward + moving * scores,
        backward + moving_I * scores,
    ]
