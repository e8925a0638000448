"""FSDP2 on a mesh of replicas and shards, for `shardwright verify --trainer examples/trainers/fsdp2.py`."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from shardwright.testing import Decoder, loss_sum


class Trainer:
    AXES = ("replicate", "shard")

    def __init__(self, spec, world):
        mesh = world.mesh()
        self.model = Decoder(spec)
        for module in [*self.model.layers.values(), self.model]:
            fully_shard(module, mesh=mesh)
            module.set_gradient_divide_factor(1.0)  # the loss is divided by the targets of the global batch
            module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def load(self, weights):
        for name, p in self.model.named_parameters():
            p.data.copy_(distribute_tensor(weights[name], p.device_mesh, p.placements))

    def step(self, batch):
        self.optimizer.zero_grad()
        total = torch.zeros(())
        for tokens, targets in batch.micro_batches:
            loss = loss_sum(self.model(tokens), targets) / batch.n_targets
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), batch.clip_norm)
        self.optimizer.param_groups[0]["lr"] = batch.lr
        self.optimizer.step()
        dist.all_reduce(total)
        return total.item()

    def gradients(self):
        return {name: p.grad for name, p in self.model.named_parameters()}

    def parameters(self):
        return dict(self.model.named_parameters())
