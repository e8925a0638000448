"""Bytes in host memory of one rank or of the ranks of a node, for tensors that a layout offloads."""

from dataclasses import replace

import numpy as np

from shardwright.cost import memory
from shardwright.cost.job import Candidates, Floats, Job
from shardwright.cost.rank_parameters import rank_parameters
from shardwright.cost.states import averages_on_host
from shardwright.layout.layout import Layout


def host_bytes(job: Job, candidates: Candidates, pp_rank: int) -> dict[str, Floats]:
    """Return the bytes of a rank of `pp` in host memory by kind, each (n,); empty if nothing is offloaded.

    With the P parameters of the rank's shards: states of the optimizer; a copy of the weights, 4 P, or with parameters
    on the host these and their gradients, 8 P; and the tensors kept by layers for the micro-batches in flight, at the
    peak; and averages of the weights, 4 P for each copy. Ignored: buffers for gradients, and of states on a disk, of a
    few chunks.
    """
    layout = candidates.shared
    params = rank_parameters(job, candidates, pp_rank)
    shards, expert_shards = (
        np.where(candidates.zero > 0, ranks, 1) for ranks in (candidates.shards, candidates.expert_shards)
    )
    n_parameters = params.trained_dense / shards + params.trained_experts / expert_shards
    result: dict[str, Floats] = {}
    if layout.offload_parameters == "cpu":
        frozen = (params.frozen - params.saved) / shards + (
            params.frozen_experts - params.saved_experts
        ) / expert_shards
        result["parameters and gradients"] = 8 * n_parameters + job.element_bytes * frozen
    elif layout.offload_optimizer == "cpu":
        result["copies of weights"] = 4 * n_parameters
    if layout.offload_optimizer == "cpu":
        result["optimizer states"] = job.n_optimizer_states * job.state_bytes * n_parameters
    if averages_on_host(job, candidates):
        result["averages of the weights"] = job.averages * 4 * n_parameters
    if layout.offload_activations == "cpu":
        on_device = memory.estimate_memory(
            job, replace(candidates, shared=layout.changed(offload_activations="none"))
        ).kinds
        result["activations"] = (on_device["activations"] + on_device["experts"])[:, pp_rank]
    return result


def node_host_bytes(job: Job, candidates: Candidates) -> Floats:
    """Return an upper bound on the bytes that the ranks of a node keep in host memory, (n,): the rank of `pp` with the
    most, times the ranks of a node."""
    per_rank = [
        sum(host_bytes(job, candidates, rank).values(), np.zeros(len(candidates))) for rank in range(candidates.pp)
    ]
    result: Floats = np.max(per_rank, axis=0) * job.cluster.node_size
    return result


def host_share(job: Job, candidates: Candidates) -> Floats:
    """Return `node_host_bytes` as a share of the memory of a node's host, (n,); 0 if nothing is offloaded, or if that
    memory is unknown. A layout does not fit if it is above 1."""
    memory_bytes = job.cluster.host_memory_bytes
    if not memory_bytes or not uses_host(candidates.shared, averages_on_host(job, candidates)):
        return np.zeros(len(candidates))
    return node_host_bytes(job, candidates) / memory_bytes


def uses_host(layout: Layout, averages: bool) -> bool:
    """Return whether a layout keeps tensors in host memory. `averages`: the run averages its weights."""
    return averages or "cpu" in (layout.offload_optimizer, layout.offload_parameters, layout.offload_activations)
