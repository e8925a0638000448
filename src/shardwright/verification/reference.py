"""The reference: a model trained by one process in plain PyTorch. No layout, no micro-batches, no code of ours but the
model itself and the row of the optimizer; the whole batch in one forward pass, PyTorch's own loss and clipping."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from shardwright.data.samples import IGNORE
from shardwright.model.documents import Documents
from shardwright.model.init import initialise
from shardwright.model.moe import learn_from_load, take_load
from shardwright.model.random import EVALUATION, sample_keys
from shardwright.model.transformer import Transformer
from shardwright.training.optimizer import make_optimizer, parameter_groups, set_learning_rate
from shardwright.verification.case import DTYPES, Case
from shardwright.verification.trace import Quantity, RankTrace, Recorder


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
            logits_BTV = functional_call(model, weights, (tokens_BT,), _also(case, step, keys_B))
            loss = F.cross_entropy(logits_BTV.flatten(0, 1).to(kept), targets_BT.flatten(), ignore_index=IGNORE)
            loss.backward()
            recorder.scalar(Quantity("loss", training, step + 1), loss.detach())
            gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in parameters.items()}
            recorder.tensors(Quantity("gradient", training, step + 1), gradients)
            scale = case.scale(training, step)
            for p in parameters.values():
                p.grad = None if p.grad is None else p.grad * scale
            norm = nn.utils.get_total_norm(p.grad for p in parameters.values() if p.grad is not None)
            recorder.scalar(Quantity("grad norm", training, step + 1), norm)
            limit = case.clip_norm(training, step, float(norm))
            recorder.trace.clip_norms.setdefault(training, []).append(limit)
            nn.utils.clip_grads_with_norm_(parameters.values(), limit, norm)
            set_learning_rate(optimizer, case.rate(training, step) / scale)
            optimizer.step()
            optimizer.zero_grad()
            learn_from_load(model, {layer: load.counts_E for layer, load in take_load(model).items()})
            if case.evaluate and step == 0:
                recorder.scalar(Quantity("evaluation", training, 1), _evaluate(model, case, parameters))
        recorder.tensors(Quantity("parameter", training, case.steps), parameters)
    return recorder.trace


@torch.no_grad()
def _evaluate(model: Transformer, case: Case, parameters: dict[str, nn.Parameter]) -> Tensor:
    """The loss of the batch that comes after those of the training steps, without dropout."""
    kept, compute = DTYPES[case.dtype]
    tokens_BT, targets_BT, ids_B = case.batch(case.steps)
    keys_B = sample_keys(case.seed, EVALUATION, ids_B) if case.spec.draws else None
    model.eval()
    weights = {name: p.to(compute) if p.requires_grad else p for name, p in parameters.items()}
    logits_BTV = functional_call(model, weights, (tokens_BT,), _also(case, case.steps, keys_B))
    model.train()
    return F.cross_entropy(logits_BTV.flatten(0, 1).to(kept), targets_BT.flatten(), ignore_index=IGNORE)


def _also(case: Case, step: int, keys_B: Tensor | None) -> dict[str, Any]:
    """The arguments of a model besides the tokens."""
    lengths = case.documents(step)
    restart = case.positions == "document"
    documents = None if lengths is None else Documents.of(lengths, case.seq_len, restart=restart)
    return {"random_keys_B": keys_B, "documents": documents}


def _optimizer(training: str, parameters: dict[str, nn.Parameter], case: Case) -> torch.optim.Optimizer:
    if training == "sgd":
        return torch.optim.SGD(parameters.values())
    config = case.optimizer
    if config.kind.matrix_state is not None:
        return make_optimizer(parameter_groups(parameters, case.spec, config.weight_decay, by_matrix=True), config)
    groups = [
        {"params": [p for p in parameters.values() if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    return make_optimizer(groups, config)
