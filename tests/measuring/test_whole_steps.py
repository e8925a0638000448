"""What whole steps tell of a machine: by how much work and messages take longer there than alone."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from shardwright.config import parse
from shardwright.cost.hardware import cluster
from shardwright.cost.job import Job
from shardwright.cost.machine import on_machine
from shardwright.cost.step import estimate
from shardwright.measuring.file import hardware_toml
from shardwright.measuring.points import MachineMeasurements, WholeStep
from shardwright.measuring.whole_steps import SEQ_LEN, cases_of, holes, in_step, table_of
from tests.measuring.machines import machine

HOLES = [0.2, 0.7, 0.7, 1.1]
SLOWER = {"work": 1.2, "data_parallel": 2.0, "tensor_parallel": 1.5, "context_parallel": 3.0}


def steps_of(text: str, folder: Path, ranks: int) -> tuple[WholeStep, ...]:
    """What is measured on a machine that is as a hardware file says."""
    path, steps = folder / "other.toml", []
    path.write_text(text)
    for layout, micro_batch in cases_of(ranks):
        config = parse(table_of(layout, ranks, micro_batch))
        there = cluster(f"mine:{ranks}/{ranks}", path)
        sizes = {"seq_len": SEQ_LEN, "global_batch": config.batch.global_batch}
        job = Job(model=config.spec(), cluster=there, precision="fp32", **sizes)
        found = estimate(on_machine(job), config.layout.layout(), micro_batch)
        steps.append(WholeStep(ranks, layout, micro_batch, found.step_s, int(found.peak_bytes)))
    return tuple(steps)


def slower(text: str) -> str:
    """The hardware file with messages and work that take longer in a step."""
    head, mark, rest = text.partition("[accelerators.mine.rates.2]\n")
    assert mark
    values = ", ".join(f"{key} = {json.dumps(value)}" for key, value in SLOWER.items())
    return f"{head}{mark}holes = {HOLES}\nin_step = {{ {values} }}\n{rest}"


def test_factors_of_work_and_of_messages_are_found_again(tmp_path: Path):
    alone = hardware_toml(machine(), "mine", "shardwright measure")
    found = in_step(alone, "mine", steps_of(slower(alone), tmp_path, 2), "wall")
    assert found == pytest.approx(SLOWER, rel=0.02)
    assert in_step(alone, "mine", steps_of(alone, tmp_path, 2), "wall") == pytest.approx(dict.fromkeys(SLOWER, 1.0))


def test_one_rank_tells_of_work_alone(tmp_path: Path):
    alone = hardware_toml(machine(), "mine", "shardwright measure")
    assert in_step(alone, "mine", steps_of(alone, tmp_path, 1), "wall") == pytest.approx({"work": 1.0})


def test_what_the_c_library_keeps_is_found_again(tmp_path: Path):
    alone = hardware_toml(machine(), "mine", "shardwright measure")
    assert holes(alone, "mine", steps_of(slower(alone), tmp_path, 2)) == pytest.approx(HOLES, rel=1e-4)
    assert holes(alone, "mine", steps_of(alone, tmp_path, 2)) == pytest.approx([0.0] * 4, abs=1e-4)


def test_the_file_has_the_factors_and_plan_takes_them(tmp_path: Path):
    alone = hardware_toml(machine(), "mine", "shardwright measure")
    steps = steps_of(slower(alone), tmp_path, 2)
    measured = with_steps(machine(), steps)
    text = hardware_toml(measured, "mine", "shardwright measure")
    rates = tomllib.loads(text)["accelerators"]["mine"]["rates"]
    assert rates["2"]["in_step"] == pytest.approx(SLOWER, rel=0.02)
    assert rates["2"]["holes"] == pytest.approx(HOLES, rel=1e-3)
    assert not {"in_step", "holes"} & rates["1"].keys()
    for found, expected in zip(steps_of(text, tmp_path, 2), steps, strict=True):
        assert found.seconds == pytest.approx(expected.seconds, rel=0.01), found.layout
        assert found.peak_bytes == pytest.approx(expected.peak_bytes, rel=1e-3), found.layout


def with_steps(known: MachineMeasurements, steps: tuple[WholeStep, ...]) -> MachineMeasurements:
    return replace(known, ranks=tuple(replace(each, steps=steps) if each.ranks == 2 else each for each in known.ranks))


def test_layouts_are_those_of_as_many_ranks_as_there_are():
    assert not list(cases_of(3))
    for ranks in (1, 2, 4, 8):
        for layout, micro_batch in cases_of(ranks):
            config = parse(table_of(layout, ranks, micro_batch))
            assert config.layout.layout().world_size == ranks
