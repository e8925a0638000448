"""Proves that a run with recompute='auto' decides before the model is built, alike on all ranks, says so, writes what
it decided into its folder, and goes on with it."""

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.config import RunConfig, parse, resolved_toml
from shardwright.config.settle import settled
from shardwright.errors import ConfigError, LayoutError
from shardwright.run_folder import RUN_FILE
from shardwright.training import settle as settling
from shardwright.training.settle import settle
from shardwright.units import GiB, MiB
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
    assert "as the run began" in said
    larger = {"seq_len": 128, "global_batch": 64, "micro_batch": 8}
    other, said = settle(config(tmp_path, checkpoint={"resume": "auto"}, batch=larger), CPU, ranks_here=1)
    assert "as the run began" not in said, "another batch needs another choice"
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
