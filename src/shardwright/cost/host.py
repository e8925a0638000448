"""Bytes in the memory of the host that belong to one rank, with what a layout keeps there."""

from shardwright.cost import memory
from shardwright.cost.data_parallel import rank_parameters
from shardwright.cost.job import Candidates, Job
from shardwright.layout import Layout


def host_bytes(job: Job, layout: Layout, micro_batch: int, pp_rank: int) -> dict[str, float]:
    """By what it is, for a rank of `pp`; of a layout that has nothing there none.

    With the P parameters of the rank's shards: states of the optimizer; beside them a copy of the weights, 4 P, or with
    parameters there these and their gradients, 8 P; and what layers keep of the micro-batches in flight, at the peak.
    Ignored: buffers for gradients, and of states on a disk, of a few chunks.
    """
    candidates = Candidates.of(layout, micro_batch)
    held = rank_parameters(job, candidates, pp_rank)
    shards, expert_shards = (candidates.shards, candidates.expert_shards) if layout.zero else (1, 1)
    n_parameters = float((held.dense / shards + held.experts / expert_shards)[0])
    found: dict[str, float] = {}
    if layout.offload_parameters == "cpu":
        found["parameters and gradients"] = 8 * n_parameters
    elif layout.offload_optimizer == "cpu":
        found["copies of weights"] = 4 * n_parameters
    if layout.offload_optimizer == "cpu":
        found["optimizer states"] = job.n_optimizer_states * job.state_bytes * n_parameters
    if layout.offload_activations == "cpu":
        on_device = memory.of(job, Candidates.of(layout.changed(offload_activations="none"), micro_batch)).kinds
        found["activations"] = float((on_device["activations"] + on_device["experts"])[0, pp_rank])
    return found


def node_host_bytes(job: Job, layout: Layout, micro_batch: int) -> float:
    """The bytes that the ranks of a node keep in host memory, at most: those of the fullest rank x ranks of a node."""
    per_rank = [sum(host_bytes(job, layout, micro_batch, rank).values()) for rank in range(layout.pp)]
    return max(per_rank) * job.cluster.node_size
