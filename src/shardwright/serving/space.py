"""The layouts and batches that a search prices."""

from collections.abc import Iterator
from dataclasses import dataclass

from shardwright.cost.hardware import Cluster
from shardwright.model.spec import ModelSpec
from shardwright.serving.setting import Degrees
from shardwright.system.units import divisors

DENSEST_BATCHES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28)


@dataclass(frozen=True)
class ServingLayout:
    """`replicas` instances, each with `degrees`, that share the users of a cluster."""

    degrees: Degrees
    replicas: int

    def __str__(self) -> str:
        each = f"{self.replicas} x ({self.degrees})" if self.replicas > 1 else str(self.degrees)
        return each


def layouts(model: ModelSpec, cluster: Cluster) -> Iterator[ServingLayout]:
    """Yield every layout that fills the cluster.

    tp divides the heads and stays inside a node, where its all-reduces are fast; pp divides the layers into stages of
    at most one layer's difference; dp attention goes with experts, whose ep is 1 (all ranks share each expert), all
    ranks of a stage (whole experts), or the ranks of dp. On a measured processor, where `generate` runs, experts are
    whole.
    """
    for size in divisors(cluster.size):
        for tp in divisors(size):
            if model.n_heads % tp or tp > cluster.node_size or not _splits(model, tp):
                continue
            for dp in divisors(size // tp) if model.moe is not None else (1,):
                pp = size // (tp * dp)
                if pp > min(model.n_layers, 16):
                    continue
                for ep in sorted(_expert_degrees(model, tp, dp)):
                    if cluster.accelerator.on_host and model.moe is not None and ep != tp * dp:
                        continue
                    yield ServingLayout(Degrees(tp, pp, dp, ep), cluster.size // size)


def _expert_degrees(model: ModelSpec, tp: int, dp: int) -> set[int]:
    if model.moe is None:
        return {1}
    ranks = tp * dp
    return {
        ep
        for ep in (1, dp, ranks)
        if ranks % ep == 0 and model.moe.n_experts % ep == 0 and model.moe.d_ffn % (ranks // ep) == 0
    }


def _splits(model: ModelSpec, tp: int) -> bool:
    """Return whether every rank gets whole kv heads, or each kv head whole ranks, and an equal part of the networks."""
    latent = model.latent_attention is not None
    heads = latent or model.n_kv_heads % tp == 0 or tp % model.n_kv_heads == 0
    return heads and model.d_ffn % tp == 0


def batches(most: int) -> list[int]:
    """Return the numbers of requests of an instance that are tried: every small number, then steps of 1/8."""
    found = [each for each in DENSEST_BATCHES if each <= most]
    step = 32.0
    while step <= most:
        found.append(int(step))
        step *= 2**0.25
    if most >= 1 and most not in found:
        found.append(most)
    return found
