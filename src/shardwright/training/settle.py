"""Resolves `layout.recompute = "auto"` before a model is built, from the memory of the rank with the least memory."""

import socket
import tomllib
from pathlib import Path

import torch
import torch.distributed as dist

from shardwright.config import RunConfig, load, resolved_toml
from shardwright.config.settle import needs_memory, settled, with_recomputation
from shardwright.parallel.objects import gathered
from shardwright.run_folder import RUN_FILE
from shardwright.system.errors import ConfigError
from shardwright.system.processes import share_bytes


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
        found = with_recomputation(config, *before)
        return found, f"recompute auto: as the run began, {before[0]}"
    least_bytes = memory_of(device, ranks_here) if ranks_here else _least(device)
    found, chosen = settled(config, least_bytes)
    return found, f"recompute auto: {chosen} of a rank"


def _least(device: torch.device) -> float:
    """Return the smallest memory of all ranks in bytes, equal on every rank."""
    hosts = gathered(socket.gethostname(), str)
    mine = memory_of(device, hosts.count(socket.gethostname()))
    least = torch.tensor(mine, dtype=torch.float64, device=device)
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
    kept = Path(config.out) / RUN_FILE
    if config.checkpoint.resume != "auto" or not kept.is_file():
        return None
    try:
        began = load(kept)
    except ConfigError:
        return None
    then = began.layout.recomputation
    same = resolved_toml(with_recomputation(config, *then)), resolved_toml(began)
    tables = [tomllib.loads(text) for text in same]
    sections = ("model", "batch", "layout", "precision", "optimizer", "memory_gib")
    return then if all(tables[0].get(name) == tables[1].get(name) for name in sections) else None
