"""A tiny model trained for a few steps, by one process in plain PyTorch and by any layout, on the same ragged batch."""

from contextlib import ExitStack
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardloom.config import OptimizerSection
from shardloom.data.batches import Batch
from shardloom.data.samples import IGNORE
from shardloom.layout import Layout
from shardloom.model.init import initialise
from shardloom.model.spec import ModelSpec
from shardloom.model.transformer import Transformer
from shardloom.parallel.apply import apply
from shardloom.train.optimizer import build_optimizer
from shardloom.train.step import Trainer
from tests.mutation import Mutation, mutated

SPEC = ModelSpec(
    n_layers=2,
    d_model=24,
    n_heads=3,
    n_kv_heads=1,
    head_dim=8,
    d_ffn=40,
    vocab_size=31,
    max_seq_len=16,
    norm="rmsnorm",
    norm_eps=1e-5,
    activation="swiglu",
    positions="rope",
    rope_theta=1e4,
    rope_scaling=None,
    qk_norm=False,
    bias=False,
    tied_embedding=False,
    dropout=0.0,
    init_std=0.3,
)
GLOBAL_BATCH, SEQ_LEN, STEPS, SEED, RATE = 24, 10, 3, 5, 2e-3
OPTIMIZER = OptimizerSection(lr=RATE, weight_decay=0.1)


@dataclass
class Outcome:
    """What a run did: loss and gradient norm of each step, the raw gradients of each, the parameters in the end."""

    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, Tensor]]
    parameters: dict[str, Tensor]


def global_batch(step: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of a step, (GLOBAL_BATCH, SEQ_LEN); from 1 to all targets of a sample count."""
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(SPEC.vocab_size, (GLOBAL_BATCH, SEQ_LEN), generator=generator)
    targets = torch.randint(SPEC.vocab_size, (GLOBAL_BATCH, SEQ_LEN), generator=generator)
    counted = torch.randint(1, SEQ_LEN + 1, (GLOBAL_BATCH, 1), generator=generator) ** 2 // SEQ_LEN
    targets[torch.arange(SEQ_LEN) >= counted.clamp(min=1)] = IGNORE
    return tokens, targets


def local_batch(step: int, data_rank: int, data_ranks: int, accumulation: int) -> Batch:
    """One data rank's share of a step, as data/batches.py deals it."""
    block = GLOBAL_BATCH // data_ranks
    rows = slice(data_rank * block, (data_rank + 1) * block)
    shape = (accumulation, block // accumulation, SEQ_LEN)
    tokens, targets = (whole[rows].reshape(shape) for whole in global_batch(step))
    ids = (step * GLOBAL_BATCH + torch.arange(GLOBAL_BATCH)[rows]).reshape(shape[:2])
    return Batch(tokens, targets, ids, int((targets != IGNORE).sum()))


def one_process(dtype: torch.dtype, spec: ModelSpec = SPEC) -> Outcome:
    """The reference: no Trainer, no layout, no microbatches; the whole batch in one forward pass."""
    model = Transformer(spec).to(dtype)
    initialise(model, spec, SEED)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    plain = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": decayed, "weight_decay": OPTIMIZER.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(OPTIMIZER.beta1, OPTIMIZER.beta2), eps=OPTIMIZER.eps)
    outcome = Outcome([], [], [], {})
    for step in range(STEPS):
        tokens, targets = global_batch(step)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=IGNORE)
        loss.backward()
        outcome.losses.append(float(loss.detach()))
        outcome.gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})  # type: ignore[union-attr]
        outcome.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip_norm)))
        optimizer.step()
        optimizer.zero_grad()
    outcome.parameters = {n: p.detach().clone() for n, p in model.named_parameters()}
    return outcome


def build(layout: Layout, dtype: torch.dtype, spec: ModelSpec = SPEC, compute: torch.dtype | None = None) -> Trainer:
    """The trainer of this rank."""
    device = torch.device("cpu")
    model = apply(spec, layout, device, seed=SEED, param_dtype=dtype, compute_dtype=compute or dtype)
    optimizer = build_optimizer(model.named_parameters.items(), OPTIMIZER)
    return Trainer(model, optimizer, device=device, seed=SEED, clip_norm=OPTIMIZER.clip_norm)


def train_ranks(
    layout: Layout,
    accumulation: int,
    dtype: torch.dtype,
    mutations: tuple[Mutation, ...] = (),
    spec: ModelSpec = SPEC,
    compute: torch.dtype | None = None,
) -> Outcome:
    """To be run on every rank of a world: STEPS steps of a layout, with everything gathered to whole tensors."""
    with ExitStack() as stack:
        stack.enter_context(mutated(*mutations))
        trainer = build(layout, dtype, spec, compute)
        outcome = Outcome([], [], [], {})
        for step in range(STEPS):
            batch = local_batch(step, layout.data_rank(dist.get_rank()), layout.data_ranks, accumulation)
            loss_part, _ = trainer.forward_backward(batch, step)
            dist.all_reduce(loss_part)
            outcome.losses.append(float(loss_part))
            outcome.gradients.append({n: whole(p.grad) for n, p in trainer.model.named_parameters.items()})
            outcome.norms.append(float(trainer.update(RATE)))
        outcome.parameters = {n: whole(p) for n, p in trainer.model.named_parameters.items()}
    return outcome


def whole(tensor: Tensor | None) -> Tensor:
    """A plain copy of a tensor, gathered if it is sharded."""
    assert tensor is not None
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()


def relative_error(found: Tensor, expected: Tensor) -> float:
    """||found - expected|| / ||expected||."""
    return float((found - expected).norm() / expected.norm())


def worst_error(found: Outcome, expected: Outcome) -> float:
    """The largest relative error of any loss, norm, raw gradient or final parameter."""
    errors = [
        abs(a - b) / abs(b) for a, b in zip(found.losses + found.norms, expected.losses + expected.norms, strict=True)
    ]
    for ours, theirs in zip(found.gradients, expected.gradients, strict=True):
        assert ours.keys() == theirs.keys()
        errors += [relative_error(ours[name], theirs[name]) for name in theirs]
    errors += [relative_error(found.parameters[name], expected.parameters[name]) for name in expected.parameters]
    return max(errors)
