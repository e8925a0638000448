"""Proves that recompute='auto' is the first of none, selective in ever more layers and full in ever more that fits."""

import pytest

from shardwright.cost.hardware import cluster
from shardwright.cost.job import Job
from shardwright.layout.layout import Layout
from shardwright.model.presets import PRESETS
from shardwright.planner.recomputation import least_recomputation, peak_bytes
from shardwright.system.errors import LayoutError
from shardwright.system.units import GiB

JOB = Job(model=PRESETS["llama-3.1-8b"], cluster=cluster("h100:8"), seq_len=8192, global_batch=64)
LAYOUTS = {
    "zero 3": Layout(dp_shard=8, zero=3),
    "pipeline": Layout(pp=4, dp_shard=2, zero=1),
    "two stages a rank": Layout(pp=2, pp_schedule="zb-v", tp=4),
}


def every(layout: Layout, most: int) -> list[Layout]:
    """All choices, the least recomputation first."""
    of_kinds = [
        layout.changed(recompute=kind, recompute_layers=layers)
        for kind in ("selective", "full")
        for layers in (*range(1, most), None)
    ]
    return [layout, *of_kinds]


@pytest.mark.parametrize(("name", "most"), [("zero 3", 32), ("pipeline", 9), ("two stages a rank", 9)])
def test_the_choice_is_the_first_that_fits_whatever_the_memory(name: str, most: int):
    layout = LAYOUTS[name]
    choices = every(layout, most)
    needed = [peak_bytes(JOB, each, 1) for each in choices]
    # Full saves more, except where the peak is what W waits for, which is computed again before it.
    assert needed[0] > needed[most] >= needed[-1]
    for limit in [max(needed), *sorted(needed)[:: max(1, len(needed) // 6)], sum(needed) / len(needed)]:
        expected = next(each for each, n_bytes in zip(choices, needed, strict=True) if n_bytes <= limit)
        found = least_recomputation(JOB, layout, 1, limit)
        assert found.layout == expected, limit
        assert found.peak_bytes == peak_bytes(JOB, expected, 1) <= limit


def test_where_nothing_fits_the_answer_says_how_much_is_missing_and_what_helps():
    with pytest.raises(LayoutError, match=r"even with full recomputation.* of the 20 GiB .*batch.micro_batch=1"):
        least_recomputation(JOB, LAYOUTS["zero 3"], 1, 20 * GiB)


def test_a_layout_without_formulas_is_refused():
    with pytest.raises(LayoutError, match=r"none for layout\.cp_method='usp'"):
        least_recomputation(JOB, Layout(cp=4, cp_method="usp", ulysses_degree=2, dp_shard=2), 1, 80 * GiB)
