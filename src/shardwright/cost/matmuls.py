"""The matmuls (GEMMs) of a layer on one rank, and the time of a matmul.

A matmul multiplies (m, k) by (k, n), `batch` times: `m` tokens, `k` features in, `n` out. The backward pass of a
matmul with weights is two more of as many FLOPs: (m, n) by (n, k) for the gradient of its input, (k, m) by (m, n) for
the gradient of its weights.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from shardwright.cost.blocks import BlockShape, FusedRows
from shardwright.cost.formats import FORMATS
from shardwright.cost.job import Candidates, Floats, Ints, Job
from shardwright.cost.ledger import Formulas
from shardwright.cost.parameters import tp_shards, vocabulary_shards

TILE_ROWS, TILE_COLUMNS = 256, 128
"""The tile of a matmul's output that one multiprocessor computes at a time, in elements; as in cuBLAS for large
matmuls."""


@dataclass(frozen=True)
class Matmul:
    """m, k, n, batch: arrays of shape (n,) or numbers. `precision`: of its inputs; by default the job's.
    `input_shards`, `output_shards`: ranks over which its input, and the gradient of its output, are token shards before
    they are gathered. `apart`: the matmuls of the batch are separate kernels, each with its last wave. `frozen`: its
    weights have no gradient; `stored`: the type in which they are quantised. `occupied`: multiprocessors that messages
    occupy meanwhile."""

    name: str
    m: Floats | float
    k: Floats | float
    n: Floats | float
    batch: Floats | float = 1.0
    precision: str = ""
    input_shards: Ints | int = 1
    output_shards: Ints | int = 1
    apart: bool = False
    frozen: bool = False
    stored: str = ""
    occupied: Ints | int = 0

    @property
    def flops(self) -> Floats:
        """Return 2 m k n batch."""
        return np.asarray(2.0 * self.m * self.k * self.n * self.batch)

    @property
    def for_input(self) -> "Matmul":
        """Return the matmul that computes the gradient of the input."""
        return Matmul(
            f"{self.name}, gradient of input", self.m, self.n, self.k, self.batch, self.precision, apart=self.apart
        )

    @property
    def for_weight(self) -> "Matmul":
        """Return the matmul that computes the gradient of the weights."""
        return Matmul(
            f"{self.name}, gradient of weight", self.k, self.m, self.n, self.batch, self.precision, apart=self.apart
        )

    def beside_reduction(self, job: Job) -> "Matmul":
        """Return the matmul as it runs while its result is reduced over tp, on the multiprocessors that are left.
        Matmuls whose input is gathered meanwhile run at the full rate: the copy engines send, and each piece waits for
        its own rows alone, in one of several streams, so a piece starts in the last wave of another piece
        (`split_overlap_ag` of Transformer Engine)."""
        occupied = job.stack.speed.on(job.cluster.accelerator.die).reduces_on
        return replace(self, occupied=np.where(np.asarray(self.output_shards) > 1, occupied, 0)) if occupied else self

    def seconds(self, job: Job) -> Floats:
        """Return time = max(flops / (peak share q), bytes / bandwidth) in seconds.

        q = w / (w + w0) k / (k + k0), w = tiles / multiprocessors. `peak` FLOP/s of the precision; `share` the fraction
        of it that the best matmuls reach, times the fraction sustained in training (`Calibration`). k0 `ramp_k`: input
        features at which filling and draining the pipeline of a tile takes half of the time. w0 `partial_wave`: time
        beyond the time of the tiles, in waves, since the last wave is not full and the first starts cold. `bytes`: two
        inputs and the output, once each. Source: tile and wave quantisation in NVIDIA's "Matrix Multiplication
        Background" guide, smoothed, since libraries choose among many tiles and split k if there are few. Ignored: the
        memory layout of operands, and that the power limit lowers the clock for some shapes more than for others.
        """
        chip, fitted = job.cluster.accelerator, job.calibration
        f = Formulas(
            "s", M=self.m, K=self.k, N=self.n, batch=self.batch, multiprocessors=chip.multiprocessors,
            w0=fitted.partial_wave, k0=fitted.ramp_k, rate=reached_flops_per_s(job, self.precision or job.precision),
            e=job.element_bytes, bandwidth=chip.memory_bytes_per_s,
        )  # fmt: skip
        processors, rate = f.multiprocessors, f.rate
        if np.any(self.occupied):
            f.add(occupied=self.occupied)
            processors, rate = f.multiprocessors - f.occupied, f.rate * (1 - f.occupied / f.multiprocessors)
        tiles = np.maximum(f.M / TILE_ROWS, 0.25) * np.maximum(f.N / TILE_COLUMNS, 0.25)
        w = f.let("w", (tiles if self.apart else tiles * f.batch) / processors)
        q = f.let("q", w / (w + f.w0) * (f.K / (f.K + f.k0)))
        computing = 2 * f.M * f.K * f.N * f.batch / (rate * q)
        moving = f.e * ((f.M * f.K + f.K * f.N + f.M * f.N) * f.batch) / f.bandwidth
        source = "tile and wave quantisation, NVIDIA's Matrix Multiplication Background"
        return f(self.name, np.maximum(computing, moving), source)


def reached_flops_per_s(job: Job, precision: str) -> float:
    """Return the rate that matmuls of the best shapes reach in training, in FLOP/s: the peak of the format, times the
    share that microbenchmarks reach, times the share of it sustained in training, by die and format, times the effect
    of the software."""
    chip, form = job.cluster.accelerator, FORMATS[precision]
    gain = job.stack.speed.on(chip.die).matmul_gain
    f = Formulas(
        "FLOP/s", peak_rate=chip.flops_per_s[form.peak], matmul_share=chip.matmul_share[form.peak],
        lasting_share=job.calibration.matmuls(chip.die, form.peak) * chip.lasting, format_rate=form.rate,
        matmul_gain=gain,
    )  # fmt: skip
    rate = f.peak_rate * f.matmul_share * f.lasting_share * (f.format_rate * f.matmul_gain)
    source = "cost/hardware.toml, cost/calibration.toml, cost/formats.py"
    return float(f(f"rate of matmuls in {precision}", rate, source, at="Rates"))


def fp32_or_wide(job: Job) -> str:
    """Return the format whose rate matmuls in fp32 have: fp32, or the job's wide format if the accelerator has no rate
    of fp32, as TPUs. Ignored: the several passes in bf16 that a TPU computes instead."""
    return "fp32" if FORMATS["fp32"].peak in job.cluster.accelerator.flops_per_s else job.wide_precision


def layer_matmuls(job: Job, candidates: Candidates, block: BlockShape, tokens: Floats) -> Iterator[Matmul]:
    """Yield the matmuls with weights of one layer; `tokens`: (n,) of one micro-batch on a rank of cp.

    Each rank of tp sends its token shard to the experts. With equal loads it receives as many tokens as it sends: m of
    an expert is tokens / tp x top_k / (experts of the rank) x load of the busiest rank, which is 1 for equal loads.
    """
    for group in block.matmuls:
        first, n_out = group.rows[0], _outputs(job, candidates, group)
        if first.matmul == "routed":
            assert job.model.moe is not None
            experts = first.shape[0] / candidates.ep
            load = job.busiest_load(candidates.ep, placed=candidates.shared.place_experts_every > 0)
            rows = tokens / candidates.tp * job.model.moe.top_k / experts * load
            apart = not job.stack.speed.groups_matmuls
            yield Matmul(
                group.name, rows, first.shape[-1], n_out, experts, apart=apart, frozen=first.frozen, stored=first.stored
            )
        elif first.kind == "router":
            wide = fp32_or_wide(job) if job.stack.wide_router else job.wide_precision
            rows = tokens / candidates.tp
            yield Matmul(group.name, rows, first.shape[-1], n_out, precision=wide, frozen=first.frozen)
        else:
            n_in = first.shape[-1] / candidates.tp if first.split == "row" else first.shape[-1]
            # With a replicated matrix each rank of tp computes its own tokens.
            rows = tokens / candidates.token_shards if first.split == "replicated" else tokens
            yield Matmul(
                group.name, rows, n_in, n_out,
                input_shards=candidates.token_shards if first.split in ("column", "kv_column") else 1,
                output_shards=candidates.token_shards if first.split == "row" else 1, frozen=first.frozen,
                stored=first.stored,
            )  # fmt: skip


def _outputs(job: Job, candidates: Candidates, group: FusedRows) -> Floats | float:
    """Return the output features on one rank of tp."""
    return sum(
        row.shape[-2] / tp_shards(job.model, row.split, candidates.tp) if row.split_dim == 0 else row.shape[-2]
        for row in group.rows
    )


def head_matmul(job: Job, candidates: Candidates, tokens: Floats) -> Matmul:
    """Return the matmul of a micro-batch's logits, for the rank's shard of the vocabulary; always 16 bits or more."""
    n_out = job.model.vocab_size / vocabulary_shards(job, candidates)[1]
    frozen = job.model.lora is not None
    return Matmul("logits", tokens, job.model.d_model, n_out, precision=job.wide_precision, frozen=frozen)
