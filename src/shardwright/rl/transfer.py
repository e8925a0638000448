"""Bytes and seconds of sending the weights of a policy from its trainer to the instances that generate.

A trainer gathers each matrix whole on every rank, since the layouts differ, and an instance takes its part of it (the
refit of NeMo-RL, the resharding of HybridFlow, arXiv 2409.19256). With separate accelerators the gathered matrices are
broadcast to the instances while the next ones are gathered. In bytes of one rank, with P of the whole model in 16 bits,
n of the matrices that the ranks of its node have, and o of its own, also in 16 bits:

    between nodes P - n      inside the node n - o      broadcast P

With adapters (`model.lora`) P is of the adapters alone. The instances have the base weights from the start, and apply
the adapters next to them. o is P over the ranks that divide a matrix, as if A and B were divided as their matrix is.

Ignored: conversion of names and formats, and that ranks of one node could share what they receive.
"""

from dataclasses import dataclass

from shardwright.cost.hardware import Cluster
from shardwright.cost.step import Estimate

WEIGHT_BYTES = 2
"""Bytes of a parameter that is sent; a trainer in fp32 casts its weights before it sends them."""


@dataclass(frozen=True)
class WeightTransfer:
    """Bytes that a rank of the trainer receives over each kind of link, and that a rank that generates receives from
    the trainer (`broadcast_bytes`, 0 on the same accelerators). `own_s`: seconds if each rank that generates received
    its own part alone. `whole_bytes`, `own_bytes`, `in_node_bytes`: P, o and n of the module's docstring."""

    between_nodes_bytes: float
    inside_bytes: float
    broadcast_bytes: float
    seconds: float
    own_s: float
    whole_bytes: float
    own_bytes: float
    in_node_bytes: float


def weight_transfer(
    cluster: Cluster, trained: Estimate, trained_bytes: float, generated_bytes: float, separate: bool, link_share: float
) -> WeightTransfer:
    """Return the transfer of one step. `trained_bytes`, `generated_bytes`: weights of a rank in training and in
    generation; `link_share`: share of the bandwidth that is reached."""
    pool, pp, model = trained.job.cluster, trained.candidates.pp, trained.job.model
    trained_bytes = trained_bytes * WEIGHT_BYTES / trained.job.element_bytes
    sent_parameters = model.n_parameters if model.lora is None else model.n_trained_parameters
    whole = float(WEIGHT_BYTES * sent_parameters)
    if model.lora is not None:
        candidates = trained.candidates
        shards = int(candidates.shards[0]) if candidates.zero[0] == 3 else 1
        trained_bytes = whole / (pp * int(candidates.tp[0]) * shards)
        generated_bytes *= model.n_trained_parameters / model.n_parameters
    stages = max(1, pool.node_size * pp // pool.size)  # ranks are numbered stage by stage
    in_node = whole if pool.nodes == 1 else min(whole * stages / pp, trained_bytes * pool.node_size)
    between, inside = whole - in_node, max(0.0, in_node - trained_bytes)
    across_s, inside_s = (1 / (link.bytes_per_s * link_share) for link in (cluster.across, cluster.inside))
    sent = whole if separate else 0.0
    each_s = across_s if cluster.nodes > 1 else inside_s
    seconds = max(between * across_s + inside * inside_s, sent * each_s)
    return WeightTransfer(
        between, inside, sent, seconds, generated_bytes * each_s, whole, min(trained_bytes, whole), in_node
    )
