"""One optimizer step: forward and backward passes of all micro-batches, reduction of gradients, clipping, update.

The loss is the sum over all target tokens of the global batch divided by their number, which is counted before the
first backward pass over every data rank and micro-batch. Gradients are then sums, so they do not depend on how the
samples are distributed over data ranks and micro-batches. Nothing here reads a value back from the device, but for the
loss scale of fp16, which decides whether a step is taken (`loss_scale.py`).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwright.data.batches import Batch, DocumentsAB
from shardwright.data.samples import IGNORE
from shardwright.model.balance import RealTokens
from shardwright.model.device_type import to_device
from shardwright.model.documents import Documents, restarted
from shardwright.model.random import EVALUATION, sample_keys
from shardwright.parallel.loss import ChunkedLoss, bound, loss_sum
from shardwright.parallel.microbatch_runner import Loss, Microbatch
from shardwright.parallel.model import ParallelModel
from shardwright.parallel.norm import LocalNorms, clip_gradients, gradient_norm
from shardwright.parallel.tensor import TensorAxis
from shardwright.training.ahead import BEYOND, look_ahead
from shardwright.training.clock import NoPhases, Phases
from shardwright.training.loss_scale import LossScaler
from shardwright.training.optimizer import set_learning_rate
from shardwright.training.resilience.spikes import Recheck, Spike, SpikeGuard

EVALUATED_TOGETHER = 32
"""Micro-batches of one evaluation pass; a pipeline runs them through its stages one after another."""


@dataclass(frozen=True)
class StepResult:
    """Scalars on the device: this rank's part of the loss (the parts add up to it), the norm before clipping, the
    target tokens of the global batch, and this rank's part of the loss of modules of multi-token prediction, if there
    are any."""

    loss_part: Tensor
    gradient_norm: Tensor
    n_targets: Tensor
    mtp_part: Tensor | None = None


class LossParts(NamedTuple):
    """The first, third and fourth of `StepResult`."""

    loss_part: Tensor
    n_targets: Tensor
    mtp_part: Tensor | None


def _taken(x: Tensor, held_BT: Tensor) -> Tensor:
    """The elements of (..., B, S) at the places `held_BT` of its last dim; (..., B, T)."""
    return x.gather(-1, held_BT.expand(*x.shape[:-1], -1))


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
        scaler: LossScaler | None = None,
    ) -> None:
        """`restart_positions`: batches with documents have positions that restart with each of them. `scaler`: the
        gradients are those of the loss times its scale, until `clip`."""
        self.model = model
        self.device = device
        self.seed = seed
        self.restart_positions = restart_positions
        self.scaler = scaler
        self.loss_sum = self._loss_sum(compile_loss)
        self.local_norms: LocalNorms = []
        """Norms of this rank's shards of the gradients of the last `clip`."""
        self.lacks_targets = False
        """Whether no token of the last global batch counts in the loss, so that nothing was computed."""

    @property
    def loss_scale(self) -> float:
        """What the gradients in the parameters' `.grad` are multiplied by, after `forward_backward`."""
        return 1.0 if self.scaler is None else self.scaler.scale

    def forward_backward(self, batch: Batch, step: int) -> LossParts:
        """Leave the gradient of the global batch in the parameters' `.grad`; this rank's parts of the losses. Where no
        token of it counts (`lacks_targets`), there is no gradient."""
        self.model.train()
        n_targets = torch.full((), batch.n_targets, dtype=torch.int64, device=self.device)  # no copy to wait for
        n_targets = self.model.sum_over_samples(n_targets)
        # Only a rank whose own sequences have no target has to read the sum.
        self.lacks_targets = not batch.n_targets and not int(n_targets)
        if self.lacks_targets:
            nothing = torch.zeros((), dtype=torch.float64, device=self.device)
            return LossParts(nothing, n_targets, nothing.clone() if self.model.spec.mtp_modules else None)

        self.model.set_batch(len(batch.tokens_ABT), self.loss_scale)
        loss_part = self.model.runner.train(self._microbatches(batch, step), self._loss(batch, n_targets))
        loss_part = loss_part / self.loss_scale
        self.model.complete_gradients()
        if not self.model.spec.mtp_modules:
            return LossParts(loss_part, n_targets, None)
        loss_part, mtp_part = loss_part.expand(2)
        return LossParts(loss_part.clone(), n_targets, mtp_part / self.model.spec.mtp_weight)

    def _loss(self, batch: Batch, n_targets: Tensor) -> Loss:
        """The loss of a micro-batch times the loss scale: of the next token; and, with modules of multi-token
        prediction, their weighted mean loss, each divided by the number of its own targets in the global batch."""
        factor = self.loss_scale / n_targets.to(torch.float64)

        def loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
            return self.loss_sum(logits_BTV, targets_BT, factor) * factor

        if not self.model.spec.mtp_modules:
            return loss
        targets_APBT = self._ahead(batch)[1]
        counts = [(targets_ABT != IGNORE).sum() for targets_ABT in targets_APBT.unbind(1)[1:]]
        n_targets_K = self.model.sum_over_samples(self._on_device(torch.stack(counts))).clamp(min=1)
        weight = self.loss_scale * self.model.spec.mtp_weight / len(counts)
        factors_K = (weight / n_targets_K.to(torch.float64)).unbind()

        def losses(logits: Sequence[Tensor], targets_PBT: Tensor) -> Tensor:
            each = zip(logits[1:], targets_PBT[1:], factors_K, strict=True)
            ahead_K = [self.loss_sum(logits_BTV, targets_BT, part) * part for logits_BTV, targets_BT, part in each]
            return torch.stack([loss(logits[0], targets_PBT[0]), torch.stack(ahead_K).sum()])

        return losses

    def _ahead(self, batch: Batch) -> tuple[Tensor | None, Tensor]:
        """The tokens that modules of multi-token prediction read (A, K, B, T), and all targets (A, 1 + K, B, T);
        without modules none, and the targets (A, B, T)."""
        n_modules, tokens_ABT = self.model.spec.mtp_modules, batch.tokens_ABT
        if not n_modules:
            return None, batch.targets_ABT
        if (n_real_AB := self._n_real(batch)) is not None:
            # So that the routers of modules read the same however much padding there is.
            padding_ABT = torch.arange(tokens_ABT.shape[-1]) >= n_real_AB.unsqueeze(-1)
            tokens_ABT = tokens_ABT.masked_fill(padding_ABT, BEYOND)
        return look_ahead(tokens_ABT, batch.targets_ABT, n_modules)

    def _n_real(self, batch: Batch) -> Tensor | None:
        """The real tokens of each sequence, (A, B), if there is padding that experts must not compute."""
        return None if self.model.spec.moe is None else batch.n_real_AB

    def _real_tokens(self, batch: Batch, training: bool) -> list[RealTokens | None]:
        """For each micro-batch its real tokens, or None if there is no padding that experts must not compute."""
        n_microbatches, micro_batch, seq_len = batch.tokens_ABT.shape
        n_real_AB = self._n_real(batch)
        if n_real_AB is None:
            return [None] * n_microbatches
        total = torch.full((), int(n_real_AB.sum()), dtype=torch.int64, device=self.device)
        if training:
            self.model.sum_over_samples(total)
        n_sequences = n_microbatches * micro_batch * self.model.layout.data_ranks
        counts = [self._on_device(counts_B) for counts_B in n_real_AB]
        return [RealTokens(counts_B, total, seq_len, n_sequences) for counts_B in counts]

    def clip(self, max_norm: float) -> Tensor:
        """Divide the gradients by the loss scale, and scale them to a global norm of at most `max_norm`; at 0 or
        infinity any norm may be. Returns the norm before that, without the loss scale."""
        parameters = self.model.named_parameters.values()
        self.local_norms = []
        norm = gradient_norm(parameters, self.model.holders, self.model.groups.pp, self.local_norms) / self.loss_scale
        self._norm_known(norm)
        if 0 < max_norm < math.inf:
            clip_gradients(parameters, norm, max_norm, self.loss_scale)
        elif self.scaler is not None:
            clip_gradients(parameters, norm, math.inf, self.loss_scale)
        return norm

    def _norm_known(self, norm: Tensor) -> None:
        """Called before gradients are clipped, which leaves the device time for what is to be known of the norm."""

    def _microbatches(self, batch: Batch, step: int | None) -> list[Microbatch]:
        """The parts of a batch that this rank of cp holds, tokens and targets alike, on its device, with random keys
        where the model draws; `step` is None in evaluation."""
        if batch.documents_AB is not None:
            return self._of_documents(batch, batch.documents_AB, step)
        ahead_AKBT, targets_ABT = self._ahead(batch)
        tokens_ABT, n_tokens = batch.tokens_ABT, batch.tokens_ABT.shape[-1]
        positions_T = self.model.positions(n_tokens)
        if len(positions_T) < n_tokens:
            tokens_ABT, targets_ABT = tokens_ABT[..., positions_T], targets_ABT[..., positions_T]
            ahead_AKBT = None if ahead_AKBT is None else ahead_AKBT[..., positions_T]
        positions_T = self._on_device(positions_T)
        real_A = self._real_tokens(batch, training=step is not None)
        return [
            Microbatch(
                self._on_device(tokens_BT),
                self._on_device(targets_BT),
                positions_T,
                self._random_keys(step, ids_B),
                ahead_KBT=None if ahead_AKBT is None else self._on_device(ahead_AKBT[i]),
                real=real_A[i],
            )
            for i, (tokens_BT, targets_BT, ids_B) in enumerate(
                zip(tokens_ABT, targets_ABT, batch.sample_ids_AB, strict=True)
            )
        ]

    def _of_documents(self, batch: Batch, documents_AB: DocumentsAB, step: int | None) -> list[Microbatch]:
        """As `_microbatches`, of sequences with documents, of which each is sharded over cp in its own way."""
        found = []
        ahead_AKBT, targets_ABT = self._ahead(batch)
        for i, (tokens_BT, targets_BT, ids_B, lengths) in enumerate(
            zip(batch.tokens_ABT, targets_ABT, batch.sample_ids_AB, documents_AB, strict=True)
        ):
            held_BT = self.model.positions_of_documents(lengths)
            within_BT = self._on_device(restarted(lengths).gather(1, held_BT)) if self.restart_positions else None
            found.append(
                Microbatch(
                    self._on_device(tokens_BT.gather(1, held_BT)),
                    self._on_device(_taken(targets_BT, held_BT)),
                    self._on_device(held_BT),
                    self._random_keys(step, ids_B),
                    Documents(lengths, within_BT),
                    None if ahead_AKBT is None else self._on_device(_taken(ahead_AKBT[i], held_BT)),
                )
            )
        return found

    def _on_device(self, tensor: Tensor) -> Tensor:
        return to_device(tensor, self.device)

    def _loss_sum(self, compiled: bool) -> Callable[..., Tensor]:
        """The summed cross-entropy of what this rank's forward pass gives: logits, or with chunks the head's input."""
        tp, layout, rows = self.model.groups.tp, self.model.layout, self.model.vocabulary
        last = [part for part in self.model.parts if part.norm is not None]
        if layout.loss_chunk_tokens and last:
            axis = None if tp is None else TensorAxis(tp, layout.token_shards)
            return ChunkedLoss(last[0], rows, axis, layout.loss_chunk_tokens, IGNORE, compiled)
        return partial(loss_sum, bound(rows, IGNORE, tp, compiled))

    def _random_keys(self, step: int | None, sample_ids_B: Tensor) -> Tensor | None:
        """What training draws from; in evaluation, which has no step, only drawn experts do."""
        if not self.model.spec.draws:
            return None
        step = EVALUATION if step is None else step
        return sample_keys(self.seed, step, self._on_device(sample_ids_B))

    def evaluate(self, batches: Iterable[Batch]) -> Tensor:
        """Losses per target token over batches that are sharded over the data ranks, equal on every rank: that of the
        next token, then those of modules of multi-token prediction; (1 + K,). NaN where there is no target token."""
        losses, counts = self.evaluation_sums(batches)
        return losses / counts

    @torch.no_grad()
    def evaluation_sums(self, batches: Iterable[Batch]) -> Tensor:
        """Sums of the losses of `evaluate`, and the numbers of their target tokens; (2, 1 + K)."""
        self.model.train(False)
        n_modules = self.model.spec.mtp_modules
        losses = self._ahead_sums if n_modules else self.loss_sum
        sums = torch.zeros(2, 1 + n_modules, dtype=torch.float64, device=self.device)
        each = (microbatch for batch in batches for microbatch in self._microbatches(batch, None))
        while microbatches := list(islice(each, EVALUATED_TOGETHER)):
            sums[0] += self.model.runner.evaluate(microbatches, losses)
            if self.model.counts_targets:
                counts = [(targets_BT != IGNORE).sum((-2, -1)) for _, targets_BT, *_ in microbatches]
                sums[1] += torch.stack(counts).sum(0)
        self.model.runner.release()
        self.model.sum_over_losses(sums)
        return sums

    def _ahead_sums(self, logits: Sequence[Tensor], targets_PBT: Tensor) -> Tensor:
        return torch.stack([self.loss_sum(*each) for each in zip(logits, targets_PBT, strict=True)])


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
        scaler: LossScaler | None = None,
        spikes: SpikeGuard | None = None,
        phases: Phases | None = None,
    ) -> None:
        """`spikes` judges each step before weights change; `phases` is told when a phase of a step begins and ends."""
        super().__init__(
            model,
            device=device,
            seed=seed,
            compile_loss=compile_loss,
            restart_positions=restart_positions,
            scaler=scaler,
        )
        self.optimizer = optimizer
        self.clip_norm = clip_norm
        self.spikes = spikes
        self.phases: Phases = phases or NoPhases()
        self._before_change: list[Callable[[], None]] = []
        self._rules: list[Callable[[Tensor], bool]] = []
        self._loss_part: Tensor | None = None

    def call_before_change(self, act: Callable[[], None]) -> None:
        """Call `act` each time before weights and optimizer states change, from now on."""
        self._before_change.append(act)

    def take_steps_if(self, rule: Callable[[Tensor], bool]) -> None:
        """Change weights and optimizer states in a step only if `rule` returns true for the norm of its gradients,
        which are in `.grad`; the same on every rank."""
        self._rules.append(rule)

    @property
    def skipped_steps(self) -> int:
        """Steps of the run so far that changed nothing: a gradient overflowed in fp16, or they were spikes."""
        overflows = 0 if self.scaler is None else self.scaler.state.skipped
        return overflows + (0 if self.spikes is None else self.spikes.state.skipped)

    @property
    def spike(self) -> Spike | None:
        """What was found of the last step, if it was a spike, and so not taken."""
        return None if self.spikes is None else self.spikes.seen

    @property
    def recheck(self) -> Recheck | None:
        """Two tries of the last step, if it was run again."""
        return None if self.spikes is None else self.spikes.recheck

    def step(self, batch: Batch, step: int, rate: float) -> StepResult:
        """Take optimizer step number `step` at learning rate `rate` on this rank's part of the global batch; where that
        gives a number that is not finite and the run rechecks, which changes nothing, once more."""
        result = self._try(batch, step, rate)
        if self.spikes is not None and self.spikes.doubts:
            result = self._try(batch, step, rate)
        return result

    def _try(self, batch: Batch, step: int, rate: float) -> StepResult:
        self.phases.begin("forward_backward", step)
        loss_part, n_targets, mtp_part = self.forward_backward(batch, step)
        self.phases.end("forward_backward")
        if self.lacks_targets:
            self.local_norms = []
            if self.spikes is not None:
                self.spikes.pass_over()
            return StepResult(loss_part, torch.zeros_like(loss_part), n_targets, mtp_part)
        if self.spikes is not None:
            self._loss_part = loss_part
        self.phases.begin("optimizer", step)
        norm = self.update(rate)
        self.phases.end("optimizer")
        return StepResult(loss_part, norm, n_targets, mtp_part)

    def update(self, rate: float, clip_norm: float | None = None) -> Tensor:
        """Clip the gradients in `.grad`, let the optimizer use them up, and return their norm before clipping. Where
        that is not finite and there is a loss scale, or the step is a spike, weights and states stay as they are.
        `clip_norm`: of this step alone, in place of the trainer's."""
        norm = self.clip(self.clip_norm if clip_norm is None else clip_norm)
        taken = self.scaler is None or self.scaler.takes(norm)
        if self.spikes is not None:
            taken = self.spikes.takes(overflowed=not taken) and taken
        taken = taken and all(rule(norm) for rule in self._rules)
        for act in self._before_change:
            act()
        if taken:
            set_learning_rate(self.optimizer, rate)
            self.optimizer.step()
        self.model.learn_from_load(update=taken)
        self.model.after_change()
        self.model.forget_gradients()
        return norm.to(self.device)  # gradients may be on the host

    def _norm_known(self, norm: Tensor) -> None:
        if self.spikes is not None:
            assert self._loss_part is not None
            self.spikes.start(self._loss_part, norm.to(self.device))
