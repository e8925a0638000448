"""Measure this machine with one rank, and with as many ranks as it has cores or was started with."""

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from shardwright.measuring import whole_steps
from shardwright.measuring.clock import Kind, MeasuringClock
from shardwright.measuring.generation import generation_points
from shardwright.measuring.kernels import attention, copies, kernels, matmuls
from shardwright.measuring.messages import disk_bytes_per_s, host_bytes_per_s, messages
from shardwright.measuring.overheads import overheads, update_seconds
from shardwright.measuring.points import (
    KernelPoint,
    MachineMeasurements,
    MessagePoint,
    Overheads,
    RankPoints,
    WholeStep,
)
from shardwright.measuring.steps import selected
from shardwright.parallel.objects import gathered
from shardwright.system.processes import machine_bytes, threads_of_a_rank
from shardwright.training.device import configure_malloc
from shardwright.verification.ranks import run_ranks

Say = Callable[[str], None]
CPU_PRECISIONS, GPU_PRECISIONS = ("fp32", "bf16"), ("fp32", "bf16", "fp16")
_NONE = Overheads(0.0, 0.0, 0.0, 1.0)


def measure_here(
    kind: Kind, device: str, ranks: Sequence[int], folder: Path, budget_s: float, say: Say
) -> MachineMeasurements:
    """Measure with local ranks: with each number in `ranks` on a CPU, with one on a GPU. `device`: "cpu" or "cuda";
    `folder`: a folder on the measured disk; `budget_s`: time for the repeats of one operation.

    Raises WorkerError if a rank fails.
    """
    begin = time.perf_counter()
    on_host = device == "cpu"
    remarks = () if on_host else ("links between accelerators need ranks: torchrun --nproc-per-node N",)
    points: list[RankPoints] = []
    inside: tuple[MessagePoint, ...] = ()
    threads_of = {count: threads_of_a_rank(count) for count in (sorted(set(ranks)) if on_host else (1,))}
    rounds: list[list[WholeStep]] = []

    def run_rounds(wanted: int) -> None:
        while on_host and len(rounds) < min(wanted, whole_steps.ROUNDS):
            say("steps of a small model in several layouts")
            rounds.append(whole_steps.one_round(run_ranks, kind, threads_of))

    for count, threads in threads_of.items():
        run_rounds(len(points) + 1)
        say(f"{count} {'rank' if count == 1 else 'ranks'}, each of {threads} threads: matmuls, attention, kernels")
        per_rank = run_ranks(rank_points, count, kind, device, count, budget_s, timeout_s=600, n_threads=threads)
        middle = _middle([measured for measured, _ in per_rank])
        if count > 1:
            inside = per_rank[0][1]
        middle = _with_overheads(middle, kind, device, inside, say)
        if on_host:
            say("passes of generate")
            middle = replace(middle, generation=generation_points(run_ranks, kind, budget_s, threads, inside))
        points.append(middle)
    run_rounds(whole_steps.ROUNDS)
    steps = whole_steps.medians(rounds)
    points = [
        replace(of_ranks, steps=tuple(step for step in steps if step.ranks == of_ranks.ranks)) for of_ranks in points
    ]
    say("the disk")
    return MachineMeasurements(
        name=machine_name(device),
        clock=kind,
        on_host=on_host,
        cores=os.cpu_count() or 1,
        took_s=time.perf_counter() - begin,
        ranks=tuple(points),
        inside=inside,
        host_bytes_per_s=0.0 if on_host else host_bytes_per_s(MeasuringClock(torch.device(device), "wall")),
        disk_bytes_per_s=disk_bytes_per_s(folder),
        remarks=remarks,
    )


