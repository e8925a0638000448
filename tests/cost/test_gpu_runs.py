"""The plan of runs that were measured: peaks of PyTorch's CUDA allocator on a mock, and peaks and speed on an H200."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from shardwright.config import as_toml, parse
from shardwright.config.settle import job_of
from shardwright.cost.memory import MemoryEstimate
from shardwright.cost.step import estimate

PEAKS = Path(__file__).parents[2] / "benchmarks/results/memory-2026-11-29.jsonl"
RECORDS = [json.loads(line) for line in PEAKS.read_text().splitlines()]
NAMES = [record["name"] for record in RECORDS]


def run_table(settings: dict[str, Any]) -> dict[str, Any]:
    """The run file of a record."""
    every = {"out": "run", "steps": 3, "device": "cuda", "data.path": "tokens"} | settings
    return tomllib.loads("".join(f"{path} = {as_toml(value)}\n" for path, value in every.items()))


def planned(record: dict[str, Any]) -> MemoryEstimate:
    """The memory that is planned for the run of a record."""
    config = parse(run_table(record["settings"]))
    layout = config.layout.layout()
    assert layout.world_size == record["devices"]
    return estimate(job_of(config), layout, config.batch.micro_batch).memory


@pytest.mark.parametrize("record", RECORDS, ids=NAMES)
def test_the_plan_is_within_two_percent_of_allocated_and_three_of_reserved_memory(record: dict[str, Any]):
    memory = planned(record)
    assert memory.peak_bytes[0] == pytest.approx(record["allocated_bytes"], rel=0.02)
    assert memory.reserved_bytes[0] == pytest.approx(record["reserved_bytes"], rel=0.03)


@pytest.mark.parametrize(
    ("name", "tokens_per_s", "error"),
    [
        ("1.7b-eager", 39137, 0.04),
        ("1.7b-compile", 44531, 0.04),
        ("1.7b-recompute-full", 30997, 0.04),
        ("1b-32k", 24363, 0.04),
        ("1.7b-offload-activations", 11474, 0.12),
        ("1.7b-compile-fp8", 51685, 0.14),
    ],
)
def test_the_plan_of_an_h200_is_as_fast_as_the_run_was(name: str, tokens_per_s: float, error: float):
    """The runs of benchmarks/results/gpu-2026-11-27.md."""
    config = parse(run_table(RECORDS[NAMES.index(f"{name}, H200")]["settings"]))
    step_s = estimate(job_of(config, "h200"), config.layout.layout(), config.batch.micro_batch).step_s
    assert config.batch.global_batch * config.batch.seq_len / step_s == pytest.approx(tokens_per_s, rel=error)


def test_the_peaks_are_of_many_kinds_of_runs():
    text = [json.dumps(record["settings"]) for record in RECORDS]
    for kind in ('"precision.compile": true', "fp8", "recompute", "offload_activations", "loss_chunk", "moe", "zero"):
        assert sum(kind in each for each in text) >= 2, kind
    assert {record["devices"] for record in RECORDS} == {1, 2, 4, 8}
    assert len(RECORDS) >= 40


def test_the_job_of_a_run_file_has_the_format_and_the_stack_that_the_run_trains_with():
    eager = {"precision.compute": "bf16", "batch.seq_len": 128, "batch.global_batch": 8, "model.preset": "debug"}
    fp8 = eager | {"precision.compile": True, "precision.fp8": "rowwise"}
    jobs = [job_of(parse(run_table(settings)), "h200") for settings in (eager, fp8)]
    assert [(job.stack.name, job.precision) for job in jobs] == [
        ("shardwright", "bf16"),
        ("shardwright-compiled", "fp8-row"),
    ]
    assert {job.cluster.accelerator.name for job in jobs} == {"h200"}
