"""The reference: a model trained by one process in plain PyTorch. No layout, no micro-batches, no code of ours but the
model itself and the row of the optimizer; the whole batch in one forward pass, PyTorch's own loss and clipping."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from shardwright.data.samples import IGNORE
from shardwright.model.init import initialise
from shardwright.model.moe import learn_from_load, take_load
from shardwright.model.random import sample_keys
from shardwright.model.transformer import Transformer
from shardwright.training.optimizer import make_optimizer
from shardwright.verification.case import DTYPES, Case
from shardwright.verification.trace import Quantity, RankTrace, Recorder

SGD_RATE = 0.01


def train_alone(case: Case, folder: Path) -> RankTrace:
    """Take the steps of a case with each optimizer, in a world of one rank."""
    recorder = Recorder(folder)
    kept, compute = DTYPES[case.dtype]
    for training in case.trainings:
        model = Transformer(case.spec).to(kept)
        initialise(model, case.spec, case.seed)
        model.train()
        parameters = dict(model.named_parameters())
        optimizer = _optimizer(training, parameters, case)
        if training == "sgd":
            recorder.tensors(Quantity("initial", training, 0), parameters)
        for step in range(case.steps):
            tokens_BT, targets_BT, ids_B = case.batch(step)
            keys_B = sample_keys(case.seed, step, ids_B) if case.spec.draws else None
            # What is not trained (a router's bias) is added to what has more digits than `compute`.
            weights = {name: p.to(compute) if p.requires_grad else p for name, p in parameters.items()}
            logits_BTV = functional_call(model, weights, (tokens_BT,), {"random_keys_B": keys_B})
            loss = F.cross_entropy(logits_BTV.flatten(0, 1).to(kept), targets_BT.flatten(), ignore_index=IGNORE)
            loss.backward()
            recorder.scalar(Quantity("loss", training, step + 1), loss.detach())
            gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in parameters.items()}
            recorder.tensors(Quantity("gradient", training, step + 1), gradients)
            norm = nn.utils.clip_grad_norm_(parameters.values(), case.optimizer.clip_norm or float("inf"))
            recorder.scalar(Quantity("grad norm", training, step + 1), norm)
            optimizer.step()
            optimizer.zero_grad()
            learn_from_load(model, {layer: load.counts_E for layer, load in take_load(model).items()})
        recorder.tensors(Quantity("parameter", training, case.steps), parameters)
    return recorder.trace


def _optimizer(training: str, parameters: dict[str, nn.Parameter], case: Case) -> torch.optim.Optimizer:
    if training == "sgd":
        return torch.optim.SGD(parameters.values(), lr=SGD_RATE)
    config = case.optimizer
    groups = [
        {"params": [p for p in parameters.values() if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    return make_optimizer(groups, config)
