"""Step times of the real training program, without data files: the cost of a layout in `train` on this machine."""

import gc
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shardwright.config import RunConfig, parse
from shardwright.data.batches import Batch
from shardwright.training.build import build_model, build_trainer
from shardwright.training.device import configure_malloc


@dataclass(frozen=True)
class MeasuredSteps:
    """Measurements of one rank: wall and CPU-seconds of each step, and the peak of the process's bytes."""

    wall_s: tuple[float, ...]
    cpu_s: tuple[float, ...]
    peak_bytes: int


def run_file(model: dict[str, Any], batch: dict[str, int], layout: dict[str, Any], compute: str) -> dict[str, Any]:
    """Return a run file for a model on random tokens, which are in no file."""
    return {
        "out": "none",
        "steps": 1,
        "model": model,
        "data": {"path": "none"},
        "batch": batch,
        "layout": layout,
        "precision": {"compute": compute},
    }


def run_steps(table: dict[str, Any], steps: int, device: str = "cpu", warm_up: int = 1) -> MeasuredSteps:
    """Take steps as this rank of the current process group. A collective."""
    configure_malloc()
    where = selected(device)
    if where.type == "cpu":
        reset_peak()
    config = parse(table)
    model = build_model(config, where, compiled=False)
    trainer = build_trainer(config, model, where, compiled=False)
    batch = random_batch(config)
    wall, cpu = [], []
    for step in range(warm_up + steps):
        begin = _now(where)
        trainer.step(batch, step, 1e-4)
        end = _now(where)
        if step >= warm_up:
            wall.append(end[0] - begin[0])
            cpu.append(end[1] - begin[1])
    peak = peak_resident_bytes(where)
    del trainer, model
    gc.collect()
    dist.barrier()
    return MeasuredSteps(tuple(wall), tuple(cpu), peak)


def selected(device: str) -> torch.device:
    """Make this rank's device the current device, for which a mesh is built, and return it."""
    if device == "cpu":
        return torch.device(device)
    where = torch.device(device, torch.cuda.current_device())
    torch.cuda.set_device(where)
    return where


def random_batch(config: RunConfig) -> Batch:
    """Return a random batch of one data rank."""
    shape_AB = (config.accumulation, config.batch.micro_batch)
    tokens_ABT = torch.randint(0, config.spec().vocab_size, (*shape_AB, config.batch.seq_len + 1))
    ids_AB = torch.arange(shape_AB[0] * shape_AB[1]).view(shape_AB)
    targets_ABT = tokens_ABT[..., 1:].contiguous()
    return Batch(tokens_ABT[..., :-1].contiguous(), targets_ABT, ids_AB, targets_ABT.numel())


def reset_peak() -> None:
    """Reset the kernel's peak of resident memory. A forked process starts with its parent's peak."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        pass


def peak_resident_bytes(device: torch.device) -> int:
    """Return the peak memory of this process since `reset_peak`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))


def _now(device: torch.device) -> tuple[float, float]:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter(), time.process_time()
