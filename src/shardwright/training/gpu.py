"""Refuses a GPU on which a run could not take its first step, before the ranks rendezvous."""

import os
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from shardwright.config import RunConfig
from shardwright.system.errors import InputError
from shardwright.system.units import GiB, format_bytes
from shardwright.training.device import least_state_bytes

BF16, FP8 = (8, 0), (8, 9)
"""The oldest compute capabilities with matmuls in these formats."""
CONTEXT_BYTES = GiB
"""Approximate GPU memory of CUDA, its libraries and NCCL."""


@dataclass(frozen=True)
class GpuFacts:
    """Properties of a GPU reported by CUDA. `built_for`: the oldest compute capability that PyTorch was built for."""

    name: str
    capability: tuple[int, int]
    free_bytes: int
    total_bytes: int
    built_for: tuple[int, int] = (0, 0)


def facts_of(device: torch.device) -> GpuFacts:
    """Return the properties of a GPU. Initializes CUDA in this process."""
    architectures = [re.fullmatch(r"sm_(\d+)(\d)[a-z]?", name) for name in torch.cuda.get_arch_list()]
    built_for = [(int(match[1]), int(match[2])) for match in architectures if match]
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor)
    return GpuFacts(properties.name, capability, free_bytes, total_bytes, min(built_for, default=(0, 0)))


def gpu_problems(gpu: GpuFacts, config: RunConfig) -> list[str]:
    """Return the reasons why a rank of a run cannot train on a GPU."""
    precision, has = config.precision, f"{gpu.name} has compute capability {_dotted(gpu.capability)}"
    if gpu.capability < gpu.built_for:
        return [
            f"{has}, and this build of PyTorch ({torch.__version__}) starts at {_dotted(gpu.built_for)}; install a "
            f"build for an older CUDA, or set device='cpu'"
        ]
    problems = []
    if precision.compute == "bf16" and gpu.capability < BF16:
        problems.append(
            f"precision.compute='bf16' needs compute capability {_dotted(BF16)} (A100), and {has}; set "
            f"precision.compute='fp16' or 'fp32'"
        )
    if precision.fp8 != "none" and gpu.capability < FP8:
        problems.append(
            f"precision.fp8={precision.fp8!r} needs compute capability {_dotted(FP8)} (H100, RTX 4090), and {has}; set "
            f"precision.fp8='none'"
        )
    in_host = config.layout.layout().offload_parameters != "none"
    states_bytes = 0 if in_host else least_state_bytes(config, 8)  # weights and gradients in fp32
    if (needed := CONTEXT_BYTES + states_bytes) > gpu.free_bytes:
        problems.append(
            f"a rank needs {format_bytes(needed)} or more, and of the {format_bytes(gpu.total_bytes)} of {gpu.name} "
            f"{format_bytes(gpu.free_bytes)} are free; end the processes that use it (nvidia-smi lists them), choose "
            f"another GPU with CUDA_VISIBLE_DEVICES, or raise the degrees of layout.*"
        )
    return problems


def why_no_gpu() -> str:
    """Return CUDA's first error if PyTorch sees no GPU, or the fact that this build of PyTorch has no CUDA."""
    if torch.version.cuda is None:
        return "this build of PyTorch has no CUDA"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).partition("\n")[0].partition(" Please")[0].rstrip(".")
    return "there is none"


def interface_problems(value: str | None, interfaces: Iterable[str]) -> list[str]:
    """Return the reason why NCCL_SOCKET_IFNAME selects no network interface. It lists name prefixes; a leading `=`
    means exact names, a leading `^` means names to exclude."""
    names = sorted(interfaces)
    if not value:
        return []
    wanted = value.removeprefix("^")
    exact = wanted.startswith("=")
    parts = [part for part in wanted.removeprefix("=").split(",") if part]
    listed = [name for name in names if any(name == part if exact else name.startswith(part) for part in parts)]
    if listed if not value.startswith("^") else len(listed) < len(names):
        return []
    return [
        f"NCCL_SOCKET_IFNAME={value!r} leaves no network interface of this machine, which has {', '.join(names)}; name "
        f"one of them, or unset it"
    ]


def check_gpu(config: RunConfig, device: torch.device) -> None:
    """Raise InputError if a run cannot take a step on this process's GPU."""
    if device.type != "cuda":
        if config.precision.cuda_graphs:
            raise InputError("precision.cuda_graphs=true needs a GPU, and device is 'cpu'; leave it out there")
        return
    problems = gpu_problems(facts_of(device), config)
    if config.layout.layout().world_size > 1:
        names = [name for _, name in socket.if_nameindex()]
        problems += interface_problems(os.environ.get("NCCL_SOCKET_IFNAME"), names)
    if problems:
        raise InputError(*problems)


def name_of_gpu(device: torch.device) -> str:
    """Return a name that is unique among this machine's GPUs: the UUID or, if a device reports none, its number
    among the GPUs visible to this process."""
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return uuid if uuid.strip("0-") else f"{os.environ.get('CUDA_VISIBLE_DEVICES', '')}:{device.index}"


def claim_gpu(store: dist.Store, rank: int, gpu: str) -> None:
    """Raise InputError if another rank in the store has claimed the same GPU, because NCCL cannot connect the two."""
    owner = store.compare_set(f"gpu/{gpu}", "", str(rank)).decode()
    if owner != str(rank):
        raise InputError(
            f"ranks {owner} and {rank} use the same GPU ({gpu}), and NCCL connects one rank a GPU only; start fewer "
            f"ranks on this machine, or give each its own GPU (LOCAL_RANK, CUDA_VISIBLE_DEVICES)"
        )


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
