"""The memory and cores that this process may use, and how long its idle threads spin. No torch.

Memory is limited by the control groups (cgroups) of a container, a Slurm job or a systemd service. The kernel's
documents: cgroup v2, `memory.max`; cgroup v1, `memory.limit_in_bytes`. A group cannot use more than its parent groups
allow, so the smallest limit counts.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

GROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
SPINS = 3000
"""Loop iterations that an idle thread spins before it sleeps, about 0.1 ms. Without spinning, a step of one process
with two threads takes 20 % longer. With OpenMP's default, a step takes twice as long on loaded cores."""
_SPINS = "GOMP_SPINCOUNT"


class MemoryLimit(NamedTuple):
    """The memory limit of a control group in bytes, shared by its processes, and the file that contains the limit."""

    n_bytes: int
    file: Path


def memory_limit(groups: Path = GROUPS, own: Path = OWN) -> MemoryLimit | None:
    """Return the smallest memory limit of the groups that this process is in, or None without a limit.

    `groups`: the mount point of the cgroup file system. `own`: the file that lists the groups of a process, one
    `hierarchy:controllers:path` a line. In a container, a path may refer to the host's cgroup tree, which is not
    mounted; the group mounted at the top is then the process's own.
    """
    limits = []
    for file in _files(groups, own):
        with suppress(OSError, ValueError):  # a group that is not mounted, or "max": no limit
            limits.append(MemoryLimit(int(file.read_text()), file))
    return min(limits, default=None)


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _files(groups: Path, own: Path) -> Iterator[Path]:
    lines: list[str] = []
    with suppress(OSError):
        lines = own.read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, name = groups, "memory.max"
        elif "memory" in controllers.split(","):
            top, name = groups / "memory", "memory.limit_in_bytes"
        else:
            continue
        inner = PurePosixPath(path.lstrip("/"))
        yield from (top / group / name for group in (inner, *inner.parents))


def brief_waiting() -> dict[str, str]:
    """Return the environment variables that make threads spin `SPINS` iterations; empty if they are already set.

    OpenMP reads the variables when PyTorch is imported.
    """
    return {} if {_SPINS, "OMP_WAIT_POLICY"} & {*os.environ} else {_SPINS: str(SPINS)}
