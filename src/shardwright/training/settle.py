"""Decides `layout.recompute = "auto"` before a model is built: by the memory of the rank that has least of it."""

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
    """The configuration with a recomputation in the place of "auto", and a line that says which and why; else as it is
    and nothing.

    `ranks_here`: of this machine, where it is to start them; without it every rank calls this in a process group, and
    all choose the same. A run that is resumed goes on as its folder says, if nothing that memory depends on changed.
    Raises LayoutError where nothing fits.
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
    """The memory of the rank that has least, on every rank."""
    hosts = gathered(socket.gethostname(), str)
    mine = memory_of(device, hosts.count(socket.gethostname()))
    least = torch.tensor(mine, dtype=torch.float64, device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return least.item()


def memory_of(device: torch.device, ranks_here: int) -> float:
    """Of a GPU; on a CPU the share of a rank in the machine's, without what a process takes."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return share_bytes(ranks_here)


def _as_before(config: RunConfig) -> tuple[str, int | None] | None:
    """The recomputation of the run in the folder, if this is to go on with it; None where something else of the model,
    batch, layout, precision or optimizer differs."""
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
