"""The plan of runs that were measured: peaks of PyTorch's CUDA allocator on a mock, and peaks and speed on an H200."""

import json
from pathlib import Path
from typing import Any

import pytest

from shardwright.config import parse
from shardwright.config.settle import job_of
from shardwright.cost.estimate import estimate
from shardwright.cost.memory import Memory

PEAKS = Path(__file__).parents[2] / "benchmarks/results/memory-2026-11-27.jsonl"
RECORDS = [json.loads(line) for line in PEAKS.read_text().splitlines()]
NAMES = [record["name"] for record in RECORDS]
FAR = {"experts ep 2 compile"}
"""Whose reserved memory is further from the plan; memory-2026-11-27.md says how far."""


def run_table(settings: dict[str, Any]) -> dict[str, Any]:
    """The run file of a record."""
    table: dict[str, Any] = {"out": "run", "steps": 3, "device": "cuda", "data": {"path": "tokens"}}
    for path, value in settings.items():
        *sections, key = path.split(".")
        inside = table
        for section in sections:
            inside = inside.setdefault(section, {})
        inside[key] = value
    return table


def planned(record: dict[str, Any]) -> Memory:
    """The memory that is planned for the run of a record."""
    config = parse(run_table(record["settings"]))
    layout = config.layout.layout()
    assert layout.world_size == record["devices"]
    return estimate(job_of(config), layout, config.batch.micro_batch).memory


@pytest.mark.parametrize("record", RECORDS, ids=NAMES)
def test_the_plan_is_within_two_percent_of_allocated_memory(record: dict[str, Any]):
    assert planned(record).peak_bytes[0] == pytest.approx(record["allocated_bytes"], rel=0.02)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in FAR])
def test_the_plan_is_within_three_percent_of_reserved_memory(name: str):
    record = RECORDS[NAMES.index(name)]
    assert planned(record).reserved_bytes[0] == pytest.approx(record["reserved_bytes"], rel=0.03)


LARGE = {
    "model.preset": "smollm2-1.7b",
    "batch.seq_len": 4096,
    "batch.global_batch": 4,
    "batch.micro_batch": 4,
    "precision.compute": "bf16",
}
LONG = {"model.preset": "llama-3.2-1b", "batch.seq_len": 32768, "batch.global_batch": 1, "layout.recompute": "full"}
COMPILED = {"precision.compile": True}


@pytest.mark.parametrize(
    ("settings", "tokens_per_s", "error"),
    [
        (LARGE, 39137, 0.04),
        (LARGE | COMPILED, 44531, 0.04),
        (LARGE | {"layout.recompute": "full"}, 30997, 0.04),
        (LONG | {"layout.loss_chunk_tokens": 4096, "precision.compute": "bf16"}, 24363, 0.04),
        (LARGE | {"layout.offload_activations": "cpu"}, 11474, 0.12),
        (LARGE | COMPILED | {"precision.fp8": "tensorwise"}, 51685, 0.14),
    ],
    ids=["eager", "compiled", "recompute full", "32k", "offload activations", "fp8"],
)
def test_the_plan_of_an_h200_is_as_fast_as_the_run_was(settings: dict[str, Any], tokens_per_s: float, error: float):
    """The runs of benchmarks/results/gpu-2026-11-27.md."""
    config = parse(run_table(settings))
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
