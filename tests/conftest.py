"""Settings of all tests."""

import gc
import getpass
import os
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from zlib import crc32

# Matrices of tests are small, and several threads of every rank would take turns on the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# TorchInductor (2.13) takes code from its cache that was generated for another ATEN_CPU_CAPABILITY: the C++ compiler
# then fails, or the code writes beyond its buffers.
if _capability := os.environ.get("ATEN_CPU_CAPABILITY"):
    _cache = os.path.join(tempfile.gettempdir(), f"torchinductor-{getpass.getuser()}-{_capability}")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", _cache)
# The console of the verbs takes the width that COLUMNS has when it is made: before any test sets it.
os.environ.pop("COLUMNS", None)

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from shardwright.verification import Verifier

BUILT_IN: list[tuple[dict[str, Any], tuple[str, ...]]] = []
"""The registries of families, optimizers and schedules, and what the package itself registers."""

# A busy machine is no reason for a property to fail; pytest's own timeout ends what hangs.
settings.register_profile("house", deadline=None)
settings.load_profile("house")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", default="0/1", metavar="K/N", help="of the tests marked prove only part K of N")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the proofs of other parts. The part of a test depends on its name alone."""
    part, parts = map(int, config.getoption("--part").split("/"))
    others = [
        item
        for item in items
        if item.get_closest_marker("prove") is not None and crc32(item.nodeid.encode()) % parts != part
    ]
    if others:
        config.hook.pytest_deselected(items=others)
        left_out = set(others)
        items[:] = [item for item in items if item not in left_out]


def pytest_collectstart() -> None:
    """Import the package before any test module is. Not when this file is: the process that only hands the tests to
    those that run them would need five seconds for it, in which the others do not start."""
    import tests.distributed  # noqa: F401  (before any rank is started: it says what their server imports)
    from shardwright.model.modules import FAMILIES
    from shardwright.optimizers import OPTIMIZERS
    from shardwright.schedule.registry import _KINDS

    if not BUILT_IN:
        BUILT_IN.extend((registry, tuple(registry)) for registry in (FAMILIES, OPTIMIZERS, _KINDS))


def pytest_collection_finish() -> None:
    """Leave all that was imported and collected out of garbage collections: each of them would look at a million
    objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def trusted_for_the_session(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Extensions that tests trust are not remembered in the home of who runs them."""
    os.environ["XDG_CONFIG_HOME"] = str(tmp_path_factory.mktemp("config"))


@pytest.fixture
def built_in_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Families, optimizers and schedules that other tests have registered are not there."""
    for registry, names in BUILT_IN:
        for name in [name for name in registry if name not in names]:
            monkeypatch.delitem(registry, name)


@pytest.fixture(scope="session")
def verifier() -> "Iterator[Verifier]":
    """What it keeps of one test, such as the run of one process, serves the next."""
    from shardwright.verification import Verifier

    with Verifier() as verifier:
        yield verifier


@pytest.fixture
def alone() -> Iterator[None]:
    """A world of this process."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
