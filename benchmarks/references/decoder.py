"""The training of the adapter deepspeed in plain PyTorch, for `verify --trainer deepspeed --reference`."""

import torch
from torch.nn.utils import clip_grad_norm_

from shardwright.testing import Decoder, loss_sum


class Trainer:
    """A decoder and SGD with momentum on one process; gradients are kept before they are clipped."""

    def __init__(self, spec, world):
        self.model = Decoder(spec)
        self.optimizer = torch.optim.SGD(self.model.parameters(), momentum=0.9)

    def load(self, weights):
        self.model.load_state_dict(weights)

    def step(self, batch):
        self.optimizer.zero_grad()
        loss = loss_sum(self.model(batch.tokens), batch.targets) / batch.n_targets
        loss.backward()
        self.last = {name: p.grad.clone() for name, p in self.model.named_parameters()}
        clip_grad_norm_(self.model.parameters(), batch.clip_norm)
        self.optimizer.param_groups[0]["lr"] = batch.lr
        self.optimizer.step()
        return loss.item()

    def gradients(self):
        return self.last

    def parameters(self):
        return dict(self.model.named_parameters())
