"""Passes of `shardwright generate` on a processor that `shardwright measure` has measured.

The processor that computes also runs Python, so nothing overlaps: the time of a pass is the sum of its parts. All rates
are the measured machine's (`cost.hardware_file`), and none is fitted to published runs. Ignored: drawing tokens from
a large vocabulary, and tokens of a pass that padding adds.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from shardwright.cost import collectives
from shardwright.cost.blocks import BlockShape
from shardwright.cost.hardware_file import GenerationTable, RatesTable
from shardwright.cost.job import Floats
from shardwright.cost.ledger import Formulas
from shardwright.cost.matmuls import TILE_COLUMNS, TILE_ROWS
from shardwright.cost.speed import SHARDWRIGHT, Speed
from shardwright.serving.rates import Rates

if TYPE_CHECKING:
    from shardwright.serving.setting import PassBatch, Serving, Settings

SOURCE = "measured on this machine"
ATTENTION_BLOCK = 64
"""Number of tokens by which attention over a prompt reads more than half of the scores: whole blocks on the diagonal,
as `measuring.points.AttentionPoint` counts them from 64 tokens on."""
TYPICAL = 256.0
"""Attended tokens at which a simulation takes the rate of attention over prompts. The rate depends on their length."""


def rates_of(measured: RatesTable) -> Rates:
    """Return the constants of `generate` on a measured machine: its rates are in the figures of the accelerator, and
    the overhead of a pass is computed here. No server stands between a request and the batch."""
    cached_share = measured.generation.cached_share if measured.generation is not None else 1.0
    return Rates(
        matmul_share=1.0, memory_share=1.0, cache_share=1.0, flash_share=measured.attention_share,
        cached_share=cached_share, expert_share=1.0, layer_s=0.0, pass_s=0.0, prefill_s=0.0, launch_s=0.0,
        expert_launch_s=0.0, arrive_s=0.0, request_s=0.0, reduce_s=0.0, exchange_s=0.0, link_share=1.0,
    )  # fmt: skip


def measured_of(serving: "Serving") -> tuple[RatesTable, GenerationTable]:
    """Return the measured tables of the machine; they exist if `Serving.on_host` is true."""
    rates = serving.cluster.accelerator.rates
    assert rates is not None
    assert rates.generation is not None
    return rates, rates.generation


def matmul_s(
    serving: "Serving", what: str, m: ArrayLike, k: ArrayLike, n: ArrayLike, precision: str, e: float, batch: ArrayLike
) -> Floats:
    """Return the seconds of (m, k) by (k, n), `batch` times, as the faster of two ways: token by token, where each
    token reads the weights, or after laying out the weights once for the multiplication of all tokens."""
    rates, generation = measured_of(serving)
    share = serving.cluster.accelerator.core_share
    f = Formulas(
        "s", M=m, K=k, N=n, batch=batch, e=e, partial_wave=rates.partial_wave, ramp_k=rates.ramp_k,
        row_rate=generation.row_gb_per_s * 1e9 * share, weights_rate=generation.weights_gb_per_s * 1e9 * share,
        rate=serving.flops_per_s(precision),
    )  # fmt: skip
    w = f.let("w", np.maximum(f.M / TILE_ROWS, 0.25) * np.maximum(f.N / TILE_COLUMNS, 0.25))
    q = f.let("q", w / (w + f.partial_wave) * (f.K / (f.K + f.ramp_k)))
    one_by_one = f.let("one_by_one", f.e * f.M * f.K * f.N * f.batch / f.row_rate)
    laid_out = f.e * f.K * f.N * f.batch / f.weights_rate
    together = f.let("together", laid_out + 2 * f.M * f.K * f.N * f.batch / (f.rate * q))
    return f(what, np.minimum(one_by_one, together), SOURCE)


def layer_s(serving: "Serving", settings: "Settings", batch: "PassBatch") -> Floats:
    """Return the overhead of a layer in seconds: operations start one by one, attention once for each prompt."""
    _, passes = measured_of(serving)
    f = Formulas(
        "s", layer_s=np.where(settings.tp > 1, passes.split_layer_us, passes.layer_us) * 1e-6,
        sequence_s=passes.sequence_us * 1e-6, head_s=passes.head_us * 1e-6, heads=serving.model.n_heads,
        tp=settings.tp, requests=batch.requests, prompt_s=passes.prompt_us * 1e-6, prompts=batch.prompts,
        core_share=serving.cluster.accelerator.core_share,
    )  # fmt: skip
    attention_s = (f.sequence_s + f.head_s * f.heads / f.tp) * f.requests
    waiting = (f.layer_s + attention_s + f.prompt_s * f.prompts) / f.core_share
    return f("waiting between kernels", waiting, SOURCE)


def pass_s(serving: "Serving", settings: "Settings", batch: "PassBatch") -> Floats:
    """Return the overhead of a pass in seconds; over tp, with the sum of embedding rows and the logits of all ranks."""
    _, passes = measured_of(serving)
    tokens = np.asarray(batch.tokens)
    f = Formulas(
        "s", pass_s=np.where(settings.tp > 1, passes.split_pass_us, passes.pass_us) * 1e-6,
        request_s=passes.request_us * 1e-6, requests=np.asarray(batch.requests) + batch.prompts,
        core_share=serving.cluster.accelerator.core_share,
    )  # fmt: skip
    host_s = f("scheduling and sampling", (f.pass_s + f.request_s * f.requests) / f.core_share, SOURCE)
    if np.max(settings.tp) == 1:
        return host_s
    model, e = serving.model, serving.wide_bytes
    rows = collectives.all_reduce(serving.cluster, tokens * model.d_model * e, settings.tp, 1, "rows of the embedding")
    logits = np.asarray(batch.logits) * model.vocab_size * e
    return host_s + rows + collectives.all_gather(serving.cluster, logits, settings.tp, 1, "logits of all ranks")


def prompt_s(serving: "Serving") -> float:
    """Return the seconds that another prompt adds to a pass over prompts, without the time of its tokens."""
    _, passes = measured_of(serving)
    prompt_us = serving.model.n_layers * passes.prompt_us + passes.request_us
    return prompt_us * 1e-6 / serving.cluster.accelerator.core_share


def elementwise_s(serving: "Serving", settings: "Settings", block: BlockShape, tokens: Floats) -> Floats:
    """Return the seconds of a layer's element-wise operations, as in training (`cost.layer`), with measured bytes."""
    model, speed = serving.model, _speed(serving)
    f = Formulas(
        "s", tokens=tokens, e=serving.wide_bytes,
        h=model.d_model, norms=block.norms, branches=block.branches, residual_bytes=speed.residual_bytes,
        norm_bytes=speed.norm_bytes if model.norm == "layernorm" else speed.rmsnorm_bytes, qk_dim=model.qk_dim,
        heads=model.n_heads, kv_heads=model.n_kv_heads,
        tp=settings.tp, rope_bytes=speed.rope_bytes * (model.positions == "rope"),
        inner=block.inner + (model.moe.top_k * block.expert_inner if model.moe is not None and block.experts else 0),
        activation_bytes=speed.gated_bytes if block.gated else speed.gelu_bytes, bandwidth=serving.bytes_per_s,
    )  # fmt: skip
    around = f.h * (f.norms * f.norm_bytes + f.branches * f.residual_bytes)
    rotation = f.qk_dim * (f.heads + f.kv_heads) / f.tp * f.rope_bytes
    moved = f.tokens * f.e / 2 * (around + rotation + f.inner / f.tp * f.activation_bytes)
    return f("element-wise kernels", moved / f.bandwidth, SOURCE)


