"""Hugging Face Accelerate with its DeepSpeedPlugin: `shardwright verify --trainer accelerate_deepspeed --matrix 2 --set
zero=2`.

The loop follows Accelerate's guide to gradient accumulation; DeepSpeed accumulates, clips and updates. Axis: dp. Option
of `--set`: `zero` (0 to 3). `gradients()` returns the gradients before clipping. Run it with DS_ACCELERATOR=cpu in the
environment.

Shapes: B sequences, T tokens.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedPlugin
from torch import Tensor

from shardwright.model.spec import ModelSpec
from shardwright.verification.trainers.adapter import World
from shardwright.verification.trainers.deepspeed import DeepSpeedTrainer


class AccelerateDeepSpeedTrainer(DeepSpeedTrainer):
    """The decoder and the optimizer of the adapter `deepspeed`, prepared by an Accelerator."""

    AXES = ("dp",)
    _OTHER_AXES: ClassVar = {"ep": 1, "pp": 1}

    @staticmethod
    def problem(spec: ModelSpec, axes: Mapping[str, int], options: Mapping[str, Any]) -> str | None:
        """Return why the plugin cannot run these degrees, or None."""
        for name in ("experts", "manual"):
            if options.get(name, False):
                return f"{name}={options[name]} is an option of --trainer deepspeed; leave it out"
        return DeepSpeedTrainer.problem(spec, {**axes, **AccelerateDeepSpeedTrainer._OTHER_AXES}, options)

    def __init__(self, spec: ModelSpec, world: World) -> None:
        super().__init__(spec, replace(world, axes={**world.axes, **self._OTHER_AXES}))

    def _initialized(self, optimizer: torch.optim.Optimizer, config: dict[str, Any]) -> Any:
        AcceleratorState._reset_state(True)  # it keeps the plugin of the process's first Accelerator
        self.accelerator = Accelerator(
            gradient_accumulation_steps=config["gradient_accumulation_steps"],
            deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
        )
        engine, self.optimizer = self.accelerator.prepare(self.model, optimizer)
        return engine

    def _forward_backward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        with self.accelerator.accumulate(self.engine):
            loss = self._loss(self.engine(tokens_BT), targets_BT)
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss


Trainer = AccelerateDeepSpeedTrainer
