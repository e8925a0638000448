"""The matrix products of a layer as one rank runs them, forward; and how long a product takes.

A product multiplies (m, k) by (k, n), `batch` times: `m` tokens, `k` features in, `n` out. The backward pass of a
product of weights is two more of as many FLOPs: (m, n) by (n, k) for the gradient of its input, (k, m) by (m, n) for
that of its weights.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shardwright.cost.job import Candidates, Floats, Job

TILE_ROWS, TILE_COLUMNS = 256, 128
"""What one multiprocessor makes of a product's result at a time, in elements; the tile of cuBLAS for large products."""


@dataclass(frozen=True)
class Product:
    """m, k, n, batch: arrays of shape (n,) or numbers. `precision`: of its inputs, if not that of the job."""

    m: Floats | float
    k: Floats | float
    n: Floats | float
    batch: Floats | float = 1.0
    precision: str = ""

    @property
    def flops(self) -> Floats:
        """2 m k n batch."""
        return np.asarray(2.0 * self.m * self.k * self.n * self.batch)

    @property
    def for_input(self) -> "Product":
        """The product that gives the gradient of the input."""
        return Product(self.m, self.n, self.k, self.batch, self.precision)

    @property
    def for_weight(self) -> "Product":
        """The product that gives the gradient of the weights."""
        return Product(self.k, self.m, self.n, self.batch, self.precision)

    def seconds(self, job: Job) -> Floats:
        """time = max(flops / (peak share q), bytes / bandwidth)

        q = w / (w + w0) k / (k + k0), w = tiles / multiprocessors. `peak` FLOP/s of the precision; `share` what the
        best products reach of it, times what lasts in training (`Calibration`). k0 `ramp_k`: features in at which half
        the time goes into filling and emptying the multipliers. w0 `partial_wave`: waves of tiles that a product takes
        longer than its tiles need, as the last is not full and the first starts cold. `bytes`: two inputs and the
        result, once each. Source: tile and wave quantisation in NVIDIA's "Matrix Multiplication Background" guide,
        smoothed, since libraries pick among many tiles and split k where there are few. Ignored: how operands lie in
        memory, and that more power than the chip may draw lowers its clock for some shapes more than for others.
        """
        chip, fitted = job.cluster.accelerator, job.calibration
        tiles = np.maximum(self.m / TILE_ROWS, 0.25) * np.maximum(self.n / TILE_COLUMNS, 0.25) * self.batch
        waves = tiles / chip.multiprocessors
        quality = waves / (waves + fitted.partial_wave) * (self.k / (self.k + fitted.ramp_k))
        multiply_s = self.flops / (reached_flops_per_s(job, self.precision or job.precision) * quality)
        elements = (self.m * self.k + self.k * self.n + self.m * self.n) * self.batch
        return np.maximum(multiply_s, job.element_bytes * elements / chip.memory_bytes_per_s)


def reached_flops_per_s(job: Job, precision: str) -> float:
    """What the best shapes of products reach in training."""
    chip = job.cluster.accelerator
    return chip.flops_per_s[precision] * chip.matmul_share[precision] * job.calibration.products(chip.name)


def attention_products(job: Job, of: Candidates, tokens: Floats) -> Iterator[Product]:
    """Those with weights in one layer's attention; `tokens`: (n,) of one microbatch on a rank of cp."""
    spec, latent = job.model, job.model.latent_attention
    h, tp = spec.d_model, of.tp
    heads = spec.n_heads / tp
    if latent is None:
        kv_heads = np.maximum(spec.n_kv_heads / tp, 1.0)
        yield Product(tokens, h, spec.head_dim * (heads + 2 * kv_heads))
        yield Product(tokens, spec.head_dim * heads, h)
        return
    if latent.q_rank:
        yield Product(tokens, h, latent.q_rank)
        yield Product(tokens, latent.q_rank, heads * spec.qk_dim)
    else:
        yield Product(tokens, h, heads * spec.qk_dim)
    yield Product(tokens, h, latent.kv_rank + latent.rope_dim)
    yield Product(tokens, latent.kv_rank, heads * (latent.nope_dim + latent.v_dim))
    yield Product(tokens, heads * latent.v_dim, h)


def dense_products(job: Job, of: Candidates, tokens: Floats) -> Iterator[Product]:
    """Those of a feed-forward network; gate and up are one product."""
    spec = job.model
    yield from _network(spec.d_model, spec.d_ffn / of.tp, 2 if spec.activation == "swiglu" else 1, tokens)


def expert_products(job: Job, of: Candidates, tokens: Floats) -> Iterator[Product]:
    """Those of a mixture of experts with equal loads. Each rank of tp sends its share of the tokens, and gets as many
    as it sends: m of an expert is tokens / tp x top_k / (experts of the rank)."""
    spec, moe = job.model, job.model.moe
    assert moe is not None
    here = tokens / of.tp
    yield Product(here, spec.d_model, moe.n_experts, precision="fp32")
    experts = moe.n_experts / of.ep
    yield from _network(spec.d_model, float(moe.d_ffn), 2, here * moe.top_k / experts, experts)
    if moe.n_shared:
        yield from _network(spec.d_model, moe.d_ffn * moe.n_shared / of.tp, 2, tokens)


def head_product(job: Job, of: Candidates, tokens: Floats) -> Product:
    """Logits of a microbatch, over the rank's part of the vocabulary; nobody makes them in fp8."""
    return Product(tokens, job.model.d_model, job.model.vocab_size / of.tp, precision=job.wide_precision)


def _network(
    d_model: int, d_ffn: Floats | float, inputs: int, tokens: Floats, batch: Floats | float = 1.0
) -> Iterator[Product]:
    yield Product(tokens, d_model, inputs * d_ffn, batch)
    yield Product(tokens, d_ffn, d_model, batch)
