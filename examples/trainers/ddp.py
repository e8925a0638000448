"""DistributedDataParallel with gradient accumulation, for `shardwright verify --trainer examples/trainers/ddp.py`."""

import contextlib

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from shardwright.testing import Decoder, loss_sum


class Trainer:
    def __init__(self, spec, world):
        self.world = world
        self.model = DistributedDataParallel(Decoder(spec))
        self.optimizer = torch.optim.SGD(self.model.parameters(), momentum=0.9)

    def load(self, weights):
        self.model.module.load_state_dict(weights)

    def step(self, batch):
        self.optimizer.zero_grad()
        total = torch.zeros(())
        for n, (tokens, targets) in enumerate(batch.micro_batches, start=1):
            last = n == len(batch.micro_batches)
            with contextlib.nullcontext() if last else self.model.no_sync():
                loss = loss_sum(self.model(tokens), targets) / batch.n_targets
                (loss * self.world.size).backward()  # DDP divides by the number of ranks
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), batch.clip_norm)
        self.optimizer.param_groups[0]["lr"] = batch.lr
        self.optimizer.step()
        dist.all_reduce(total)
        return total.item()

    def gradients(self):
        return {name: p.grad for name, p in self.model.module.named_parameters()}

    def parameters(self):
        return dict(self.model.module.named_parameters())
