"""Proves that averages of the weights are what their sums over the steps say, on one rank."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from shardwright.config.average import AverageSection, average_problems
from shardwright.training.average import WeightAverage
from shardwright.training.checkpoint.state import named_tensors

STEPS = 11


def values(step: int) -> torch.Tensor:
    """The weights after a step."""
    return torch.sin(torch.arange(6, dtype=torch.float64) * (step + 1))


def trained(section: AverageSection, steps: int) -> tuple[WeightAverage, nn.Parameter]:
    """An average after some of STEPS steps, and the parameter."""
    parameter = nn.Parameter(values(0))
    model = SimpleNamespace(named_parameters={"w": parameter}, after_change=lambda: None)
    average = WeightAverage(cast(Any, model), section, STEPS)
    for step in range(1, steps + 1):
        parameter.data.copy_(values(step))
        average.update(step)
    return average, parameter


@pytest.mark.parametrize(
    ("section", "steps", "expected"),
    [
        (AverageSection(kind="ema", decay=0.75), 3, {1: 0.5625, 2: 0.1875, 3: 0.25}),
        (AverageSection(kind="ema", decay=0.75, every=4), 11, {4: 0.75, 8: 0.25}),
        (AverageSection(kind="lawa", last=3), 2, {1: 1 / 2, 2: 1 / 2}),
        (AverageSection(kind="lawa", last=3, every=2), 11, {6: 1 / 3, 8: 1 / 3, 10: 1 / 3}),
        (AverageSection(kind="last-k", last=3, every=2), 11, {6: 1 / 3, 8: 1 / 3, 10: 1 / 3}),
        (AverageSection(kind="last-k", last=3, every=2), 8, {6: 1 / 2, 8: 1 / 2}),
        (AverageSection(kind="last-k", last=3, every=2), 5, {}),
    ],
)
def test_an_average_is_the_weighted_sum_of_the_weights_after_its_updates(
    section: AverageSection, steps: int, expected: dict[int, float]
):
    average, parameter = trained(section, steps)
    wanted = sum((weight * values(step) for step, weight in expected.items()), torch.zeros(6))
    with average.applied(steps) as applied:
        assert applied == bool(expected)
        torch.testing.assert_close(parameter.detach(), wanted if expected else values(steps), rtol=1e-12, atol=0)


def test_weights_are_their_own_again_after_their_average_was_applied():
    average, parameter = trained(AverageSection(kind="ema"), 5)
    with average.applied(5):
        assert not torch.equal(parameter.detach(), values(5))
    assert torch.equal(parameter.detach(), values(5))


def check_an_average_is_in_checkpoints():
    """Every tensor of the average is one of a checkpoint, by which a resumed run continues."""
    average, _ = trained(AverageSection(kind="lawa", last=2), 3)
    model = SimpleNamespace(named_parameters={}, compression_state={})
    trainer = SimpleNamespace(model=model, optimizer=SimpleNamespace(state={}), average=average)
    saved = named_tensors(cast(Any, trainer))
    assert saved == {"average/0/w": average.tensors["0/w"], "average/1/w": average.tensors["1/w"]}


def test_an_average_is_in_checkpoints():
    check_an_average_is_in_checkpoints()


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"kind": "ema", "last": 3}, "average.last=3 is for average.kind='last-k' or 'lawa', and kind is 'ema'"),
        ({"kind": "lawa", "decay": 0.5}, "average.decay=0.5 is for average.kind='ema', and kind is 'lawa'"),
        ({"kind": "ema", "every": 12}, "average.every=12 is more than the steps=11 of the run"),
    ],
)
def test_a_key_of_another_kind_is_refused(section: dict[str, Any], said: str):
    (problem,) = average_problems(AverageSection(**section), STEPS)
    assert problem.startswith(said)
