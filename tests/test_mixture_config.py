"""Proves that the sources and stages of a run file are read, kept and refused with every problem at once."""

import tomllib
from typing import Any

import pytest

from shardwright.config import RunConfig, parse, resolved_toml
from shardwright.config.mixture import Mixture, mixtures_of, name_of, sources_of
from shardwright.system.errors import ConfigError

RUN = """
out = "runs/mixed"
steps = 100

[data]
prefetch = 3

[[data.sources]]
path = "data/web"
weight = 0.7

[[data.sources]]
path = "data/code-2"
name = "code"
weight = 0.3

[[data.sources]]
path = "data/math"

[[data.stages]]
from_step = 40
weights = { web = 2, math = 1 }

[batch]
seq_len = 16
global_batch = 4
"""


def config(*overrides: str) -> RunConfig:
    return parse(tomllib.loads(RUN), overrides)


def refused(data: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse({"out": "x", "steps": 50, "data": data, "batch": {"seq_len": 16, "global_batch": 4}})
    return caught.value.problems


def test_weights_become_whole_numbers_by_source_for_each_stage():
    data = config().data
    assert [name_of(source) for source in sources_of(data)] == ["web", "code", "math"]
    assert mixtures_of(data) == [Mixture(0, (7, 3, 0)), Mixture(40, (2, 0, 1))]


def test_one_folder_is_a_mixture_of_one_source():
    data = parse({"out": "x", "steps": 1, "data": {"path": "a/b"}, "batch": {"seq_len": 8, "global_batch": 1}}).data
    assert [(name_of(source), source.path) for source in sources_of(data)] == [("b", "a/b")]
    assert mixtures_of(data) == [Mixture(0, (1,))]


def test_the_resolved_run_file_reads_back_as_it_was():
    stage = 'data.stages=[{from_step = 9, weights = {web = 1, "code" = 0.5, "math" = 2}}]'
    for run in (config(), config(stage)):
        assert parse(tomllib.loads(resolved_toml(run))).data == run.data
    assert "[[data.sources]]" in resolved_toml(config())


def test_every_problem_of_a_mixture_is_told_at_once():
    problems = refused(
        {
            "sources": [
                {"path": "data/web", "weight": -0.5},
                {"path": "other/web", "weight": 0.0},
                {"path": "data/idle"},
            ],
            "stages": [
                {"from_step": 30, "weights": {"wbe": 1.0}},
                {"from_step": 30, "weights": {}},
                {"from_step": 50, "weights": {"web": -2}},
                {"from_step": 0, "weights": {"web": 1}},
            ],
        }
    )
    for said in (
        "2 are called 'web'",
        "the weight of 'web' is 0, and must be above 0",
        "'idle' has no weight and no stage names it",
        "data.stages.0.weights.wbe: there is no such source; did you mean 'web'?",
        "data.stages.1.from_step=30 must be later than from_step of the stage before, 30",
        "data.stages.1.weights is empty",
        "data.stages.2.from_step=50 is not reached: the run has steps=50",
        "data.stages.2.weights: the weight of 'web' is -2",
        "data.stages.3.from_step=0 must be later than from_step of the stage before, 50",
    ):
        assert [said in problem for problem in problems].count(True) == 1, (said, problems)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({}, "data.path: missing; it is a folder"),
        ({"path": "a", "sources": [{"path": "b", "weight": 1}]}, "data.path and data.sources are both given"),
        ({"path": "a", "stages": [{"from_step": 1, "weights": {"a": 1}}]}, "data.stages needs data.sources"),
        ({"sources": [{"path": "a"}, {"path": "b"}]}, "none has a weight, so the first step has no data"),
        (
            {"sources": [{"path": "a", "weight": 0.1234567}, {"path": "b", "weight": 1}]},
            "whole numbers only in 11,234,567 samples, more than 1,048,576; round them",
        ),
        (
            {"sources": [{"path": "a", "weight": 1}], "stages": [{"from_step": 0, "weights": {"a": 1}}]},
            "data.stages.0.from_step=0 must be 1 or more",
        ),
        (
            {"sources": [{"path": "a", "weigth": 1}]},
            "data.sources.0.weigth: there is no such key; did you mean 'weight'?",
        ),
        ({"sources": [{"weight": 1}]}, "data.sources.0.path: missing"),
    ],
)
def test_what_is_wrong_with_a_mixture_is_said(data: dict[str, Any], said: str):
    problems = refused(data)
    assert any(said in problem for problem in problems), problems


def test_a_run_over_one_folder_is_written_without_tables_of_sources():
    text = resolved_toml(
        parse({"out": "x", "steps": 1, "data": {"path": "d"}, "batch": {"seq_len": 8, "global_batch": 1}})
    )
    assert "[[data.sources]]" not in text
    assert "sources = []" in text
