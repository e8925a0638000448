"""Measure collectives and sends over a process group by size, and the links to host memory and to a disk."""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.measuring.clock import MeasuringClock, worst
from shardwright.measuring.points import MessagePoint
from shardwright.parallel.collectives import StartedCollective, start_gather_tokens, start_sum, start_sum_tokens
from shardwright.parallel.objects import gathered

SIZES = (2**12, 2**16, 2**18, 2**20, 2**22, 2**24)
"""Bytes of the whole buffer."""
REPEATS = 12
WORK = 512
"""Rows and columns of the matrices that the ranks of a CPU multiply before each message."""


def messages(clock: MeasuringClock, group: dist.ProcessGroup) -> Iterator[MessagePoint]:
    """Measure every kind of message that layouts send, in fp32, as the training program sends them. Every rank of the
    group calls it and returns the same values.

    On a CPU a rank computes before each message, as in a step: ranks are not ready at the same time, the sent data is
    not in the other ranks' caches, and their cores may be in other use. The time of a message is the time of the
    sequence minus the time of the computation, as a mean over ranks and repeats. On a GPU the message is sent alone,
    and the time of the slowest rank counts.
    """
    n, work = group.size(), torch.randn(WORK, WORK, device=clock.device)
    for n_bytes in SIZES:
        elements = n_bytes // 4 // n * n
        x = torch.zeros(1, elements, 1, device=clock.device)
        shard = torch.zeros(1, elements // n, 1, device=clock.device)
        kinds: dict[str, Callable[[], object]] = {
            "all_reduce": partial(_wait, start_sum, x, group),
            "all_gather": partial(_wait, start_gather_tokens, shard, group),
            "reduce_scatter": partial(_wait, start_sum_tokens, x, group),
            "all_to_all": partial(_exchange, x[0], group),
            "point_to_point": partial(_to_the_next, x, group),
        }
        for name, send in kinds.items():
            dist.barrier(group=group)
            if clock.device.type == "cpu":
                seconds = statistics.fmean(gathered(_after_work(clock, work, send), float, group))
            else:
                seconds = worst(gathered(clock.seconds(send, REPEATS), float, group))
            yield MessagePoint(name, n, elements * 4, seconds)


def _after_work(clock: MeasuringClock, work: Tensor, send: Callable[[], object]) -> float:
    """Return the mean seconds of a message that follows a matmul."""
    seconds = []
    for repeat in range(REPEATS + 2):
        torch.mm(work, work)
        begin = clock.now()
        send()
        if repeat > 1:
            seconds.append(clock.now() - begin)
    return statistics.fmean(seconds)


def _wait(start: Callable[..., StartedCollective], x: Tensor, group: dist.ProcessGroup) -> None:
    start(x, group).wait()


def _exchange(x: Tensor, group: dist.ProcessGroup) -> None:
    dist.all_to_all_single(torch.empty_like(x), x, group=group)


def _to_the_next(x: Tensor, group: dist.ProcessGroup) -> None:
    """Send from each rank except the last to the next, like stages of a pipeline."""
    rank, n = group.rank(), group.size()
    works = []
    if rank + 1 < n:
        works.append(dist.isend(x, group=group, group_dst=rank + 1))
    if rank:
        works.append(dist.irecv(torch.empty_like(x), group=group, group_src=rank - 1))
    for work in works:
        if work is not None:
            work.wait()


def host_bytes_per_s(clock: MeasuringClock) -> float:
    """Return the one-way bandwidth from accelerator memory to host memory; 0 if they are the same memory."""
    if clock.device.type != "cuda":
        return 0.0
    on_device, pinned = torch.zeros(2**26, device=clock.device), torch.zeros(2**26, pin_memory=True)
    return pinned.nbytes / clock.seconds(lambda: pinned.copy_(on_device, non_blocking=True))


def disk_bytes_per_s(folder: Path) -> float:
    """Return the bandwidth of one rank that writes a file until it is on disk, in wall time."""
    block, n_blocks = os.urandom(2**20), 64
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".shardwright-measure-") as file:
        begin = time.perf_counter()
        for _ in range(n_blocks):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return n_blocks * len(block) / (time.perf_counter() - begin)
