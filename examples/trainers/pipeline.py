"""A pipeline of torch.distributed.pipelining with data parallelism, for `shardwright verify --trainer
examples/trainers/pipeline.py --set pp=2`."""

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from shardwright.testing import Decoder, loss_sum


class Trainer:
    AXES = ("dp", "pp")

    def __init__(self, spec, world):
        mesh = world.mesh()
        self.dp, self.pp = mesh["dp"].get_group(), mesh["pp"].get_group()
        self.data_rank, self.data_ranks = mesh["dp"].get_local_rank(), world.axes["dp"]
        n, number = world.axes["pp"], mesh["pp"].get_local_rank()
        self.last = number == n - 1
        layers = range(number * spec.n_layers // n, (number + 1) * spec.n_layers // n)
        self.model = Decoder(spec, layers)
        self.stage = PipelineStage(self.model, number, n, world.device, group=self.pp)
        self.optimizer = torch.optim.SGD(self.model.parameters())

    def load(self, weights):
        self.model.load_state_dict({name: weights[name] for name in self.model.state_dict()})

    def step(self, batch):
        def loss(logits, targets):
            return loss_sum(logits, targets) / batch.n_targets

        self.optimizer.zero_grad()
        schedule = Schedule1F1B(self.stage, len(batch.micro_batches), loss_fn=loss, scale_grads=False)
        inputs = (batch.tokens,) if self.stage.is_first else ()
        losses = []
        schedule.step(*inputs, target=batch.targets if self.last else None, losses=losses)
        for p in self.model.parameters():
            dist.all_reduce(p.grad, group=self.dp)
        squares = sum(p.grad.square().sum() for p in self.model.parameters())
        dist.all_reduce(squares, group=self.pp)
        torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), batch.clip_norm, squares.sqrt())
        self.optimizer.param_groups[0]["lr"] = batch.lr
        self.optimizer.step()
        if not self.last:
            return None  # the last stage has the loss
        total = torch.stack(losses).sum()
        dist.all_reduce(total, group=self.dp)
        return total.item()

    def gradients(self):
        return {name: p.grad for name, p in self.model.named_parameters()}

    def parameters(self):
        return dict(self.model.named_parameters())
