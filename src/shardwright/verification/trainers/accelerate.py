"""Hugging Face Accelerate: `shardwright verify --trainer accelerate --matrix 2`.

The loop of Accelerate's guide to gradient accumulation with a loss over all targets. Axes: dp (replicas) and fsdp
(shards): DDP without fsdp, FSDP2 with it, and HSDP with both. Accelerate 1.15 uses an `fsdp_plugin` on accelerators
alone: with fsdp the adapter sets its state as if each rank had one. The device stays the CPU.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType, PartialState
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import Tensor

from shardwright.model.spec import ModelSpec
from shardwright.verification.trainers.adapter import StepBatch, World
from shardwright.verification.trainers.pieces import Decoder, load_weights, loss_sum, set_environment


class AccelerateTrainer:
    """A model and SGD with momentum, prepared by an Accelerator."""

    AXES = ("dp", "fsdp")

    def __init__(self, spec: ModelSpec, world: World) -> None:
        set_environment(world)
        model = Decoder(spec)
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        self.n_ranks, self.accelerator = world.size, _accelerator(world)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        load_weights(self.parameters(), weights)

    def step(self, batch: StepBatch) -> float:
        n_micro_batches = len(batch.micro_batches)
        self.accelerator.gradient_accumulation_steps = n_micro_batches
        total = torch.zeros(())
        self.optimizer.param_groups[0]["lr"] = batch.lr
        for tokens_BT, targets_BT in batch.micro_batches:
            with self.accelerator.accumulate(self.model):
                loss = loss_sum(self.model(tokens_BT), targets_BT) / batch.n_targets
                # DDP averages over ranks, and `backward` divides by the accumulation steps.
                self.accelerator.backward(loss * self.n_ranks * n_micro_batches)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), batch.clip_norm)
                    self.last = {name: p.grad.detach().clone() for name, p in self.parameters().items()}
                self.optimizer.step()
                self.optimizer.zero_grad()
            total += loss.detach()
        dist.all_reduce(total)
        return total.item()

    def gradients(self) -> dict[str, Any]:
        return self.last

    def parameters(self) -> dict[str, Any]:
        return dict(self.accelerator.unwrap_model(self.model).named_parameters())


def _accelerator(world: World) -> Accelerator:
    """Return an Accelerator that prepares models for DDP, or for FSDP2 over the axes of `world`."""
    if world.axes["fsdp"] == 1:
        return Accelerator(cpu=True)
    state = PartialState(cpu=True)
    if state.distributed_type != DistributedType.FSDP:  # which the first Accelerator of the process has set
        state.distributed_type = DistributedType.MULTI_GPU
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["DecoderBlock"],
        cpu_ram_efficient_loading=False,
    )
    axes = ParallelismConfig(dp_replicate_size=world.axes["dp"], dp_shard_size=world.axes["fsdp"])
    return Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=axes)


Trainer = AccelerateTrainer
