"""Check that each machine has enough memory for the offloaded state of all its ranks."""

import socket

import torch.distributed as dist

from shardwright.config import RunConfig
from shardwright.config.settle import job_of
from shardwright.cost.host import host_bytes
from shardwright.cost.job import Candidates
from shardwright.parallel.objects import gathered
from shardwright.system.errors import InputError
from shardwright.system.processes import UsableMemory, machine_memory
from shardwright.system.units import format_bytes


def require_host_memory(config: RunConfig) -> None:
    """Raise InputError, on every rank, unless each machine has, and its control groups allow, the host memory that its
    ranks need by the formulas of the plan. A collective; every rank calls it."""
    layout = config.layout.layout()
    if "cpu" not in (layout.offload_optimizer, layout.offload_parameters, layout.offload_activations):
        return
    if config.precision.compute == "fp64":
        return  # the plan has no formulas for this run
    pp_rank = layout.coordinates(dist.get_rank())["pp"]
    parts = host_bytes(job_of(config), Candidates.from_layout(layout, config.batch.micro_batch), pp_rank)
    mine = {name: float(n_bytes[0]) for name, n_bytes in parts.items()}
    everyone = gathered((socket.gethostname(), machine_memory(), mine), tuple[str, UsableMemory, dict[str, float]])
    problems = []
    for host in dict.fromkeys(name for name, _, _ in everyone):
        ranks = [(there, parts) for name, there, parts in everyone if name == host]
        there, needed = min(each for each, _ in ranks), sum(sum(parts.values()) for _, parts in ranks)
        if needed > there.n_bytes:
            problems.append(_problem(host, [parts for _, parts in ranks], there))
    if problems:
        raise InputError(*problems)


def _problem(host: str, ranks: list[dict[str, float]], there: UsableMemory) -> str:
    sums = {name: sum(each[name] for each in ranks) for name in ranks[0]}
    parts = " + ".join(f"{format_bytes(n_bytes)} of {name}" for name, n_bytes in sums.items())
    keys = {
        "optimizer states": "layout.offload_optimizer='none' or 'disk'",
        "parameters and gradients": "layout.offload_parameters='none'",
        "activations": "layout.offload_activations='none', or more layout.recompute",
    }
    ways = "; ".join(way for name, way in keys.items() if name in sums)
    return (
        f"layout.offload_...='cpu': {len(ranks)} ranks on {host} need {parts} = {format_bytes(sum(sums.values()))} in "
        f"the memory of the host, and the machine {there}; set {ways}; or shard over more machines"
    )