def _speed(serving: "Serving") -> Speed:
    """Return this system's constants, with measured instead of counted bytes of an element of 16 bits."""
    kernels: dict[str, Any] = {str(name): moved for name, moved in measured_of(serving)[0].kernels.items()}
    return replace(SHARDWRIGHT, **kernels)


def prompt_attention_s(serving: "Serving", settings: "Settings", batch: "PassBatch") -> Floats:
    """Return the seconds of attention over prompts, at its measured rate for the head width and the prompt length."""
    rates, model = measured_of(serving)[0], serving.model
    f = Formulas(
        "s", attended=batch.attended, c=model.head_dim, width=rates.attention_width,
        half_length=rates.attention_length, prompt=batch.prompt, heads=model.n_heads, tp=settings.tp,
        qk_dim=model.qk_dim, rate=serving.flops_per_s(serving.wide), share=np.asarray(serving.rates.flash_share),
    )  # fmt: skip
    length = f.let("length", np.maximum(2 * f.attended, 1))
    reached = f.let("reached", f.c / (f.c + f.width) * (length / (length + f.half_length)))
    scores = f.let("scores", f.prompt * np.minimum(f.attended + ATTENTION_BLOCK, 3 * f.attended))
    seconds = 2 * scores * f.heads / f.tp * (f.qk_dim + f.c) / (f.rate * f.share * reached)
    return f("attention over prompts", seconds, SOURCE)
