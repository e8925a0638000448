"""A machine whose rates are known, as points that `measure` would have measured on it."""

from dataclasses import replace

import numpy as np

from shardwright.cost.collectives import all_gather, all_reduce, point_to_point
from shardwright.cost.hardware import Cluster, NetworkLink, cluster
from shardwright.measuring.points import (
    AttentionPoint,
    CachedPoint,
    CopyPoint,
    KernelPoint,
    MachineMeasurements,
    MatmulPoint,
    MessagePoint,
    Overheads,
    RankPoints,
)
from shardwright.system.units import GiB

RATE, RAMP, PARTIAL = 50e9, 32.0, 0.5
SHAPES = [(m, k, n) for m in (128, 512, 1024) for k in (64, 256, 1024) for n in (128, 768)]


def matmul_points(ranks: int = 1) -> tuple[MatmulPoint, ...]:
    points = []
    for precision, rate in (("fp32", RATE / ranks), ("bf16", RATE / 4)):
        for m, k, n in SHAPES:
            waves = max(m / 256, 0.25) * max(n / 128, 0.25)
            reached = rate * waves / (waves + PARTIAL) * k / (k + RAMP)
            points.append(MatmulPoint(precision, m, k, n, 2 * m * k * n / reached))
    return tuple(points)


def weights_points() -> tuple[MatmulPoint, ...]:
    """Of few tokens: weights are read at 8 GB/s by one, and laid out at 5 GB/s for several."""
    points = []
    for tokens in (1, 8, 32):
        for k, n in ((256, 256), (256, 768), (512, 512)):
            share = 0.25 * (n / 128) / (0.25 * (n / 128) + PARTIAL) * k / (k + RAMP)
            together = 4 * k * n / 5e9 + 2 * tokens * k * n / (RATE * share)
            points.append(MatmulPoint("fp32", tokens, k, n, 4 * k * n / 8e9 if tokens == 1 else together))
    return tuple(points)


CACHED_HEAD_S, CACHED_RATE = 0.3e-6, 4e9


def cached_points() -> tuple[CachedPoint, ...]:
    """Of the attention of decode passes."""
    shapes = [CachedPoint(32, 8, positions, width, 0.0) for positions, width in ((16, 32), (64, 32), (64, 64))]
    return tuple(
        replace(each, seconds=each.sequences * each.heads * CACHED_HEAD_S + each.flops / CACHED_RATE) for each in shapes
    )


def attention_points(rate: float = RATE) -> tuple[AttentionPoint, ...]:
    points = []
    for length in (64, 256, 1024):
        for width in (16, 64, 128):
            flops = AttentionPoint(2, length, 4, width, 1.0, 1.0).flops
            forward_s = flops / (rate * 0.6 * width / (width + 16) * length / (length + 100))
            points.append(AttentionPoint(2, length, 4, width, forward_s, 2.5 * forward_s))
    return tuple(points)


LINK = NetworkLink(name="inside", bytes_per_s=2e9, latency_s=100e-6, half_bytes=0.0, start_s=50e-6)


def linked() -> Cluster:
    """Four ranks of a node with `LINK`."""
    return replace(cluster("h100:4/4"), inside=LINK)


def message_points(slower: float = 1.0) -> tuple[MessagePoint, ...]:
    """`slower`: by which all-gathers take longer than the formula says."""
    points = []
    for n_bytes in (2**12, 2**16, 2**20, 2**24):
        for ranks in (2, 4):
            for collective, times in ((all_reduce, 1.0), (all_gather, slower), (point_to_point, 1.0)):
                seconds = times * float(np.asarray(collective(linked(), n_bytes, ranks)))
                points.append(MessagePoint(collective.__name__, ranks, n_bytes, seconds))
    return tuple(points)


def machine(on_host: bool = True) -> MachineMeasurements:
    copies = (CopyPoint(2**20, 2**21 / 20e9), CopyPoint(2**26, 2**27 / 8e9))
    kernels = (
        KernelPoint("rmsnorm_bytes", 2**17, 2.5, 2.0, 2**17 * 2.5 * 2 * 20 / 8e9),
        KernelPoint("optimizer_bytes", 1e6, 1.0, 1.0, 1e6 * 50 / 8e9),
    )
    over = Overheads(layer_s=1e-3, ends_s=0.5e-3, step_s=2e-3, backward=1.5, bucket_s=0.3e-3)
    ranks = tuple(
        RankPoints(count, 2 // count, 16 * GiB / count, GiB / 4, matmul_points(count), attention_points(RATE / count),
                   kernels, copies, over)
        for count in (1, 2)
    )  # fmt: skip
    return MachineMeasurements("a CPU", "wall", on_host, 2, 60.0, ranks, message_points(), (), 0.0, 1e8)
