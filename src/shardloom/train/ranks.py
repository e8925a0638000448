"""Which rank this process is, and the process group it joins and leaves.

| started by              | rank, world size               | store                                  |
| ----------------------- | ------------------------------ | -------------------------------------- |
| one process             | 0 of 1                         | in memory; no server, no port          |
| `shardloom train`       | RANK, WORLD_SIZE of its parent | TCP at MASTER_ADDR:MASTER_PORT         |
| torchrun                | RANK, WORLD_SIZE               | the same, under run id and restart     |
| srun (Slurm)            | SLURM_PROCID, SLURM_NTASKS     | the same; address of the first node    |
"""

import gc
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from shardloom.errors import InputError

COLLECTIVE_TIMEOUT_S = 600
SLURM_PORT = 29400


@dataclass(frozen=True)
class Place:
    """This process among all: its rank in the world and on its machine."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1


def place_from_environment(environment: Mapping[str, str] = os.environ) -> Place | None:
    """The rank given by torchrun, by our own launcher or by srun; None if no one has given one.

    Raises InputError for an environment that is half set.
    """
    if "RANK" in environment or "WORLD_SIZE" in environment:
        missing = [k for k in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if k not in environment]
        if missing:
            raise InputError(
                f"the environment gives part of a rank but not {', '.join(missing)}; start with torchrun, which sets "
                f"them all, or unset RANK and WORLD_SIZE to start local workers"
            )
        rank = int(environment["RANK"])
        return Place(rank, int(environment.get("LOCAL_RANK", rank)), int(environment["WORLD_SIZE"]))
    # A batch script has SLURM_PROCID=0 too; only the tasks of a step, which srun starts, have a step's node list.
    if "SLURM_STEP_NODELIST" in environment and int(environment.get("SLURM_NTASKS", "1")) > 1:
        return Place(
            int(environment["SLURM_PROCID"]), int(environment["SLURM_LOCALID"]), int(environment["SLURM_NTASKS"])
        )
    return None


def first_host(nodelist: str) -> str:
    """The first name of a Slurm node list: `gpu[03-05,9],login1` -> `gpu03`."""
    match = re.match(r"([^\[,]+)(?:\[(\w+))?", nodelist)
    assert match, f"node list {nodelist!r}"
    return match[1] + (match[2] or "")


def pick_device(wanted: str, place: Place) -> torch.device:
    """`auto`, `cpu` or `cuda` as the device of this rank. Raises InputError where there is no GPU for it."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise InputError("device='cuda', but PyTorch sees no GPU here; set device to 'cpu' or 'auto'")
    if place.local_rank >= torch.cuda.device_count():
        raise InputError(
            f"local rank {place.local_rank} has no GPU: this machine has {torch.cuda.device_count()}; start fewer "
            f"workers on it, or set device='cpu'"
        )
    return torch.device("cuda", place.local_rank)


@contextmanager
def process_group(place: Place, device: torch.device) -> Iterator[None]:
    """Join the group of all ranks, and leave it in order. Tensors on the CPU travel by gloo, on GPUs by NCCL."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=_store(place),
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
    )
    yield
    # Only a run that ended well leaves in step with the others; after an error they may never come.
    # Live FSDP and optimizer objects abort the process at exit on gloo: they go first.
    gc.collect()
    if place.world_size > 1:
        dist.barrier()
    dist.destroy_process_group()


def _store(place: Place) -> dist.Store:
    if place.world_size == 1:
        return dist.HashStore()
    environment = os.environ
    if "MASTER_ADDR" in environment:
        address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    else:
        address, port = first_host(environment["SLURM_STEP_NODELIST"]), SLURM_PORT
    # torchrun's agent may already serve the store; a restarted worker must not read its predecessor's keys.
    served = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        address,
        port,
        place.world_size,
        is_master=place.rank == 0 and not served,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        wait_for_workers=False,
    )
    run = environment.get("TORCHELASTIC_RUN_ID", environment.get("SLURM_JOB_ID", "local"))
    return dist.PrefixStore(f"shardloom/{run}/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