def measure_as_rank(
    kind: Kind, device: torch.device, ranks_here: int, folder: Path, budget_s: float
) -> MachineMeasurements | None:
    """Measure as one rank of a process group that torchrun or srun has set up, with equal numbers of ranks on all
    machines. Returns None except on rank 0. Groups are the ranks of a machine, and the first ranks of all machines."""
    begin = time.perf_counter()
    rank, world = dist.get_rank(), dist.get_world_size()
    local = rank_points(kind, device.type, ranks_here, budget_s, grouped=True)
    every = gathered(local, tuple[RankPoints, tuple[MessagePoint, ...]])
    nodes = world // ranks_here
    across: tuple[MessagePoint, ...] = ()
    if nodes > 1:
        group = dist.new_group(list(range(0, world, ranks_here)))
        if rank % ranks_here == 0:
            across = tuple(messages(MeasuringClock(device, kind, budget_s), group))
    inside = every[0][1]
    machine = None
    if rank == 0:
        middle = _with_overheads(
            _middle([measured for measured, _ in every]), kind, device.type, inside, lambda _: None
        )
        machine = MachineMeasurements(
            name=machine_name(device.type),
            clock=kind,
            on_host=device.type == "cpu",
            cores=os.cpu_count() or 1,
            took_s=time.perf_counter() - begin,
            ranks=(middle,),
            inside=inside,
            across=across,
            host_bytes_per_s=host_bytes_per_s(MeasuringClock(device, "wall")),
            disk_bytes_per_s=disk_bytes_per_s(folder),
        )
    dist.barrier()
    return machine


def rank_points(
    kind: Kind, device: str, ranks_here: int, budget_s: float, grouped: bool = False
) -> tuple[RankPoints, tuple[MessagePoint, ...]]:
    """Measure this rank while the others do the same, and the messages between the ranks of its machine, which have
    consecutive numbers. `grouped`: the world has other machines; every rank calls it."""
    where = selected(device)
    clock = MeasuringClock(where, kind, budget_s)
    configure_malloc()  # as in the training program
    precisions = CPU_PRECISIONS if device == "cpu" else GPU_PRECISIONS
    wide = "fp32" if device == "cpu" else "bf16"
    dist.barrier()
    points = RankPoints(
        ranks=ranks_here,
        threads=torch.get_num_threads(),
        memory_bytes=machine_bytes() / ranks_here if device == "cpu" else float(torch.cuda.mem_get_info(where)[1]),
        process_bytes=0.0,
        matmuls=tuple(matmuls(clock, precisions)),
        attention=tuple(attention(clock, wide)),
        kernels=tuple(kernels(clock, wide)),
        copies=tuple(copies(clock)),
        overheads=_NONE,
    )
    dist.barrier()
    group = _machine_group(ranks_here) if grouped else dist.group.WORLD
    sent = tuple(messages(clock, group)) if ranks_here > 1 and group is not None else ()
    return points, sent


def _machine_group(ranks_here: int) -> dist.ProcessGroup:
    """Return the process group of this rank's machine; every rank of the world creates all of these groups."""
    world, rank = dist.get_world_size(), dist.get_rank()
    groups = [dist.new_group(list(range(begin, begin + ranks_here))) for begin in range(0, world, ranks_here)]
    return groups[rank // ranks_here]


def _with_overheads(
    points: RankPoints, kind: Kind, device: str, inside: Sequence[MessagePoint], say: Say
) -> RankPoints:
    say("steps of small models: launches, the optimizer")
    small = [message.seconds for message in inside if message.collective == "all_gather"]
    message_s = min(small) if small and device == "cpu" else None
    fitted, process_bytes = overheads(run_ranks, kind, device, message_s)
    ((few, few_s), (many, many_s)) = run_ranks(update_seconds, 1, device, kind, n_threads=points.threads)[0]
    updates = [KernelPoint("optimizer_bytes", many - few, 1.0, 1.0, many_s - few_s)] if many_s > few_s else []
    if not updates:
        say(f"an update of {many:,} parameters took no longer than of {few:,}; plan takes the bytes that one moves")
    kept = float(process_bytes) if device == "cpu" else 0.0
    return replace(points, overheads=fitted, process_bytes=kept, kernels=(*points.kernels, *updates))


def _middle(ranks: Sequence[RankPoints]) -> RankPoints:
    """Return the median rank, by its matmuls, of ranks that measured the same at the same time."""
    ordered = sorted(ranks, key=lambda rank: statistics.fmean(point.seconds for point in rank.matmuls))
    return ordered[len(ordered) // 2]


def machine_name(device: str) -> str:
    """Return the name of the accelerator or the processor."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
