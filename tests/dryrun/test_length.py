"""Proves that a shortened step has the peak, messages and FLOPs of the whole one, and that it is short."""

from typing import Any

import pytest

from shardwright.config import RunConfig, parse
from shardwright.dry_run.length import ShortenedStep, step_length
from shardwright.dry_run.program import dry_rank
from shardwright.dry_run.record import RankRecord
from tests.distributed import run_ranks
from tests.dryrun.worlds import Table, run_file
from tests.marks import rest_prove

STEPS: dict[str, tuple[str, dict[str, Any], int]] = {
    "no pipeline": ("dense", {"dp_shard": 2, "zero": 3}, 5),
    "1f1b": ("dense", {"pp": 2}, 11),
    "1f1b of four": ("dense", {"pp": 4, "dp_shard": 2, "zero": 1}, 21),
    "1f1b, zero 3, tp": ("dense", {"pp": 2, "dp_shard": 2, "zero": 3, "tp": 2}, 10),
    "1f1b, experts": ("mixture", {"pp": 2, "dp_shard": 2, "ep": 2, "zero": 2}, 10),
    "1f1b, activations on the host": ("dense", {"pp": 2, "offload_activations": "cpu"}, 10),
    "1f1b, parameters on the host": (
        "dense",
        {"pp": 2, "dp_shard": 2, "zero": 2, "offload_optimizer": "cpu", "offload_parameters": "cpu"},
        11,
    ),
    "interleaved": (
        "dense",
        {"pp": 2, "pp_schedule": "interleaved-1f1b", "virtual_stages": 2, "dp_shard": 2, "zero": 3},
        13,
    ),
    "zb-h1": ("dense", {"pp": 2, "pp_schedule": "zb-h1", "dp_shard": 2, "zero": 2}, 10),
    "zb-h2": ("dense", {"pp": 2, "pp_schedule": "zb-h2"}, 8),
    "zb-v": ("dense", {"pp": 2, "pp_schedule": "zb-v", "virtual_stages": 2, "dp_shard": 2, "zero": 3}, 9),
    "dualpipe-v": ("dense", {"pp": 2, "pp_schedule": "dualpipe-v"}, 7),
    "dualpipe": ("dense", {"pp": 4, "pp_schedule": "dualpipe", "dp_shard": 2, "zero": 1}, 16),
    "no pipeline, documents over cp": ("dense", {"cp": 2}, 5),
    "1f1b, full recomputation over cp, documents": ("dense", {"pp": 2, "cp": 2, "recompute": "full"}, 10),
    "1f1b, selective recomputation, experts over cp": (
        "mixture",
        {"pp": 2, "cp": 2, "ep": 2, "zero": 1, "recompute": "selective"},
        10,
    ),
    "1f1b, MTP over cp": ("mtp", {"pp": 2, "cp": 2, "cp_method": "allgather"}, 11),
    "zb-h1, full recomputation, MTP": ("mtp", {"pp": 2, "pp_schedule": "zb-h1", "recompute": "full"}, 10),
}


def step(name: str) -> tuple[Table, RunConfig]:
    model, layout, n = STEPS[name]
    table = run_file(model, layout, "bf16")
    table["batch"]["global_batch"] = 2 * n * layout.get("dp_shard", 1)
    if "documents" in name:
        table["data"]["attention"] = "document"
    return table, parse(table)


def dry(table: Table, rank: int, length: ShortenedStep | None) -> RankRecord:
    return dry_rank(parse(table), rank, gpu=True, length=length)


@pytest.mark.parametrize("name", rest_prove(STEPS))
def test_a_shortened_step_needs_sends_and_computes_what_the_whole_one_does(name: str):
    table, config = step(name)
    layout, n = config.layout.layout(), config.accumulation
    assert step_length(config).n_run < n
    for pp_rank in {0, layout.pp - 1}:
        rank = layout.rank_at({"pp": pp_rank})
        short, whole = (
            run_ranks(dry, 1, table, rank, length)[0] for length in (None, ShortenedStep(n, ({},) * layout.pp, ()))
        )
        assert len(short.curve) < len(whole.curve)
        assert short.repeats
        assert not whole.repeats
        for what in ("peak_of_kinds", "sent", "flops", "host_bytes"):
            assert getattr(short, what) == getattr(whole, what), what
        assert short.peak.kinds == whole.peak.kinds


@pytest.mark.parametrize("schedule", ["afab", "auto"])
def test_a_step_without_a_steady_state_is_run_whole(schedule: str):
    table = run_file("dense", {"pp": 2, "pp_schedule": schedule}, "bf16")
    table["batch"]["global_batch"] = 2 * 64
    assert step_length(parse(table)).n_run == 64


def test_a_step_of_128_micro_batches_is_as_short_as_one_of_its_steady_state():
    table, _ = step("1f1b of four")
    table["batch"]["global_batch"] = 2 * 2 * 128
    length = step_length(parse(table))
    assert length.n_run <= 16
    assert all(
        sum(repeats.values()) - len(repeats) + n == 2 * 128
        for repeats, n in zip(length.repeats, length.n_actions, strict=True)
    )
