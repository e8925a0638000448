"""DTensor tensor parallelism with sequence-parallel norms, for `shardwright verify --trainer
examples/trainers/tensor_parallel.py`."""

import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from shardwright.testing import Decoder, loss_sum

BLOCK = {
    "attention_norm": SequenceParallel(),
    "q": ColwiseParallel(input_layouts=Shard(1)),
    "k": ColwiseParallel(input_layouts=Shard(1)),
    "v": ColwiseParallel(input_layouts=Shard(1)),
    "o": RowwiseParallel(output_layouts=Shard(1)),
    "ffn_norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1)),
}
ENDS = {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


class Trainer:
    AXES = ("tp",)

    def __init__(self, spec, world):
        self.data_rank, self.data_ranks = 0, 1  # every rank has the same sequences
        self.model = Decoder(spec)
        parallelize_module(self.model, world.mesh(), ENDS)
        for block in self.model.layers.values():
            parallelize_module(block, world.mesh(), BLOCK)
        self.optimizer = torch.optim.SGD(self.model.parameters())

    def load(self, weights):
        for name, p in self.model.named_parameters():
            p.data.copy_(distribute_tensor(weights[name], p.device_mesh, p.placements))

    def step(self, batch):
        self.optimizer.zero_grad()
        total = 0.0
        for tokens, targets in batch.micro_batches:
            loss = loss_sum(self.model(tokens), targets) / batch.n_targets
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), batch.clip_norm)
        self.optimizer.param_groups[0]["lr"] = batch.lr
        self.optimizer.step()
        return total

    def gradients(self):
        return {name: p.grad for name, p in self.model.named_parameters()}

    def parameters(self):
        return dict(self.model.named_parameters())
