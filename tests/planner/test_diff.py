"""Proves that the difference of two layouts is told whole, largest terms first, with the inputs that cause it."""

from dataclasses import replace

import pytest

from shardwright.cost.hardware import cluster
from shardwright.cost.job import Job
from shardwright.model.presets import resolve
from shardwright.planner.choice import PricedLayout, read
from shardwright.planner.diff import diff

JOB = Job(model=resolve("llama-3.1-8b"), cluster=cluster("h100:16"), seq_len=4096, global_batch=128)
PLAIN = PricedLayout.from_choice(JOB, read("dp_shard=16,zero=3"))


def test_the_terms_add_up_to_the_difference_and_the_largest_comes_first():
    found = diff(PLAIN, PricedLayout.from_choice(JOB, read("tp=4,pp=2,dp_shard=2,recompute=full")))
    assert sum(each.more for each in found.time) == pytest.approx(found.b.step_s - found.a.step_s)
    assert sum(each.more for each in found.memory) == pytest.approx(found.b.peak_bytes - found.a.peak_bytes)
    for terms in (found.time, found.memory):
        assert [abs(each.more) for each in terms] == sorted((abs(each.more) for each in terms), reverse=True)
    assert {each.name for each in found.time} >= {"recomputation", "tensor parallel", "data parallel", "matmuls"}
    assert found.choices["tp"] == (1, 4)
    assert found.choices["recompute"] == ("none", "full")
    assert "seq_len" not in found.choices


def test_a_term_names_the_inputs_of_its_formula_that_differ():
    half = PricedLayout.from_choice(replace(JOB, global_batch=64), PLAIN.choice)
    matmuls = next(each for each in diff(half, PLAIN).time if each.name == "matmuls")
    formula, *inputs = matmuls.why
    assert formula == "m * (1 * matmuls_of_the_head + 32 * matmuls_of_a_layer)"
    assert inputs == ["m 4 -> 8"]


def test_steps_of_different_batches_are_compared_by_the_token():
    half = PricedLayout.from_choice(replace(JOB, global_batch=64), PLAIN.choice)
    found = diff(PLAIN, half)
    assert found.b.step_s < found.a.step_s
    assert found.slower == pytest.approx(2 * found.b.step_s / found.a.step_s - 1)
    assert found.slower > 0  # the optimizer runs once a step


def test_a_layout_does_not_differ_from_itself():
    found = diff(PLAIN, PLAIN)
    assert (found.time, found.memory, found.choices, found.slower) == ((), (), {}, 0)
