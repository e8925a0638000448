"""Proves that uneven loads of experts are priced by the busiest rank, with capacity and dropped tokens."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shardwright.cost.expert_load import UnevenLoad, read_expert_load
from shardwright.cost.hardware import cluster
from shardwright.cost.job import Job
from shardwright.model.presets import resolve
from shardwright.planner.choice import PricedLayout, read
from shardwright.system.errors import InputError

MODEL = resolve("mixtral-8x7b")
JOB = Job(model=MODEL, cluster=cluster("h100:64"), global_batch=256, seq_len=4096)
MOE = MODEL.moe
assert MOE is not None
MANY = replace(MOE, n_experts=64, top_k=4)


@pytest.mark.parametrize("ep", [1, 4, 16, 64])
def test_the_busiest_rank_has_the_mean_largest_load_of_random_loads(ep: int):
    loads = np.random.default_rng(0).normal(1, 0.3, (4000, ep, 64 // ep)).mean(axis=2).max(axis=1)
    assert UnevenLoad("", 0.3).busiest(MANY, np.array([ep]), placed=False)[0] == pytest.approx(loads.mean(), rel=0.01)


def test_no_rank_has_more_tokens_than_there_are_and_a_capacity_limits_the_load():
    degrees = np.array([2, 64])
    assert UnevenLoad("", 10.0).busiest(MANY, degrees, placed=False).tolist() == [2, 16]
    assert UnevenLoad("", 10.0).busiest(replace(MANY, capacity_factor=1.25), degrees, placed=False).tolist() == [
        1.25,
        1.25,
    ]


def test_measured_loads_are_summed_over_the_experts_of_a_rank():
    loads = UnevenLoad("", by_layer=((1.75, 1.25, 0.5, 0.5), (0.5, 0.5, 1.5, 1.5)))
    assert loads.busiest(replace(MOE, n_experts=4), np.array([1, 2, 4]), placed=False).tolist() == [1, 1.5, 1.625]


def test_experts_placed_by_their_load_lower_the_busiest_rank_and_groups_of_a_node_stay_on_it():
    loads = UnevenLoad("", by_layer=((1.75, 1.25, 0.5, 0.5), (0.5, 0.5, 1.5, 1.5)))
    few, degrees = replace(MOE, n_experts=4), np.array([1, 2, 4])
    # Layer 0: 1.75 + 0.5 and 1.25 + 0.5; layer 1: 0.5 + 1.5 twice.
    assert loads.busiest(few, degrees, placed=True).tolist() == [1, pytest.approx((1.125 + 1) / 2), 1.625]
    grouped = replace(few, n_groups=2, groups_per_token=1)
    assert loads.busiest(grouped, degrees, placed=True).tolist() == [1, 1.5, 1.625]
    assert UnevenLoad("", 0.0).busiest(MANY, np.array([8]), placed=True)[0] == 1
    normal = UnevenLoad("", 0.3)
    before, after = (normal.busiest(MANY, np.array([8]), placed=placed)[0] for placed in (False, True))
    assert before == pytest.approx(1.15, abs=0.01)
    assert 1 < after < 1.03


def test_dropped_tokens_are_the_mean_above_the_capacity():
    capped = replace(MANY, capacity_factor=1.25)
    loads = np.random.default_rng(0).normal(1, 0.3, 1_000_000)
    expected = np.maximum(loads - 1.25, 0).mean()
    assert UnevenLoad("", 0.3).dropped(capped) == pytest.approx(expected, rel=0.02)
    assert UnevenLoad("", by_layer=((1.5, 0.5),)).dropped(capped) == 0.125
    assert UnevenLoad("", 0.3).dropped(MANY) == 0


def test_a_step_is_longer_with_uneven_loads_by_what_its_experts_and_their_messages_take():
    choice = read("dp_shard=64,ep=8,zero=1,recompute=full,micro_batch=1")
    even, none, uneven = (
        PricedLayout.from_choice(replace(JOB, expert_load=load), choice)
        for load in (None, UnevenLoad("cv=0", 0.0), UnevenLoad("cv=0.3", 0.3))
    )
    assert none.step_s == even.step_s
    assert 1.02 < uneven.step_s / even.step_s < 1.45
    longer = {kind for kind, s in uneven.parts_s.items() if s > even.parts_s[kind] * 1.001}
    assert longer <= {"matmuls", "recomputation", "expert parallel", "stragglers"}
    assert "matmuls" in longer
    alone = read("dp_shard=64,ep=1,zero=3,recompute=full,micro_batch=1")
    steps = {PricedLayout.from_choice(job, alone).step_s for job in (JOB, uneven.job)}
    assert len(steps) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cv=x", "valid: a number from 0 to 10, such as cv=0.3, or a JSON file"),
        ("cv=nan", "valid: a number from 0 to 10"),
        ("nothing.json", "No such file"),
        ([[1, 2, 3]], "tokens_by_expert has the shape 1 x 3; valid: 32 layers, or 1 for all, x 8 experts"),
        ([[1] * 8] * 2, "shape 2 x 8; valid: 32 layers"),
        ([[0] * 8], "tokens are 0 or more, and each layer has some"),
        ([["a"]], "valid: a JSON object whose tokens_by_expert has a list"),
        ("[]", "valid: a JSON object whose tokens_by_expert has a list"),
    ],
)
def test_loads_that_do_not_describe_the_experts_of_the_model_are_refused(tmp_path: Path, text: object, said: str):
    path = tmp_path / "load.json"
    if not isinstance(text, str) or text == "[]":
        path.write_text(text if isinstance(text, str) else json.dumps({"tokens_by_expert": text}))
        text = str(path)
    with pytest.raises(InputError, match="--expert-load") as error:
        read_expert_load(str(text), MODEL)
    assert said in str(error.value)


def test_a_dense_model_has_no_loads():
    with pytest.raises(InputError, match="the model has no experts; leave it out"):
        read_expert_load("cv=0.3", resolve("llama-3.1-8b"))
