"""Resolve `layout.recompute = "auto"` before a model is built, from the memory of the rank with the least memory.

The check that each machine has enough memory for the offloaded states of all its ranks is here too.
"""

import socket
import tomllib
from pathlib import Path

import torch
import torch.distributed as dist

from shardwright.config import RunConfig, load_kept, resolved_toml
from shardwright.config.settle import fullest_stage_config, job_of, needs_memory, settled, with_recomputation
from shardwright.cost.host import host_bytes, uses_host
from shardwright.cost.job import Candidates
from shardwright.parallel.objects import gathered
from shardwright.runs.folder import RUN_FILE
from shardwright.system.errors import ConfigError, InputError
from shardwright.system.processes import UsableMemory, machine_memory, share_bytes
from shardwright.system.units import format_bytes


def settle(config: RunConfig, device: torch.device, ranks_here: int | None = None) -> tuple[RunConfig, str]:
    """Return the configuration with "auto" replaced by a choice of recomputation, and a line that explains the choice.
    Without "auto", return the configuration unchanged and an empty line.

    `ranks_here`: number of ranks that this machine is to start. Without it, every rank calls this in a process group
    and all choose the same. A resumed run keeps its previous choice if nothing that affects memory has changed. Raises
    LayoutError if no choice fits.
    """
    if not needs_memory(config):
        return config, ""
    before = _as_before(config)
    if ranks_here is None:
        before = gathered(before, tuple[str, int | None] | None)[0]  # the ranks may not see the same folder yet
    if before is not None:
        result = with_recomputation(config, *before)
        return result, f"recompute auto: as at the start of the run, {before[0]}"
    least_bytes = memory_of(device, ranks_here) if ranks_here else _least(device)
    result, chosen = settled(config, least_bytes)
    return result, f"recompute auto: {chosen} of a rank"


def _least(device: torch.device) -> float:
    """Return the smallest memory of all ranks in bytes, equal on every rank."""
    hosts = gathered(socket.gethostname(), str)
    local_bytes = memory_of(device, hosts.count(socket.gethostname()))
    least = torch.tensor(local_bytes, dtype=torch.float64, device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return least.item()


def memory_of(device: torch.device, ranks_here: int) -> float:
    """Return the memory of a rank in bytes: the GPU's, or the rank's share of a CPU machine's without process
    overhead."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return share_bytes(ranks_here)


def _as_before(config: RunConfig) -> tuple[str, int | None] | None:
    """Return the recomputation of the run in the folder if this run resumes it. None if another setting of the
    model, batch, layout, precision or optimizer differs."""
    if config.checkpoint.resume != "auto" or not (Path(config.out) / RUN_FILE).is_file():
        return None
    try:
        began = load_kept(config.out)
    except ConfigError:
        return None
    then = began.layout.recomputation
    same = resolved_toml(with_recomputation(config, *then)), resolved_toml(began)
    tables = [tomllib.loads(text) for text in same]
    sections = ("model", "batch", "layout", "precision", "optimizer", "memory_gib")
    return then if all(tables[0].get(name) == tables[1].get(name) for name in sections) else None


def require_host_memory(config: RunConfig) -> None:
    """Raise InputError, on every rank, unless each machine has, and its control groups allow, the host memory that its
    ranks need by the formulas of the plan. A collective; every rank calls it."""
    layout = config.layout.layout()
    if not uses_host(layout, bool(config.average.slots) and config.average.device == "cpu"):
        return
    if config.precision.compute == "fp64":
        return  # the plan has no formulas for this run
    pp_rank = layout.coordinates(dist.get_rank())["pp"]
    fullest = fullest_stage_config(config)
    parts = host_bytes(job_of(fullest), Candidates.from_layout(layout, fullest.batch.micro_batch), pp_rank)
    own_bytes = {name: float(n_bytes[0]) for name, n_bytes in parts.items()}
    everyone = gathered((socket.gethostname(), machine_memory(), own_bytes), tuple[str, UsableMemory, dict[str, float]])
    problems = []
    for host in dict.fromkeys(name for name, _, _ in everyone):
        ranks = [(memory, parts) for name, memory, parts in everyone if name == host]
        memory, needed = min(usable for usable, _ in ranks), sum(sum(parts.values()) for _, parts in ranks)
        if needed > memory.n_bytes:
            problems.append(_problem(host, [parts for _, parts in ranks], memory))
    if problems:
        raise InputError(*problems)


def _problem(host: str, ranks: list[dict[str, float]], memory: UsableMemory) -> str:
    sums = {name: sum(rank_parts[name] for rank_parts in ranks) for name in ranks[0]}
    parts = " + ".join(f"{format_bytes(n_bytes)} of {name}" for name, n_bytes in sums.items())
    keys = {
        "optimizer states": "layout.offload_optimizer='none' or 'disk'",
        "parameters and gradients": "layout.offload_parameters='none'",
        "averages of the weights": "average.device='auto'",
        "activations": "layout.offload_activations='none', or more layout.recompute",
    }
    ways = "; ".join(way for name, way in keys.items() if name in sums)
    return (
        f"layout.offload_...='cpu': {len(ranks)} ranks on {host} need {parts} = {format_bytes(sum(sums.values()))} in "
        f"the memory of the host, and the machine {memory}; set {ways}; or shard over more machines"
    )
