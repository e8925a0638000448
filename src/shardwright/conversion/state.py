"""The training state of a checkpoint of any format, under Shardwright's parameter names."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwright.config import RunConfig
from shardwright.model.modules import row_of, rows
from shardwright.model.spec import ModelSpec
from shardwright.training.optimizer import learning_rate
from shardwright.training.weights import Weights

MOMENTS = ("exp_avg", "exp_avg_sq")
"""The states that AdamW has for each element."""
STEP = "step"
"""The number of updates, which AdamW counts for each parameter."""


@dataclass(frozen=True)
class AdamWSettings:
    """The numbers of AdamW's next update of a parameter. `peak_lr`: the learning rate before the schedule's factor."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    peak_lr: float

    def group(self) -> dict[str, Any]:
        """Return a parameter group of `torch.optim.AdamW`, without parameters."""
        from torch import nn
        from torch.optim.adamw import AdamW

        one = AdamW([nn.Parameter()], self.lr, self.betas, self.eps, self.weight_decay)
        return {key: value for key, value in one.param_groups[0].items() if key != "params"} | {
            "initial_lr": self.peak_lr
        }


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """A checkpoint of any format.

    `format`: its name in `formats.FORMATS`; `naming`: the names of its tensors (`names.NAMINGS`), if there are several.
    `moments`: kind -> the moments of all trained parameters; empty without an optimizer. `settings`: parameter ->
    settings of its next update. `step`: steps taken. `tokens`, `samples`: those trained on, if the checkpoint has their
    number.
    `left_out`: content that no other format has a place for -> the reason.
    """

    format: str
    weights: Weights
    naming: str = ""
    moments: Mapping[str, Weights] = field(default_factory=dict)
    settings: Mapping[str, AdamWSettings] = field(default_factory=dict)
    step: int | None = None
    tokens: int | None = None
    samples: int | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def spec(self) -> ModelSpec:
        """The model."""
        return self.weights.spec


def trained_parameters(spec: ModelSpec) -> list[str]:
    """Return the names of the parameters that an optimizer updates."""
    return [name for name, row in rows(spec).items() if row.trained]


def settings_of_run(config: RunConfig, step: int) -> dict[str, AdamWSettings]:
    """Return the settings of AdamW's update number `step` (0-based) in a run of Shardwright."""
    spec, section = config.spec(), config.optimizer
    lr, options = learning_rate(step, config.steps, section.lr, config.lr_schedule, config.clock), section.options
    betas = options["beta1"], options["beta2"]
    settings = {}
    for name in trained_parameters(spec):
        row = row_of(spec, name)
        scale, eps = section.lr_scale_of(row), section.eps_of(row)
        assert eps is not None, "AdamW has eps"
        settings[name] = AdamWSettings(lr * scale, betas, eps, section.weight_decay_of(row), section.lr * scale)
    return settings
