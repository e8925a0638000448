"""The rank of this process, and joining and leaving the process group.

| started by              | rank, world size               | store                                  |
| ----------------------- | ------------------------------ | -------------------------------------- |
| one process             | 0 of 1                         | in memory; no server, no port          |
| `shardwright train`       | RANK, WORLD_SIZE of its parent | a file that only this user can open    |
| torchrun                | RANK, WORLD_SIZE               | MASTER_ADDR:MASTER_PORT of its agent   |
| srun (Slurm)            | SLURM_PROCID, SLURM_NTASKS     | TCP at the first node, port by job     |

Store keys have the run id as prefix. Under torchrun, a name of this start follows: the agents keep one store over all
starts, and restarted ranks must not read their predecessors' keys. Rank 0 gives each rank the name (`_name_of_start`).
The restart count cannot serve as the name: each agent has its own count, which omits restarts after another agent
joined or left.
"""

import gc
import os
import re
import socket
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from shardwright.system.errors import InputError, WorkerError
from shardwright.system.processes import ranks_in_words
from shardwright.training.gpu import claim_gpu, name_of_gpu, why_no_gpu

STORE = "SHARDWRIGHT_STORE"
"""Environment variable of a rank: the file for the rendezvous of the ranks."""
SUPERVISED = "SHARDWRIGHT_SUPERVISED"
"""Environment variable that is set on a rank whose parent process compares the ranks."""
COLLECTIVE_TIMEOUT_S = 600
_POLL_S = 0.02
LAST_PORT = 65535


