"""Proves that a run with recompute='auto' decides before the model is built, alike on all ranks, says so, writes what
it decided into its folder, and goes on with it."""

import tomllib
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.config import RunConfig, as_toml, parse, resolved_toml
from shardwright.config.settle import job_of, settled
from shardwright.cost.job import Job
from shardwright.runs.folder import RUN_FILE
from shardwright.system.errors import ConfigError, LayoutError
from shardwright.system.units import GiB, MiB
from shardwright.training import settle as settling
from shardwright.training.settle import settle
from tests.distributed import run_ranks

CPU = torch.device("cpu")


def config(out: object = "o", **changes: Any) -> RunConfig:
    table: dict[str, Any] = {
        "out": str(out),
        "steps": 1,
        "data": {"path": "d"},
        "batch": {"seq_len": 128, "global_batch": 64, "micro_batch": 16},
        "layout": {"recompute": "auto", "dp_shard": 2},
        "model": {"n_layers": 8},
    }
    return parse(table | changes)


def chosen(found: RunConfig) -> str:
    return found.layout.layout().recompute


@cache
def limits() -> dict[str, float]:
    """For each choice a memory in GiB with which it is the least that fits the debug model."""
    found: dict[str, float] = {}
    for tenths in range(1, 400, 3):
        try:
            found.setdefault(chosen(settled(config(), tenths * 8 * MiB)[0]), tenths * 8 * MiB / GiB)
        except LayoutError:
            continue
    return found


def test_less_memory_means_more_recomputation_and_too_little_an_error():
    found = limits()
    assert list(found) == ["full", "selective", "none"]
    with pytest.raises(LayoutError, match="even with full recomputation"):
        settled(config(), 8 * MiB)


def test_the_words_have_the_choice_the_peak_and_the_limit():
    _, said = settle(config(memory_gib=40.0), CPU, ranks_here=2)
    assert said.startswith("recompute auto: recompute none: ")
    assert said.endswith(" of 36 GiB of a rank"), said


def test_a_run_file_with_a_value_stays_as_it_is():
    given = config(layout={"recompute": "full"})
    assert settle(given, CPU, ranks_here=1) == (given, "")


def agreed(memory_gib: dict[int, float]) -> tuple[str, str]:
    rank = torch.distributed.get_rank()
    settling.share_bytes = lambda ranks: memory_gib[rank] * GiB  # type: ignore[assignment]
    found, said = settle(config(), CPU)
    return chosen(found), said


def test_ranks_with_different_memory_choose_what_fits_on_all_of_them():
    enough = limits()
    memory = {0: enough["none"] * 2, 1: enough["selective"]}
    one, other = run_ranks(agreed, 2, memory)
    assert one == other
    assert one[0] == "selective"


def test_a_run_goes_on_with_what_it_began_with(tmp_path: Path):
    began, _ = settled(config(tmp_path), limits()["full"] * GiB)
    (tmp_path / RUN_FILE).write_text(resolved_toml(began))
    again, said = settle(config(tmp_path, checkpoint={"resume": "auto"}, steps=9), CPU, ranks_here=1)
    assert chosen(again) == "full"
    assert again.layout.recomputation == began.layout.recomputation
    assert "as at the start of the run" in said
    larger = {"seq_len": 128, "global_batch": 64, "micro_batch": 8}
    other, said = settle(config(tmp_path, checkpoint={"resume": "auto"}, batch=larger), CPU, ranks_here=1)
    assert "as at the start of the run" not in said, "another batch needs another choice"
    assert chosen(other) == "none"


def test_the_resolved_run_file_has_the_choice():
    found, _ = settled(config(), limits()["selective"] * GiB)
    assert tomllib.loads(resolved_toml(found))["layout"]["recompute"] == "selective"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layout": {"recompute": "auto", "recompute_layers": 2}}, "recompute_layers=2 is decided by"),
        ({"memory_gib": 0.0}, "memory_gib"),
    ],
)
def test_what_contradicts_it_is_refused(changes: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=said):
        config(**changes)


def test_64_bits_have_no_formulas():
    with pytest.raises(LayoutError, match=r"none for precision\.compute='fp64'"):
        settled(config(precision={"compute": "fp64"}), GiB)


def test_the_job_of_a_run_file_follows_each_key_that_a_job_has():
    base = {"out": "run", "steps": 1, "data.path": "tokens", "batch.seq_len": 64, "batch.global_batch": 8}
    run = {"model.preset": "debug", "precision.compute": "bf16"}
    changes: list[tuple[str, dict[str, Any]]] = [
        ("model", {"model.preset": "gpt2"}),
        ("cluster", {"layout.dp_replicate": 2}),
        ("seq_len", {"batch.seq_len": 32}),
        ("global_batch", {"batch.global_batch": 16}),
        ("precision", {"precision.compute": "fp32"}),
        ("precision", {"precision.compute": "fp32", "precision.tf32": True}),
        ("precision", {"precision.fp8": "rowwise"}),
        ("stack", {"precision.compile": True}),
        ("optimizer", {"optimizer.name": "adafactor"}),
        ("narrow_states", {"optimizer.state_dtype": "bf16"}),
        ("optimizer_options", {"optimizer.beta1": 0.8}),
        ("averages", {"average.kind": "ema"}),
        ("averages_on_host", {"average.device": "cpu"}),
        ("pairs", {"preference.kind": "simpo", "data.attention": "document", "data.positions": "document"}),
    ]

    def job(settings: dict[str, Any]) -> Job:
        lines = (f"{key} = {as_toml(value)}\n" for key, value in (base | run | settings).items())
        return job_of(parse(tomllib.loads("".join(lines))))

    plain, jobs = job({}), [(name, job(change)) for name, change in changes]
    for name, changed in jobs:
        differing = {each.name for each in fields(Job) if getattr(changed, each.name) != getattr(plain, each.name)}
        assert name in differing, name
        assert differing <= {name, "optimizer_options"}
    assert len({changed.precision for _, changed in jobs}) == 4
    not_in_a_run_file = {"reference_sequences", "calibration", "document_tokens", "expert_load"}
    assert {each.name for each in fields(Job)} == {name for name, _ in changes} | not_in_a_run_file
