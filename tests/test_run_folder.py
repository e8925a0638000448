"""Proves that what a run writes in its folder is what is read from it."""

import json
from pathlib import Path

from shardwright.run_folder import (
    Evaluated,
    Logged,
    PipelineStep,
    Started,
    as_record,
    checkpoint_name,
    now,
    published,
    read_metrics,
    read_pipeline_steps,
)

DENSE = Logged(1, 6.0, 0.5, 3e-4, 64, 1000.0, 500.0, 0.01, None, 2**20, 0.064, 0.004, 0.05, 0.01)


def test_records_and_pipeline_steps_are_read_as_they_were_written_and_half_a_line_is_left_out(tmp_path: Path):
    moe = Logged(**{**vars(DENSE), "step": 2, "load_by_layer": (1.5, 2.0), "dropped_fraction": 0.0})
    start = Started(
        0, "1 rank", "one rank", "constant", 1, "host", "cpu", "2.13", "0.1", time="2026-11-22T10:52:20+00:00"
    )
    told = [start, Evaluated(0, 6.2, now()), DENSE, moe]
    (tmp_path / "metrics").write_text("".join(json.dumps(as_record(each)) + "\n" for each in told) + '{"kind": "tra')
    assert list(read_metrics(tmp_path / "metrics")) == told
    assert "load_by_layer" not in as_record(DENSE)
    assert as_record(DENSE)["mfu"] is None
    step = PipelineStep(5, 1, 1.7e9, (("1F0", 0.0, 0.25), ("1B0", 0.5, 1.0)))
    (tmp_path / "timeline").write_text(step.line() + step.line()[:20])
    assert list(read_pipeline_steps(tmp_path / "timeline")) == [step]


def test_published_checkpoints_are_in_the_order_of_their_steps(tmp_path: Path):
    for name in (checkpoint_name(100_000_000), checkpoint_name(50), "step-00000060.partial", "other"):
        (tmp_path / name).mkdir()
    assert [path.name for path in published(tmp_path)] == ["step-00000050", "step-100000000"]
    assert published(tmp_path / "none") == []
