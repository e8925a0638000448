"""Dynamic loss scaling: the loss is multiplied by a scale, so that small gradients are not rounded to 0 in fp16.

Source: Micikevicius et al., arXiv 1710.03740, section 3.2. The scale changes as in Megatron-LM's `DynamicGradScaler`:

    step with overflow      clean = 0; left -= 1; if left <= 0: scale = max(scale / 2, least); the step is skipped
    step without overflow   clean += 1; if clean = window: clean = 0; left = hysteresis; scale = 2 scale

Clean steps do not raise `left`, so after `hysteresis` overflows, every further overflow halves the scale until the
scale is doubled again. The scale is a power of 2, so dividing gradients by it does not round.

The norm of all gradients of the model, equal on every rank, is infinite or NaN if the gradient of any rank is. So the
ranks agree on a step without a separate collective.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import ConfigDict, Field, with_config
from torch import Tensor

from shardwright.config import PrecisionSection
from shardwright.system.torch_private import FakeTensor

Count = Annotated[int, Field(ge=0, lt=2**63)]


@with_config(ConfigDict(strict=True, extra="forbid"))
@dataclass
class LossScaleState:
    """The state of a loss scale in a checkpoint. `clean`: steps since the last change or overflow. `left`: overflows
    until the scale is halved. `skipped`: skipped steps of the run."""

    scale: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    left: Annotated[int, Field(ge=-(2**63), lt=2**63)]
    clean: Count = 0
    skipped: Count = 0


class LossScaler:
    """The loss scale of a run, equal on every rank, and the rule by which it changes."""

    def __init__(self, config: PrecisionSection) -> None:
        self.window, self.hysteresis = config.loss_scale_window, config.loss_scale_hysteresis
        self.least = config.min_loss_scale
        self.state = LossScaleState(config.loss_scale, self.hysteresis)

    def resume(self, state: LossScaleState) -> None:
        """Continue with the state from a checkpoint."""
        self.state = state

    @property
    def scale(self) -> float:
        """Factor of the loss in the next step."""
        return self.state.scale

    def takes(self, norm: Tensor) -> bool:
        """Return whether a step with gradients of this norm, a scalar equal on every rank, is taken, and update the
        scale.

        Reads one number back from the device, because the decision is needed before the optimizer step starts. On fake
        tensors, which have no values, every step is taken.
        """
        state = self.state
        if isinstance(norm, FakeTensor) or bool(torch.isfinite(norm)):
            state.clean += 1
            if state.clean == self.window:
                state.clean, state.left, state.scale = 0, self.hysteresis, 2 * state.scale
            return True
        state.clean, state.left, state.skipped = 0, state.left - 1, state.skipped + 1
        if state.left <= 0:
            state.scale = max(state.scale / 2, self.least)
        return False


def loss_scaler(config: PrecisionSection) -> LossScaler | None:
    """Return a loss scaler for fp16, or None for a type with the range of fp32."""
    return LossScaler(config) if config.compute == "fp16" else None


def skipped_in_words(step: int, scale: float) -> str:
    """Return the message about a skipped step. `scale`: loss scale of the next step."""
    return (
        f"step {step} skipped: a gradient overflowed in fp16; weights and optimizer states stay, loss scale {scale:g}"
    )
