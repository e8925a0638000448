"""What this process may use of its machine: memory, as far as its control groups (cgroups) allow, which are those of a
container, a job of Slurm or a service of systemd; and cores. No torch.

The kernel's documents: cgroup v2, `memory.max`; cgroup v1, `memory.limit_in_bytes`. A group has at most what the groups
around it have, so the least limit counts.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

GROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


class MemoryLimit(NamedTuple):
    """Bytes that the processes of a group may use together, and the file that says so."""

    n_bytes: int
    file: Path


def memory_limit(groups: Path = GROUPS, own: Path = OWN) -> MemoryLimit | None:
    """The least limit of the groups that this process is in; None where there is none.

    `groups`: where the file system of cgroups is mounted; `own`: the file that names the groups of a process, with a
    line `hierarchy:controllers:path` each. In a container a path may be that on the machine outside, which is not
    mounted: then the group that is mounted at the top is its own.
    """
    found = []
    for file in _files(groups, own):
        with suppress(OSError, ValueError):  # of a group that is not mounted, or "max": no limit
            found.append(MemoryLimit(int(file.read_text()), file))
    return min(found, default=None)


def usable_cores() -> int:
    """Cores that this process may run on."""
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
        yield from (top / each / name for each in (inner, *inner.parents))
