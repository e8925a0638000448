"""Proves that every formula shown comes to the number shown, and that the numbers are those of the prediction."""

import re

import pytest

from shardwright.cost.hardware import cluster
from shardwright.cost.job import Job
from shardwright.model.presets import resolve
from shardwright.plan.choice import read
from shardwright.plan.explain import explain
from shardwright.plan.line import Line
from shardwright.plan.search import Priced

LAYOUTS = [
    ("llama-3.1-70b", "h100:64", 8192, "tp=8,pp=4,dp_shard=2,zero=1,micro_batch=1"),
    ("llama-3.1-70b", "h100:64", 8192, "tp=8,pp=4,schedule=interleaved-1f1b,virtual_stages=2,dp_shard=2,zero=3"),
    ("llama-3.1-8b", "h100:8", 8192, "dp_shard=8,zero=3,recompute=full,micro_batch=2"),
    ("llama-3.1-8b", "a100:16", 8192, "tp=2,cp=2,dp_replicate=2,dp_shard=2,zero=2"),
    ("deepseek-v3", "h100:256", 4096, "pp=16,schedule=dualpipe,dp_shard=16,ep=16,zero=1"),
    ("deepseek-v3", "h100:256", 4096, "pp=8,schedule=zb-v,dp_shard=32,ep=32,zero=3,zero_pp_gather=microbatch"),
    ("gpt-175b", "a100:96", 2048, "tp=8,pp=12,recompute=full"),
    ("llama-3.1-8b", "h100:16", 65536, "cp=8,cp_method=ring,dp_shard=2,zero=3"),
    ("gpt-175b", "a100:96", 2048, "tp=8,pp=12,sequence_parallel=false"),
    ("qwen3-30b-a3b", "h100:16", 4096, "tp=2,dp_shard=8,ep=16,zero=1,recompute=full"),
]
UNITS = {"B", "s", "FLOP", "FLOP/s", "B/s", "1/s", "tokens", "ranks", "layers", "a step", ""}


def priced(name: str, hardware: str, seq_len: int, text: str) -> Priced:
    asked = Job(model=resolve(name), cluster=cluster(hardware), global_batch=960, seq_len=seq_len)
    return Priced.of(asked, read(text))


def value_of(lines: list[Line], what: str) -> float:
    return next(line.value for line in lines if line.what == what)


def test_a_line_reads_as_what_formula_numbers_value_unit_source():
    line = Line("Batch", "tokens", "batch x seq", "2 * 128", 256.0, "tokens", "arithmetic")
    assert str(line) == "tokens = batch x seq = 2 * 128 = 256 tokens (arithmetic)"


@pytest.mark.parametrize("asked", LAYOUTS, ids=lambda asked: asked[0] + " " + asked[3])
def test_every_formula_comes_to_its_number(asked: tuple[str, str, int, str]):
    lines = explain(priced(*asked))
    assert len(lines) > 25
    for line in lines:
        assert line.unit in UNITS, line
        if line.numbers:
            assert re.fullmatch(r"([\d.e+\-*/(), ]|min|max)*", line.numbers), line
            value = eval(line.numbers, {"min": min, "max": max})
            assert value == pytest.approx(line.value, rel=2e-7, abs=1e-9), str(line)
        else:
            assert line.source or line.formula, line


@pytest.mark.parametrize("asked", LAYOUTS, ids=lambda asked: asked[0] + " " + asked[3])
def test_the_lines_add_up_to_the_prediction(asked: tuple[str, str, int, str]):
    of = priced(*asked)
    lines = explain(of)
    assert value_of(lines, "peak") == pytest.approx(of.peak_bytes, rel=1e-9)
    kinds = [line.value for line in lines if line.section.startswith("Memory") and line.what != "peak"]
    assert sum(kinds) * (1 + of.job.stack.fragmentation) == pytest.approx(of.peak_bytes, rel=1e-9)
    assert value_of(lines, "step") == pytest.approx(of.step_s, rel=1e-9)
    assert value_of(lines, "tokens/s") == pytest.approx(of.job.tokens / of.step_s)
    assert value_of(lines, "model") == of.job.model.n_parameters


@pytest.mark.parametrize("asked", LAYOUTS, ids=lambda asked: asked[0] + " " + asked[3])
def test_the_kinds_of_work_of_a_layer_are_those_that_the_step_is_made_of(asked: tuple[str, str, int, str]):
    of = priced(*asked)
    for section in {line.section for line in explain(of) if "one microbatch" in line.section}:
        lines = {line.what: line.value for line in explain(of) if line.section == section}
        kinds = {what: seconds for what, seconds in lines.items() if what in of.parts_s}
        passes = [seconds for what, seconds in lines.items() if what.split(" of ")[0] in "FIW"]
        launch = lines.get("launch", 0.0)
        assert sum(kinds.values()) == pytest.approx(sum(passes), rel=1e-9), (section, launch)


def test_only_a_makespan_and_fitted_constants_stand_without_numbers():
    without = {line.what for asked in LAYOUTS for line in explain(priced(*asked)) if not line.numbers}
    allowed = {"w0", "k0", "working", "experts", "workspace"}
    assert {what for what in without if "with these times" not in what and "its stages" not in what} <= allowed


def test_attention_comes_from_its_flops_and_its_rate_and_layers_from_the_cut():
    lines = explain(priced(*LAYOUTS[0]))
    assert value_of(lines, "attention, FLOPs of F") == pytest.approx(4 * 8192 * 8192 * 8 * 128 * (0.5 + 64 / 8192))
    assert value_of(lines, "attention, rate") < 989e12
    cut = next(line for line in lines if line.what == "layers of each of 4 stages")
    assert (cut.value, cut.numbers.count("+")) == (80, 3)
