"""One optimizer step: forward and backward passes of all micro-batches, reduction of gradients, clipping, update.

The loss is the sum over all target tokens of the global batch divided by their number, which is counted before the
first backward pass over every data rank and micro-batch. Gradients are then sums, so they do not depend on how the
samples are distributed over data ranks and micro-batches. Nothing here reads a value back from the device.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer

from shardwright.data.batches import Batch, DocumentsAB
from shardwright.data.samples import IGNORE
from shardwright.model.documents import Documents, restarted
from shardwright.model.random import EVALUATION, sample_keys
from shardwright.parallel.loss import vocabulary_loss_sum
from shardwright.parallel.microbatch_runner import Microbatch
from shardwright.parallel.model import ParallelModel
from shardwright.parallel.norm import clip_gradients, gradient_norm
from shardwright.training.clock import Clock
from shardwright.training.optimizer import set_learning_rate

_EVALUATED_TOGETHER = 32
"""Micro-batches of one evaluation pass; a pipeline runs them through its stages one after another."""


@dataclass(frozen=True)
class StepResult:
    """Scalars on the device: this rank's part of the loss (the parts add up to it), the norm before clipping, and
    the target tokens of the global batch."""

    loss_part: Tensor
    gradient_norm: Tensor
    n_targets: Tensor


def loss_sum(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Cross-entropy summed over target tokens; targets of IGNORE do not count. 16-bit logits are raised to fp32."""
    wide = torch.promote_types(logits_BTV.dtype, torch.float32)
    return F.cross_entropy(
        logits_BTV.flatten(0, 1).to(wide), targets_BT.flatten(), ignore_index=IGNORE, reduction="sum"
    )


