"""One layout's cost in one call, and why a layout has none."""

import pytest

from shardwright.cost.step import estimate
from shardwright.layout.layout import Layout
from shardwright.system.errors import LayoutError
from shardwright.system.units import GiB
from tests.cost.jobs import job


def test_a_layout_has_a_time_whose_parts_add_up_and_a_peak():
    found = estimate(job(), Layout(dp_shard=16, tp=4, zero=1, sequence_parallel=True))
    assert found.step_s == pytest.approx(sum(found.parts_s.values()))
    assert found.peak_bytes == pytest.approx(float(found.memory.reserved_bytes[0]))
    assert 10 * GiB < found.peak_bytes < 80 * GiB


def test_selective_recomputation_lies_between_none_and_full():
    layout = Layout(dp_shard=64, zero=3)
    none, selective, full = (estimate(job(), layout, recompute=how) for how in ("none", "selective", "full"))
    assert none.step_s < selective.step_s < full.step_s
    assert none.peak_bytes >= selective.peak_bytes > full.peak_bytes


def test_all_that_keeps_a_layout_from_running_is_said_at_once():
    with pytest.raises(LayoutError) as error:
        estimate(job(), Layout(dp_shard=3, zero=1, tp=3, sequence_parallel=False), micro_batch=5)
    text = str(error.value)
    for part in ("tp=3 does not divide", "= 9 ranks, and h100:64 has 64 accelerators", "global_batch=256 is not"):
        assert part in text
