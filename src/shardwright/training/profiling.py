"""Traces of some steps by torch.profiler on given ranks, and snapshots of the allocator of GPUs.

Each rank writes its own trace, with the lead of its host's clock over the clock of rank 0's host. `shardwright report
--trace` merges them.
"""

import json
import os
import shlex
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from shardwright.config import RunConfig
from shardwright.parallel.objects import gathered
from shardwright.runs.folder import snapshot_path, trace_path
from shardwright.system.errors import WorkerError
from shardwright.system.torch_private import dump_memory_snapshot, record_memory_history
from shardwright.training.hooks import Hook, RunStart, TakenStep
from shardwright.training.run_log import RunLog

CLOCK_READINGS = 15
"""Number of times that ranks compare their clocks."""


class ProfileSteps(Hook):
    """Traces the steps of [profile] on its ranks, and records allocations if `profile.memory` is set."""

    def __init__(self, config: RunConfig, rank: int, device: torch.device, log: RunLog) -> None:
        self.config, self.section, self.rank, self.device, self.log = config, config.profile, rank, device, log
        self.out = Path(config.out)
        self._profiler: Any = None
        self._first, self._left = 0, 0
        """The first traced step, and how many steps are left to trace."""

    def on_start(self, start: RunStart) -> None:
        if self.section.memory:
            record_memory_history()

    def before_step(self, step: int) -> None:
        first = self.section.first_step
        last = min(self.section.last_step, self.config.steps)
        if first is None or self._first or not first - 1 <= step + 1 <= last:
            return
        warmup = int(step + 1 < first)  # a profiler's own start would be part of the first traced step
        self._first = step + 1 + warmup
        self._left = last - step
        ahead_ns = clock_ahead_ns()
        if self.section.ranks and self.rank not in self.section.ranks:
            return
        gpu = [ProfilerActivity.CUDA] if self.device.type == "cuda" else []
        self._profiler = profile(
            activities=[ProfilerActivity.CPU, *gpu],
            schedule=schedule(wait=0, warmup=warmup, active=self._left - warmup, repeat=1),
            on_trace_ready=lambda profiler: None,
        )
        self._profiler.start()
        place = self.config.layout.layout().coordinates(self.rank)
        about = {"rank": self.rank, "host": socket.gethostname(), "clock_ahead_ns": ahead_ns, "coordinates": place}
        self._profiler.add_metadata_json("shardwright", json.dumps(about))

    def end_step(self, taken: TakenStep) -> None:
        if self._left:
            self._left -= 1
            if self._left:
                if self._profiler is not None:
                    self._profiler.step()
            else:
                self._write(taken.step)

    def on_stop(self, taken: TakenStep) -> None:
        if self._left and taken.step >= self._first:
            self._left = 0
            self._write(taken.step)
        self._abandon()

    def on_rollback(self, start: RunStart) -> None:
        """Start again when the run comes to the first step again, unless the steps have been traced."""
        if self._left:
            self._abandon()

    def _abandon(self) -> None:
        """End a trace without a file."""
        if self._profiler is not None:
            self._profiler.stop()
        self._profiler, self._first, self._left = None, 0, 0

    def close(self) -> None:
        self._abandon()
        if self.section.memory:
            record_memory_history(None)

    def _write(self, last: int) -> None:
        """Write the trace and the snapshot of this rank, and report both. Every rank calls this."""
        problem = None
        if self._profiler is not None:
            problem = _problem_of(lambda: self._write_trace(trace_path(self.out, (self._first, last), self.rank)))
            self._profiler = None
            if self.section.memory:
                problem = problem or _problem_of(lambda: write_snapshot(self.out, self.rank))
        problems = gathered(problem, str | None)
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text is not None]
        if failed:
            self.log.tell("metrics", last, f"the profile of steps {self._first} to {last} is incomplete: {failed[0]}")
            return
        folder = shlex.quote(str(self.out))
        self.log.say(f"traced steps {self._first} to {last}: shardwright report {folder} --trace trace.json")
        if self.section.memory:
            ranks = self.section.ranks or [0]
            self.log.say(f"memory: {command_that_draws(snapshot_path(self.out, ranks[0]), history=True)}")

    def _write_trace(self, path: Path) -> None:
        self._profiler.stop()
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        self._profiler.export_chrome_trace(str(part))
        with part.open("rb") as file:  # the library writes what fits on a full disk, without an error
            file.seek(max(0, part.stat().st_size - 8))
            if not file.read().rstrip().endswith(b"}"):
                part.unlink()
                raise OSError(f"{path} was cut short; is the disk full?")
        os.replace(part, path)


def _problem_of(act: Callable[[], None]) -> str | None:
    """Return why `act` failed to write, or None."""
    try:
        act()
    except (OSError, RuntimeError) as error:
        return str(error).splitlines()[0]
    return None


def clock_ahead_ns(host: str | None = None, now_ns: Callable[[], int] = time.time_ns) -> int:
    """Return by how much the clock of this rank's host is ahead of the clock of rank 0's host, in nanoseconds.

    All ranks read their clocks when they leave a barrier, `CLOCK_READINGS` times, and the median difference counts. The
    error is the time between the first and the last rank to leave a barrier. Ranks of one host have one clock, so their
    value is the median over the host's ranks, and 0 on the host of rank 0. Every rank calls this.
    """
    readings = []
    for _ in range(CLOCK_READINGS + 1):
        dist.barrier()
        readings.append(now_ns())
    local = (host or socket.gethostname(), readings[1:])  # the first barrier connects the ranks
    return _ahead_ns(gathered(local, tuple[str, list[int]]), local[0])


def _ahead_ns(everyone: Sequence[tuple[str, list[int]]], host: str) -> int:
    first_host, first = everyone[0]
    if host == first_host:
        return 0
    of_host = [readings for name, readings in everyone if name == host]
    return round(median(own - base for readings in of_host for own, base in zip(readings, first, strict=True)))


def write_snapshot(out: Path, rank: int) -> None:
    """Write a snapshot of the allocator of this process's GPU to the folder of the run."""
    path = snapshot_path(out, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    dump_memory_snapshot(str(path))


def command_that_draws(snapshot: Path, history: bool) -> str:
    """Return the command that draws a snapshot as a web page: its allocations over time if their history was recorded,
    otherwise its segments."""
    drawing = "trace_plot" if history else "segment_plot"
    return f"python -m torch.cuda._memory_viz {drawing} {shlex.quote(str(snapshot))} -o memory.html"


@contextmanager
def memory_errors_explained(config: RunConfig, rank: int, remedy: str) -> Iterator[None]:
    """Raise WorkerError for out of memory in the block, with `remedy` and the command that draws the snapshot of the
    allocator, which is written here. A snapshot that cannot be written is left out."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        message = f"rank {rank}: {str(error).splitlines()[0]}; to need less: {remedy}"
        out = Path(config.out)
        if _problem_of(lambda: write_snapshot(out, rank)) is None:
            drawing = command_that_draws(snapshot_path(out, rank), config.profile.memory)
            message += f"; snapshot of the allocator: {drawing}"
        raise WorkerError(message) from None
