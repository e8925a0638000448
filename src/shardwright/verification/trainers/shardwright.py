"""Shardwright's own trainer: `shardwright verify --trainer shardwright --world 4 --set tp=2 --set layout.zero=3`."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardwright.data.batches import Batch
from shardwright.layout.layout import Layout
from shardwright.model.spec import ModelSpec
from shardwright.system.errors import LayoutError
from shardwright.verification.case import PLAIN_SGD, Case
from shardwright.verification.rank import build_trainer
from shardwright.verification.trainers.adapter import StepBatch, World
from shardwright.verification.trainers.pieces import load_weights


class ShardwrightTrainer:
    """The training step of `shardwright train` with plain SGD."""

    AXES = ("dp_replicate", "dp_shard", "cp", "tp", "pp")

    def __init__(self, spec: ModelSpec, world: World) -> None:
        keys = {key: world.options[key] for key in world.options if key.startswith("layout.")}
        layout = Layout().changed(**world.axes, **{key.removeprefix("layout."): value for key, value in keys.items()})
        if layout.world_size != world.size:
            raise LayoutError(
                f"{layout}: {layout.world_size} ranks, and --world is {world.size}; set degrees by --set tp=2"
            )
        self.data_rank, self.data_ranks = layout.data_rank(world.rank), layout.data_ranks
        dtype = str(world.dtype).removeprefix("torch.")
        case = Case(spec, spec.max_seq_len, layout.data_ranks, seed=world.seed, dtype=dtype)
        self.trainer = build_trainer(case, layout, PLAIN_SGD)
        self.norm = torch.zeros(())

    def load(self, weights: Mapping[str, Tensor]) -> None:
        load_weights(self.parameters(), weights)
        self.trainer.model.after_change()

    def step(self, batch: StepBatch) -> float:
        n_sequences = len(batch.micro_batches[0][0])
        ids_B = torch.arange(len(batch.tokens))
        rows = Batch.from_sequences(batch.tokens, batch.targets, ids_B, n_sequences)
        parts = self.trainer.forward_backward(rows, batch.step)
        loss = self.trainer.model.sum_over_losses(parts.loss_part)
        self.last = {name: None if p.grad is None else p.grad.detach().clone() for name, p in self.parameters().items()}
        self.norm = self.trainer.update(batch.lr, batch.clip_norm)
        return float(loss)

    def gradients(self) -> dict[str, Any]:
        return self.last

    def gradient_norm(self) -> float:
        return float(self.norm)

    def parameters(self) -> dict[str, Any]:
        return dict(self.trainer.model.named_parameters)


Trainer = ShardwrightTrainer
