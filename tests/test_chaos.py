"""Proves, with `benchmarks/chaos.py` in a short form, that real runs whose processes are killed end as if nothing had
happened and leave nothing behind, and that every bit flipped in a checkpoint is named."""

import sys
import tempfile
from pathlib import Path
from types import ModuleType

import pytest

from tests.distributed import run_ranks
from tests.marks import prove

BENCHMARKS = str(Path(__file__).parents[1] / "benchmarks")
N_FLIPS, SEED = 40, 1476


def chaos_runs() -> ModuleType:
    """That module of the benchmarks."""
    if BENCHMARKS not in sys.path:
        sys.path.insert(0, BENCHMARKS)
    import chaos_runs

    return chaos_runs


def flipped(checkpoint: Path) -> list[tuple[str, str]]:
    """In a process of its own, which joins a process group."""
    return list(chaos_runs().flips(checkpoint, N_FLIPS, 7))


@prove
@pytest.mark.timeout(600)
def test_killed_runs_end_bit_equal_and_leave_nothing_and_flips_are_named():
    """Of seed SEED a rank is killed while ranks start, the launcher in a save and a rank in a step."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # a socket has no room for the name of a folder of pytest
        check_kills_and_flips(Path(name))


def check_kills_and_flips(tmp_path: Path) -> None:
    runs = chaos_runs()
    found = runs.KilledRuns(tmp_path, runs.write_tokens(tmp_path), SEED).run(0, 3)
    assert len(found.at) == 3, found.at
    assert "launcher" in found.at
    assert found.wrong == []
    assert found.orphans == 0
    assert found.left_over == []
    (checkpoint,) = (tmp_path / "quiet" / "out" / "checkpoints").glob("step-00000060")
    [told] = run_ranks(flipped, 1, checkpoint)
    assert len(told) == N_FLIPS
    missed = [place for place, said in told if place.partition(",")[0] not in said]
    assert missed == []
