"""Proves that uneven loads of experts are priced by the busiest rank, with capacity and dropped tokens."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shardwright.cost.collectives import point_to_point
from shardwright.cost.expert_load import UnevenLoad, read_expert_load
from shardwright.cost.hardware import cluster
from shardwright.cost.job import Job
from shardwright.cost.optimizer_step import PLACEMENT
from shardwright.model.presets import resolve
from shardwright.planner.choice import PricedLayout, read
from shardwright.planner.words import expert_load_in_words
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


def test_a_placement_moves_the_experts_whose_exchange_evens_the_loads():
    loads = UnevenLoad("", by_layer=((1.75, 1.25, 0.5, 0.5), (1.0, 1.0, 1.0, 1.0)))
    # ep=2: layer 0 exchanges one expert of each rank, layer 1 none. ep=4: an exchange of whole ranks evens nothing.
    assert loads.moved(replace(MOE, n_experts=4), np.array([1, 2, 4])).tolist() == [0, 0.5, 0]


SPREAD = "dp_shard=64,ep=4,zero=1"


@pytest.mark.parametrize(
    ("layout", "sharers"),
    [
        (SPREAD, 16),
        ("dp_shard=64,ep=2,zero=3", 32),
        ("dp_replicate=8,dp_shard=8,ep=4,zero=1", 1),  # 2 experts of a rank of ep, each whole on one rank of ZeRO
        ("dp_replicate=16,tp=4,ep=4,zero=0", 1),
    ],
)
def test_moves_of_experts_take_the_messages_of_their_states_in_each_layer(layout: str, sharers: int):
    # The busiest rank has loads of 3.5 of ep=4 and of 4.5 of ep=2, and exchanges one expert.
    job = replace(JOB, expert_load=UnevenLoad("", by_layer=((2.0, 1.5, 0.75, 0.25, 0.75, 0.75, 1.0, 1.0),)))
    choices = {every: read(f"{layout},recompute=full,micro_batch=1,place_experts_every={every}") for every in (10, 20)}
    moves = {every: PricedLayout.from_choice(job, choice).parts_s[PLACEMENT] for every, choice in choices.items()}
    # Mixtral 8x7B: 32 layers; an expert has three matrices of 4,096 x 14,336, 12 bytes an element with Adam's states.
    message_s = point_to_point(JOB.cluster, 3 * 4096 * 14336 * 12 / sharers, choices[10].layout.ep)
    assert moves[10] == pytest.approx(32 / 10 * float(message_s), rel=1e-6)
    assert moves[20] == pytest.approx(moves[10] / 2)


def test_nothing_moves_with_even_loads_and_without_placement():
    choice = read(f"{SPREAD},place_experts_every=10")
    assert PricedLayout.from_choice(JOB, choice).parts_s[PLACEMENT] == 0
    uneven = replace(JOB, expert_load=UnevenLoad("cv=0.3", 0.3))
    assert PLACEMENT not in PricedLayout.from_choice(uneven, read(SPREAD)).parts_s
    moving = PricedLayout.from_choice(uneven, choice)
    assert "; moves of experts take " in expert_load_in_words(moving)


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
