"""The matmuls of a layer as one rank runs them; and how long a matmul takes.

A matmul multiplies (m, k) by (k, n), `batch` times: `m` tokens, `k` features in, `n` out. The backward pass of a
matmul with weights is two more of as many FLOPs: (m, n) by (n, k) for the gradient of its input, (k, m) by (m, n) for
that of its weights.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shardwright.cost import ledger
from shardwright.cost.blocks import Block, Group
from shardwright.cost.job import Candidates, Floats, Job
from shardwright.cost.parameters import ways

TILE_ROWS, TILE_COLUMNS = 256, 128
"""What one multiprocessor makes of a matmul's result at a time, in elements; the tile of cuBLAS for large matmuls."""


@dataclass(frozen=True)
class Matmul:
    """m, k, n, batch: arrays of shape (n,) or numbers. `precision`: of its inputs, if not that of the job."""

    name: str
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
    def for_input(self) -> "Matmul":
        """The matmul that gives the gradient of the input."""
        return Matmul(f"{self.name}, gradient of input", self.m, self.n, self.k, self.batch, self.precision)

    @property
    def for_weight(self) -> "Matmul":
        """The matmul that gives the gradient of the weights."""
        return Matmul(f"{self.name}, gradient of weight", self.k, self.m, self.n, self.batch, self.precision)

    def seconds(self, job: Job) -> Floats:
        """time = max(flops / (peak share q), bytes / bandwidth)

        q = w / (w + w0) k / (k + k0), w = tiles / multiprocessors. `peak` FLOP/s of the precision; `share` what the
        best matmuls reach of it, times what lasts in training (`Calibration`). k0 `ramp_k`: features in at which half
        the time goes into filling and emptying the multipliers. w0 `partial_wave`: waves of tiles that a matmul takes
        longer than its tiles need, as the last is not full and the first starts cold. `bytes`: two inputs and the
        result, once each. Source: tile and wave quantisation in NVIDIA's "Matrix Multiplication Background" guide,
        smoothed, since libraries pick among many tiles and split k where there are few. Ignored: how operands lie in
        memory, and that more power than the chip may draw lowers its clock for some shapes more than for others.
        """
        chip, fitted = job.cluster.accelerator, job.calibration
        return ledger.compute(
            self.name, _FORMULA, "s", "tile and wave quantisation, NVIDIA's Matrix Multiplication Background",
            M=self.m, K=self.k, N=self.n, batch=self.batch, multiprocessors=chip.multiprocessors,
            w0=fitted.partial_wave, k0=fitted.ramp_k, rate=reached_flops_per_s(job, self.precision or job.precision),
            e=job.element_bytes, bandwidth=chip.memory_bytes_per_s,
        )  # fmt: skip


_FORMULA = (
    f"w = max(M / {TILE_ROWS}, 0.25) * max(N / {TILE_COLUMNS}, 0.25) * batch / multiprocessors; "
    "q = w / (w + w0) * (K / (K + k0)); "
    "max(2 * M * K * N * batch / (rate * q), e * ((M * K + K * N + M * N) * batch) / bandwidth)"
)


def reached_flops_per_s(job: Job, precision: str) -> float:
    """What the best shapes of matmuls reach in training."""
    chip = job.cluster.accelerator
    lasting = job.calibration.products(chip.name)
    rate = chip.flops_per_s[precision] * chip.matmul_share[precision] * lasting
    if ledger.recording():
        ledger.note(
            f"rate of matmuls in {precision}", "peak_rate * matmul_share * lasting_share", rate, "FLOP/s",
            "cost/hardware.toml, cost/calibration.toml", "Rates", peak_rate=chip.flops_per_s[precision],
            matmul_share=chip.matmul_share[precision], lasting_share=lasting,
        )  # fmt: skip
    return rate


def layer_matmuls(job: Job, of: Candidates, block: Block, tokens: Floats) -> Iterator[Matmul]:
    """Those with weights in one layer; `tokens`: (n,) of one microbatch on a rank of cp.

    Experts have equal loads. Each rank of tp sends its part of the tokens to experts, and gets as many as it sends: m
    of an expert is tokens / tp x top_k / (experts of the rank).
    """
    for group in block.matmuls:
        first, n_out = group.rows[0], _outputs(job, of, group)
        if first.matmul == "routed":
            assert job.model.moe is not None
            experts = first.shape[0] / of.ep
            rows = tokens / of.tp * job.model.moe.top_k / experts
            yield Matmul(group.name, rows, first.shape[-1], n_out, experts)
        elif first.kind == "router":
            yield Matmul(group.name, tokens / of.tp, first.shape[-1], n_out, precision="fp32")
        else:
            n_in = first.shape[-1] / of.tp if first.split == "row" else first.shape[-1]
            yield Matmul(group.name, tokens, n_in, n_out)


def _outputs(job: Job, of: Candidates, group: Group) -> Floats | float:
    """Features out on one rank of tp."""
    return sum(
        row.shape[-2] / ways(job.model, row.split, of.tp) if row.split_dim == 0 else row.shape[-2] for row in group.rows
    )


def head_matmul(job: Job, of: Candidates, tokens: Floats) -> Matmul:
    """Logits of a microbatch, over the rank's part of the vocabulary; nobody makes them in fp8."""
    n_out = job.model.vocab_size / of.tp
    return Matmul("logits", tokens, job.model.d_model, n_out, precision=job.wide_precision)
