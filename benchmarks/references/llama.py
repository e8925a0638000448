"""The training of the adapter transformers in plain PyTorch, for `verify --trainer transformers --reference`."""

import torch
from torch.nn.utils import clip_grad_norm_
from transformers import LlamaForCausalLM

from shardwright.hugging_face.float64 import Float64
from shardwright.testing import loss_sum
from shardwright.verification.trainers.transformers import TransformersTrainer


class Trainer(TransformersTrainer):
    """The same model and optimizer, with a loop and a loss that transformers has no part in."""

    def step(self, batch):
        self.optimizer.zero_grad()
        with Float64() if self.wide else torch.enable_grad():
            logits = LlamaForCausalLM.forward(self.model, input_ids=batch.tokens).logits
        loss = loss_sum(logits, batch.targets) / batch.n_targets
        loss.backward()
        clip_grad_norm_(self.model.parameters(), batch.clip_norm)
        self.optimizer.param_groups[0]["lr"] = batch.lr
        self.optimizer.step()
        return loss.item()
