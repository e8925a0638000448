"""Values of other systems: what is AdamW's update, and what is refused."""

from typing import Any

import pytest
import torch
from torch import nn

from shardwright.conversion.schema import AdamWGroup, Counted, DeepSpeedConfig, ZeroModelFile, checked
from shardwright.system.errors import CheckpointError, DamagedError

LAMB = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "max_coeff": 10.0, "min_coeff": 0.01}
FUSED_ADAM = {"lr": 0.1, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.1, "bias_correction": 1}


def group_of(name: str, **settings: Any) -> dict[str, Any]:
    """Return the group of an optimizer of PyTorch, as its state dict has it."""
    (group,) = getattr(torch.optim, name)([nn.Parameter(torch.zeros(2))], **settings).state_dict()["param_groups"]
    return group


@pytest.mark.parametrize(
    ("group", "refusal"),
    [
        (group_of("AdamW"), None),
        (group_of("Adam"), None),
        (group_of("Adam", weight_decay=0.1), "decoupled_weight_decay=False; supported: True"),
        (group_of("Adam", weight_decay=0.1, decoupled_weight_decay=True), None),
        (group_of("AdamW", amsgrad=True), "amsgrad=True; supported: False"),
        (group_of("AdamW", maximize=True), "maximize=True; supported: False"),
        (group_of("AdamW", lr=torch.tensor(0.1)), None),
        (group_of("RAdam", decoupled_weight_decay=True), "as RAdam has it; supported: AdamW"),
        (group_of("RAdam"), "as RAdam has it; supported: AdamW"),
        (FUSED_ADAM, None),
        ({**FUSED_ADAM, "bias_correction": torch.tensor(False)}, "bias_correction=False; supported: True"),
        (LAMB, "max_coeff=10.0, which is LAMB's; supported: AdamW"),
        ({**FUSED_ADAM, "grad_averaging": True, "max_grad_norm": 1.0}, "grad_averaging=True, which is LAMB's"),
        (group_of("NAdam", decoupled_weight_decay=True), "which is NAdam's; supported: AdamW"),
    ],
)
def test_a_group_is_known_as_adamws_by_its_settings(group: dict[str, Any], refusal: str | None) -> None:
    problem = checked(AdamWGroup, group, "file").other_update()
    assert (problem is None) == (refusal is None)
    assert refusal is None or refusal in str(problem)


@pytest.mark.parametrize("config", [{}, {"optimizer": None}, {"optimizer": {"type": "AdamW", "params": None}}])
def test_a_ds_config_may_leave_its_optimizer_empty(config: dict[str, Any]) -> None:
    checked(DeepSpeedConfig, config, "file")


def test_a_tensor_without_values_is_no_number() -> None:
    with pytest.raises(DamagedError, match="its tensor has no values"):
        checked(Counted, {"value": torch.zeros(1, device="meta")}, "file")


def test_a_valid_value_that_is_not_supported_is_not_called_damage() -> None:
    model = {"global_steps": 1, "skipped_steps": 0, "dp_world_size": 1, "param_shapes": [{}], "mp_world_size": 2}
    with pytest.raises(CheckpointError, match="mp_world_size=2; supported: 1") as raised:
        checked(ZeroModelFile, model, "file")
    assert not isinstance(raised.value, DamagedError)
