"""Proves which limit of its control groups a process keeps to, with folders that stand for /sys/fs/cgroup."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from shardwright.system import control_groups, processes
from shardwright.system.control_groups import MemoryLimit
from shardwright.system.units import GiB

NO_LIMIT_V1 = "9223372036854771712"


def limit_of(own: str, files: dict[str, str]) -> tuple[int, str] | None:
    """The limit of a process whose groups are named by `own`, and which file says so, where the mounted groups have
    these files."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        for file, text in files.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(text + "\n")
        (folder / "own").write_text(own)
        found = control_groups.memory_limit(folder, folder / "own")
        return None if found is None else (found.n_bytes, str(found.file.relative_to(folder)))


def test_a_process_may_use_what_the_strictest_of_the_groups_around_it_allows():
    files = {"memory.max": "max", "job/memory.max": "3000", "job/step/memory.max": "5000", "other/memory.max": "1"}
    assert limit_of("0::/job/step\n", files) == (3000, "job/memory.max")


def test_a_container_whose_path_is_that_of_the_machine_outside_has_the_limit_at_the_top():
    assert limit_of("0::/docker/0a1b\n", {"memory.max": "7000"}) == (7000, "memory.max")


def test_version_1_has_a_hierarchy_of_its_own_for_memory():
    own = "5:cpu:/\n4:hugetlb,memory:/job\n1:name=systemd:/job\n0::/\n"
    files = {"memory/memory.limit_in_bytes": NO_LIMIT_V1, "memory/job/memory.limit_in_bytes": "9000"}
    assert limit_of(own, files) == (9000, "memory/job/memory.limit_in_bytes")


def test_without_groups_there_is_no_limit(tmp_path: Path):
    assert limit_of("0::/\n", {"memory.max": "max"}) is None
    assert control_groups.memory_limit(tmp_path, tmp_path / "missing") is None


def test_memory_is_that_of_the_machine_unless_a_group_allows_less(monkeypatch: pytest.MonkeyPatch):
    whole = processes.machine_bytes()
    for n_bytes, found in ((GiB // 2, "allows 512 MiB (/sys/fs/cgroup/memory.max)"), (int(NO_LIMIT_V1), "has ")):
        monkeypatch.setattr(
            processes, "memory_limit", lambda n=n_bytes: MemoryLimit(n, Path("/sys/fs/cgroup/memory.max"))
        )
        assert str(processes.machine_memory()).startswith(found)
        assert processes.machine_bytes() == min(n_bytes, whole)
