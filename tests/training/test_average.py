"""Proves that averages of the weights are what their sums over the steps say, on one rank."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.config.average import AverageSection, average_problems
from shardwright.training.average import WeightAverage
from shardwright.training.checkpoint.state import named_tensors
from shardwright.training.step import Trainer

STEPS = 11


def values(step: int) -> torch.Tensor:
    """The weights after a step."""
    return torch.sin(torch.arange(6, dtype=torch.float64) * (step + 1))


def trained(section: AverageSection, steps: int) -> tuple[WeightAverage, nn.Parameter]:
    """An average after some of STEPS steps, and the parameter."""
    parameter = nn.Parameter(values(0))
    model = SimpleNamespace(saved_parameters={"w": parameter}, after_change=lambda: None)
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
    model = SimpleNamespace(saved_parameters={}, named_parameters={}, compression_state={})
    trainer = SimpleNamespace(model=model, optimizer=SimpleNamespace(state={}), average=average)
    saved = named_tensors(cast(Any, trainer))
    assert saved == {"average/0/w": average.tensors["0/w"], "average/1/w": average.tensors["1/w"]}


def test_an_average_is_in_checkpoints():
    check_an_average_is_in_checkpoints()


def test_a_step_that_changes_nothing_has_a_part_in_the_average():
    seen: list[int] = []
    result = object()
    stub = SimpleNamespace(
        _try=lambda *_: result, spikes=None, lacks_targets=True, announce_change=lambda: None,
        average=SimpleNamespace(update=seen.append),
    )  # fmt: skip
    assert [Trainer.step(cast(Any, stub), cast(Any, None), step, 0.1) for step in (0, 1)] == [result] * 2
    assert seen == [1, 2]


def test_a_run_goes_on_with_no_other_value_of_a_key_that_its_average_reads():
    changed = {"every": 7, "decay": 0.3, "last": 4}
    for kind, keys in (("ema", {"every", "decay"}), ("last-k", {"every", "last"}), ("lawa", {"every", "last"})):
        identity = AverageSection.model_validate({"kind": kind}).identity
        others = {key: AverageSection.model_validate({"kind": kind, key: changed[key]}).identity for key in changed}
        assert {key for key, other in others.items() if other != identity} == keys
        assert AverageSection.model_validate({"kind": kind, "device": "cpu"}).identity == identity


def test_an_average_on_the_host_is_pinned_and_is_not_read_before_the_copy_has_ended():
    copies: list[tuple[torch.device, bool]] = []

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._to_copy.default:
                copies.append((kwargs["device"], kwargs.get("non_blocking", False)))
            return func(*args, **(kwargs or {}))

    pinned: list[bool] = []
    with FakeTensorMode(), pytest.MonkeyPatch.context() as patch:
        parameter = nn.Parameter(torch.ones(4, device="cuda"))
        zeros = torch.zeros_like
        patch.setattr(
            torch, "zeros_like", lambda x, pin_memory=False, **how: pinned.append(pin_memory) or zeros(x, **how)
        )
        model = SimpleNamespace(saved_parameters={"w": parameter}, after_change=lambda: None)
        section = AverageSection(kind="ema", device="cpu")
        average = WeightAverage(cast(Any, model), section, STEPS)
        on_device = WeightAverage(cast(Any, model), AverageSection(kind="ema"), STEPS)
        with Noted():
            average.update(1)
    assert (average.tensors["mean/w"].device.type, pinned[0]) == ("cpu", True)
    assert on_device.tensors["mean/w"].device.type == "cuda"
    assert [(device.type, later) for device, later in copies] == [("cpu", False)]


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