@dataclass(frozen=True)
class ProcessRank:
    """This process's rank in the world and on its machine, and the world size."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1


def place_from_environment(environment: Mapping[str, str] = os.environ) -> ProcessRank | None:
    """Return the rank given by torchrun, by Shardwright's launcher or by srun, or None if none is given.

    Raises InputError if the environment is incomplete or has invalid values.
    """
    if "RANK" in environment or "WORLD_SIZE" in environment:
        where = () if STORE in environment else ("MASTER_ADDR", "MASTER_PORT")
        missing = [k for k in ("RANK", "WORLD_SIZE", *where) if not environment.get(k)]
        if missing:
            raise InputError(
                f"the environment gives part of a rank but not {', '.join(missing)}; start with torchrun, "
                f"which sets them all, or unset RANK and WORLD_SIZE to start local workers"
            )
        rank, world_size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
        local_rank = _number(environment, "LOCAL_RANK") if "LOCAL_RANK" in environment else rank
        if where and _number(environment, "MASTER_PORT") > LAST_PORT:
            raise InputError(f"the environment has MASTER_PORT={environment['MASTER_PORT']}; ports go to {LAST_PORT}")
        return _checked(ProcessRank(rank, local_rank, world_size), "RANK", "WORLD_SIZE")
    # A batch script also has SLURM_PROCID=0. Only the tasks of a step, which srun starts, have a step's node list.
    if "SLURM_STEP_NODELIST" in environment and environment.get("SLURM_NTASKS", "1") != "1":
        names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS")
        return _checked(ProcessRank(*(_number(environment, name) for name in names)), "SLURM_PROCID", "SLURM_NTASKS")
    return None


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name)
    if text is None or not text.strip().isdecimal():
        raise InputError(
            f"the environment has {name}={text!r}, which is no rank or count; start with torchrun or srun, which set it"
        )
    return int(text)


def _checked(place: ProcessRank, rank: str, world_size: str) -> ProcessRank:
    if place.rank >= place.world_size:
        raise InputError(
            f"the environment has {rank}={place.rank} and {world_size}={place.world_size}; ranks go from 0 "
            f"to {world_size} - 1 = {place.world_size - 1}"
        )
    return place


def first_host(nodelist: str) -> str:
    """Return the first name of a Slurm node list: `gpu[03-05,9],login1` -> `gpu03`, `r[1-2]n[4,6]-ib` -> `r1n4-ib`."""
    match = re.match(r"(?:[^\[\],]|\[[^\]]*\])+", nodelist.strip())
    if match is None:
        raise InputError(
            f"SLURM_STEP_NODELIST={nodelist!r} names no host; set MASTER_ADDR to the host of the first node"
        )
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", match[0])


def meeting_point(environment: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Return address and port of the rendezvous: MASTER_ADDR and MASTER_PORT, or values from Slurm's variables.

    Under Slurm, the port depends on job and step, so that two jobs on a node use different ports. It is below the ports
    that Linux assigns to clients (32768 and up).
    """
    address = environment.get("MASTER_ADDR") or first_host(environment["SLURM_STEP_NODELIST"])
    if "MASTER_PORT" in environment:
        return address, _number(environment, "MASTER_PORT")
    job, step = (int(environment.get(name, "0")) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return address, 12000 + (job * 16 + step) % 20000


def pick_device(wanted: str, place: ProcessRank) -> torch.device:
    """Return the device of this rank for `auto`, `cpu` or `cuda`. Raises InputError if there is no GPU for it."""
    if wanted == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        reason = why_no_gpu()
        if wanted == "auto" and "too old" not in reason:
            return torch.device("cpu")
        raise InputError(f"device={wanted!r}, but PyTorch sees no GPU here: {reason}; mend that, or set device='cpu'")
    if torch.cuda.device_count() == 1 and "SLURM_GPUS_PER_TASK" in os.environ:
        return torch.device("cuda", 0)  # srun shows each task only its own GPU
    if place.local_rank >= torch.cuda.device_count():
        raise InputError(
            f"local rank {place.local_rank} has no GPU: this machine has {torch.cuda.device_count()}; start "
            f"fewer workers on it, or set device='cpu'"
        )
    return torch.device("cuda", place.local_rank)


def join(place: ProcessRank, device: torch.device) -> None:
    """Join the process group of all ranks. The backend is gloo for tensors on the CPU, NCCL for tensors on GPUs."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store = _store(place)
    if device.type == "cuda":
        claim_gpu(store, place.rank, f"{socket.gethostname()}/{name_of_gpu(device)}")
    dist.init_process_group(
        backend,
        store=store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
    )


@contextmanager
def process_group(place: ProcessRank, device: torch.device) -> Iterator[None]:
    """Join the process group of all ranks, and leave it when the `with` block ends without an error."""
    join(place, device)
    try:
        yield
    except BaseException:
        if place.world_size == 1:  # no other rank waits, and a program that continues may train again
            dist.destroy_process_group()
        raise
    # Ranks leave together only after a run without errors; after an error, the others may never arrive. Live FSDP and
    # optimizer objects abort the process at exit on gloo, so they are freed first.
    gc.collect()
    if place.world_size > 1:
        dist.barrier()
    dist.destroy_process_group()


def restarts_of_torchrun() -> int:
    """Return how often torchrun's agent has restarted the ranks; 0 for ranks not started by torchrun."""
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(count) if count.isdecimal() and SUPERVISED not in os.environ else 0


def _store(place: ProcessRank) -> dist.Store:
    if place.world_size == 1:
        return dist.HashStore()
    environment = os.environ
    if STORE in environment:
        file = dist.FileStore(environment[STORE], place.world_size)
        file.set_timeout(timedelta(seconds=COLLECTIVE_TIMEOUT_S))
        return file
    address, port = meeting_point(environment)
    # torchrun's agent may already serve the store.
    serves = place.rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        socket.getaddrinfo(address, port)
    except OSError as error:
        raise InputError(
            f"MASTER_ADDR={address!r} is no address or name of a machine that is known here ({error.strerror}); it "
            f"must be the address of the machine of rank 0"
        ) from None
    try:
        with _without_stderr():  # the errors below replace the C++ stack traces that PyTorch prints at each try
            store = dist.TCPStore(
                address,
                port,
                place.world_size,
                is_master=serves,
                timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
                wait_for_workers=False,
            )
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        if serves:
            raise InputError(
                f"cannot listen on {address}:{port}, where the ranks are to meet; if another program uses the port, "
                f"set MASTER_PORT to a free one on all ranks; MASTER_ADDR must be the machine of rank 0 "
                f"({_first_line(error)})"
            ) from None
        raise InputError(
            f"cannot reach rank 0 at {address}:{port}; are all ranks started, is MASTER_ADDR right, may the machines "
            f"talk to each other on that port, and does no other program use it? ({_first_line(error)})"
        ) from None
    if "TORCHELASTIC_RUN_ID" not in environment:
        return dist.PrefixStore(f"shardwright/{environment.get('SLURM_JOB_ID', 'ranks')}", store)
    of_run = dist.PrefixStore(f"shardwright/{environment['TORCHELASTIC_RUN_ID']}", store)
    return dist.PrefixStore(_name_of_start(of_run, place), of_run)


def _name_of_start(store: dist.Store, place: ProcessRank, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> str:
    """Return a name that only the ranks of one start know, using a store that may contain keys of earlier starts.

    Every other rank writes its own token and waits until rank 0 answers the token with the name. Rank 0 answers each
    token that it finds, including tokens of earlier starts, until all ranks have confirmed the name. Raises WorkerError
    on rank 0 if a rank does not confirm within `timeout_s`.
    """
    if place.rank != 0:
        token = uuid.uuid4().hex
        store.set(f"token/{place.rank}", token)
        name = store.get(f"name/{token}").decode()
        store.set(f"{name}/has/{place.rank}", "")
        return name
    name, until = uuid.uuid4().hex, time.monotonic() + timeout_s
    missing = set(range(1, place.world_size))
    answered: set[str] = set()
    while missing := {rank for rank in missing if not store.check([f"{name}/has/{rank}"])}:
        if time.monotonic() > until:
            raise WorkerError(
                f"{ranks_in_words(sorted(missing))} did not come to where the ranks meet within {timeout_s:g} s; are "
                f"all ranks started, and may their machines talk to the machine of rank 0?"
            )
        for rank in missing:
            if store.check([f"token/{rank}"]) and (token := store.get(f"token/{rank}").decode()) not in answered:
                store.set(f"name/{token}", name)
                answered.add(token)
        time.sleep(_POLL_S)
    return name


@contextmanager
def _without_stderr() -> Iterator[None]:
    """Discard text that libraries write to stderr inside the `with` block. Python exceptions still propagate."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