class ForwardBackward:
    """The loss of a global batch and its gradient, by whatever layout the model has."""

    def __init__(
        self,
        model: ParallelModel,
        *,
        device: torch.device,
        seed: int,
        compile_loss: bool = False,
        restart_positions: bool = False,
    ) -> None:
        """`restart_positions`: batches with documents have positions that restart with each of them."""
        self.model = model
        self.device = device
        self.seed = seed
        self.restart_positions = restart_positions
        self.loss_sum = self._loss_sum(compile_loss)

    def forward_backward(self, batch: Batch, step: int) -> tuple[Tensor, Tensor]:
        """Leave the gradient of the global batch in the parameters' `.grad`; this rank's part of the loss, and N."""
        self.model.train()
        n_targets = torch.full((), batch.n_targets, dtype=torch.int64, device=self.device)  # no copy to wait for
        n_targets = self.model.sum_over_samples(n_targets).clamp(min=1)

        def loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
            return self.loss_sum(logits_BTV, targets_BT) / n_targets

        self.model.set_batch(len(batch.tokens_ABT))
        loss_part = self.model.runner.train(self._microbatches(batch, step), loss)
        self.model.complete_gradients()
        return loss_part, n_targets

    def clip(self, max_norm: float) -> Tensor:
        """Scale the gradients to a global norm of at most `max_norm`; at 0 or infinity none is scaled. Returns the norm
        before."""
        parameters = self.model.named_parameters.values()
        norm = gradient_norm(parameters, self.model.holders, self.model.groups.pp)
        if 0 < max_norm < math.inf:
            clip_gradients(parameters, norm, max_norm)
        return norm

    def _microbatches(self, batch: Batch, step: int | None) -> list[Microbatch]:
        """The parts of a batch that this rank of cp holds, tokens and targets alike, on its device, with random keys
        where the model draws; `step` is None in evaluation."""
        if batch.documents_AB is not None:
            return self._of_documents(batch, batch.documents_AB, step)
        n_tokens = batch.tokens_ABT.shape[-1]
        positions_T = self.model.positions(n_tokens)
        tokens_ABT, targets_ABT = batch.tokens_ABT, batch.targets_ABT
        if len(positions_T) < n_tokens:
            tokens_ABT, targets_ABT = tokens_ABT[..., positions_T], targets_ABT[..., positions_T]
        positions_T = self._on_device(positions_T)
        return [
            Microbatch(
                self._on_device(tokens_BT),
                self._on_device(targets_BT),
                positions_T,
                self._random_keys(step, ids_B),
            )
            for tokens_BT, targets_BT, ids_B in zip(tokens_ABT, targets_ABT, batch.sample_ids_AB, strict=True)
        ]

    def _of_documents(self, batch: Batch, documents_AB: DocumentsAB, step: int | None) -> list[Microbatch]:
        """As `_microbatches`, of sequences with documents, of which each is sharded over cp in its own way."""
        found = []
        for tokens_BT, targets_BT, ids_B, lengths in zip(
            batch.tokens_ABT, batch.targets_ABT, batch.sample_ids_AB, documents_AB, strict=True
        ):
            held_BT = self.model.positions_of_documents(lengths)
            within_BT = self._on_device(restarted(lengths).gather(1, held_BT)) if self.restart_positions else None
            found.append(
                Microbatch(
                    self._on_device(tokens_BT.gather(1, held_BT)),
                    self._on_device(targets_BT.gather(1, held_BT)),
                    self._on_device(held_BT),
                    self._random_keys(step, ids_B),
                    Documents(lengths, within_BT),
                )
            )
        return found

    def _on_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)

    def _loss_sum(self, compiled: bool) -> Callable[[Tensor, Tensor], Tensor]:
        """The summed cross-entropy of the logits that this rank's forward pass gives."""
        tp = self.model.groups.tp
        if tp is not None:
            return partial(vocabulary_loss_sum, rows=self.model.vocabulary, group=tp, ignore=IGNORE)
        return torch.compile(loss_sum) if compiled else loss_sum

    def _random_keys(self, step: int | None, sample_ids_B: Tensor) -> Tensor | None:
        """What training draws from; in evaluation, which has no step, only drawn experts do."""
        if not self.model.spec.draws:
            return None
        step = EVALUATION if step is None else step
        return sample_keys(self.seed, step, self._on_device(sample_ids_B))

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> Tensor:
        """Loss per target token over batches that are sharded over the data ranks, equal on every rank; a scalar."""
        self.model.train(False)
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        each = (microbatch for batch in batches for microbatch in self._microbatches(batch, None))
        while microbatches := list(islice(each, _EVALUATED_TOGETHER)):
            sums[0] += self.model.runner.evaluate(microbatches, self.loss_sum)
            if self.model.counts_targets:
                sums[1] += torch.stack([(targets_BT != IGNORE).sum() for _, targets_BT, *_ in microbatches]).sum()
        self.model.runner.release()
        self.model.sum_over_losses(sums)
        return sums[0] / sums[1].clamp(min=1)


class Trainer(ForwardBackward):
    """A model and its optimizer, and the step they take together."""

    def __init__(
        self,
        model: ParallelModel,
        optimizer: Optimizer,
        *,
        device: torch.device,
        seed: int,
        clip_norm: float = 0.0,
        compile_loss: bool = False,
        restart_positions: bool = False,
    ) -> None:
        super().__init__(
            model, device=device, seed=seed, compile_loss=compile_loss, restart_positions=restart_positions
        )
        self.optimizer = optimizer
        self.clip_norm = clip_norm
        self.clock = Clock(device)

    def step(self, batch: Batch, step: int, rate: float) -> StepResult:
        """Take optimizer step number `step` at learning rate `rate` on this rank's part of the global batch."""
        loss_part, n_targets = self.forward_backward(batch, step)
        self.clock.mark("forward_backward")
        norm = self.update(rate)
        self.clock.mark("optimizer")
        return StepResult(loss_part, norm, n_targets)

    def update(self, rate: float) -> Tensor:
        """Clip the gradients in `.grad`, let the optimizer use them up, and return their norm before clipping."""
        norm = self.clip(self.clip_norm)
        set_learning_rate(self.optimizer, rate)
        self.optimizer.step()
        self.model.learn_from_load()
        self.model.after_change()
        self.model.forget_gradients()
        return norm
