"""Forward and backward passes of all micro-batches of a step or of an evaluation, for any layout of the model.

The loss is the sum over all target tokens of the global batch divided by their number, which is counted over all data
ranks and micro-batches before the first backward pass. Gradients are then sums, so they do not depend on the
distribution of samples over data ranks and micro-batches.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.config.sections import NO_PREFERENCE, PreferenceSection
from shardwright.data.batches import Batch, DocumentsAB
from shardwright.data.samples import IGNORE
from shardwright.model.balance import RealTokens
from shardwright.model.batch_invariant import is_batch_invariant
from shardwright.model.device_type import to_device
from shardwright.model.documents import Documents, restarted
from shardwright.model.expert_choices import replayed
from shardwright.model.random import EVALUATION, sample_keys
from shardwright.parallel.loss import ChunkedLoss, bound, gather_vocabulary, log_probabilities, loss_sum, token_losses
from shardwright.parallel.microbatch import Loss, Microbatch, PairTargets
from shardwright.parallel.model import ParallelModel
from shardwright.parallel.norm import LocalNorms, clip_gradients, gradient_norm
from shardwright.parallel.preference import METRICS, PairLoss
from shardwright.parallel.tensor import TensorAxis
from shardwright.split.sequence import positions_of_rank
from shardwright.training.ahead import BEYOND, look_ahead
from shardwright.training.loss_scale import LossScaler

EVALUATED_TOGETHER = 32
"""Number of micro-batches of one evaluation pass. A pipeline runs them through its stages one after another."""


class LossParts(NamedTuple):
    """This rank's part of the loss, number of target tokens, and parts of the MTP loss and of the metrics of pairs, as
    in `StepResult`."""

    loss_part: Tensor
    n_targets: Tensor
    mtp_part: Tensor | None
    pair_parts: Tensor | None = None


def _taken(x: Tensor, held_BT: Tensor) -> Tensor:
    """Return the elements of `x` (..., B, S) at the positions `held_BT` of its last dim; shape (..., B, T)."""
    return x.gather(-1, held_BT.expand(*x.shape[:-1], -1))


class ForwardBackward:
    """Computes the loss of a global batch and its gradient, for any layout of the model."""

    def __init__(
        self,
        model: ParallelModel,
        *,
        device: torch.device,
        seed: int,
        compile_loss: bool = False,
        restart_positions: bool = False,
        scaler: LossScaler | None = None,
        preference: PreferenceSection = NO_PREFERENCE,
    ) -> None:
        """`restart_positions`: positions of batches with documents restart at each document. `scaler`: gradients are
        multiplied by its scale until `clip`. `preference`: the loss of pairs of answers."""
        self.model = model
        self.device = device
        self.seed = seed
        self.restart_positions = restart_positions
        self.scaler = scaler
        self.cross_entropy = bound(self.model.vocabulary, IGNORE, self.model.groups.tp, compile_loss)
        self.loss_sum = self._loss_sum(compile_loss)
        self.pair_loss = None if preference.kind == "none" else self._pair_loss(preference)
        self.local_norms: LocalNorms = []
        """Norms of this rank's shards of the gradients at the last `clip`."""
        self.lacks_targets = False
        """Whether no token of the last global batch counts in the loss, so that nothing was computed."""

    @property
    def loss_scale(self) -> float:
        """Factor of the gradients in `.grad` after `forward_backward`."""
        return 1.0 if self.scaler is None else self.scaler.scale

    def forward_backward(self, batch: Batch, step: int) -> LossParts:
        """Compute the gradient of the global batch into the parameters' `.grad`. Return this rank's parts of the
        losses. If no token counts (`lacks_targets`), there is no gradient."""
        self.model.train()
        n_targets = torch.full((), batch.n_targets, dtype=torch.int64, device=self.device)  # no copy to wait for
        n_targets = self.model.sum_over_samples(n_targets)
        # Only a rank without targets in its own sequences has to read the sum.
        self.lacks_targets = not batch.n_targets and not int(n_targets)
        if self.lacks_targets:
            nothing = torch.zeros((), dtype=torch.float64, device=self.device)
            return LossParts(nothing, n_targets, nothing.clone() if self.model.spec.mtp_modules else None)

        with self._replayed(batch):
            self.model.set_batch(len(batch.tokens_ABT), self.loss_scale)
            loss_part = self.model.runner.train(self._microbatches(batch, step), self._loss(batch, n_targets))
        loss_part = loss_part / self.loss_scale
        self.model.complete_gradients()
        if self.pair_loss is not None:
            loss_part, *pair_parts = loss_part.expand(1 + len(METRICS)).clone()
            return LossParts(loss_part, n_targets, None, torch.stack(pair_parts))
        if not self.model.spec.mtp_modules:
            return LossParts(loss_part, n_targets, None)
        loss_part, mtp_part = loss_part.expand(2)
        return LossParts(loss_part.clone(), n_targets, mtp_part / self.model.spec.mtp_weight)

    def _loss(self, batch: Batch, n_targets: Tensor) -> Loss:
        """Return the loss function of a micro-batch, times the loss scale. With MTP modules, it returns the
        next-token loss and the modules' weighted mean loss. Each module's loss is divided by its own number of
        targets in the global batch."""
        if self.pair_loss is not None:
            n_pairs = torch.full((), batch.n_pairs, dtype=torch.float64, device=self.device)
            return partial(self.pair_loss, factor=self.loss_scale / self.model.sum_over_samples(n_pairs))
        factor = self.loss_scale / n_targets.to(torch.float64)
        if batch.weights_ABT is not None:
            assert not self.model.spec.mtp_modules
            assert not self.model.layout.loss_chunk_tokens
            return partial(self._weighted_loss, factor=factor)

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
            modules = zip(logits[1:], targets_PBT[1:], factors_K, strict=True)
            ahead_K = [self.loss_sum(logits_BTV, targets_BT, part) * part for logits_BTV, targets_BT, part in modules]
            return torch.stack([loss(logits[0], targets_PBT[0]), torch.stack(ahead_K).sum()])

        return losses

    def _weighted_loss(self, logits_BTV: Tensor, targets_BT: Tensor, weights_BT: Tensor, factor: Tensor) -> Tensor:
        losses_BT = token_losses(self.cross_entropy, logits_BTV, targets_BT)
        return (losses_BT * weights_BT).sum(dtype=torch.float64) * factor

    def _ahead(self, batch: Batch) -> tuple[Tensor | None, Tensor]:
        """Return the tokens that MTP modules read (A, K, B, T), and all targets (A, 1 + K, B, T). Without modules,
        return None and the targets (A, B, T)."""
        n_modules, tokens_ABT = self.model.spec.mtp_modules, batch.tokens_ABT
        if not n_modules:
            return None, batch.targets_ABT
        if (n_real_AB := self._n_real(batch)) is not None:
            # The modules' routers then read the same tokens for any amount of padding.
            padding_ABT = torch.arange(tokens_ABT.shape[-1]) >= n_real_AB.unsqueeze(-1)
            tokens_ABT = tokens_ABT.masked_fill(padding_ABT, BEYOND)
        return look_ahead(tokens_ABT, batch.targets_ABT, n_modules)

    def _n_real(self, batch: Batch) -> Tensor | None:
        """Return the real tokens of each sequence, (A, B), or None if there is no padding that experts must not
        compute."""
        return None if self.model.spec.moe is None else batch.n_real_AB

    def _real_tokens(self, batch: Batch, training: bool) -> list[RealTokens | None]:
        """Return the real tokens of each micro-batch, or None if there is no padding that experts must not compute."""
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
        """Divide the gradients by the loss scale and clip their global norm to `max_norm`; 0 and infinity mean no
        clipping. Return the norm before clipping, without the loss scale."""
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
        """Use the norm. Called before gradients are clipped, so that work on the norm overlaps with clipping."""

    def _microbatches(self, batch: Batch, step: int | None) -> list[Microbatch]:
        """Return the micro-batches on this rank's device, with this rank's cp part of tokens and targets, and with
        random keys if the model draws random numbers. `step` is None in evaluation."""
        if batch.documents_AB is not None:
            return self._document_microbatches(batch, batch.documents_AB, step)
        ahead_AKBT, targets_ABT = self._ahead(batch)
        tokens_ABT, n_tokens = batch.tokens_ABT, batch.tokens_ABT.shape[-1]
        weights_ABT = batch.weights_ABT
        positions_T = self.model.positions(n_tokens)
        if len(positions_T) < n_tokens:
            tokens_ABT, targets_ABT = tokens_ABT[..., positions_T], targets_ABT[..., positions_T]
            weights_ABT = None if weights_ABT is None else weights_ABT[..., positions_T]
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
                weights_BT=None if weights_ABT is None else self._on_device(weights_ABT[i]),
            )
            for i, (tokens_BT, targets_BT, ids_B) in enumerate(
                zip(tokens_ABT, targets_ABT, batch.sample_ids_AB, strict=True)
            )
        ]

    def _document_microbatches(self, batch: Batch, documents_AB: DocumentsAB, step: int | None) -> list[Microbatch]:
        """Return micro-batches as `_microbatches`, for sequences with documents, each with its own sharding over cp."""
        microbatches = []
        ahead_AKBT, targets_ABT = self._ahead(batch)
        real_A = self._real_tokens(batch, training=step is not None)
        for i, (tokens_BT, targets_BT, ids_B, lengths) in enumerate(
            zip(batch.tokens_ABT, targets_ABT, batch.sample_ids_AB, documents_AB, strict=True)
        ):
            held_BT = self.model.positions_of_documents(lengths)
            within_BT = self._on_device(restarted(lengths).gather(1, held_BT)) if self.restart_positions else None
            microbatches.append(
                Microbatch(
                    self._on_device(tokens_BT.gather(1, held_BT)),
                    self._on_device(_taken(targets_BT, held_BT)),
                    self._on_device(held_BT),
                    self._random_keys(step, ids_B),
                    Documents(lengths, within_BT),
                    None if ahead_AKBT is None else self._on_device(_taken(ahead_AKBT[i], held_BT)),
                    real=real_A[i],
                    pairs=None
                    if batch.references_AB is None
                    else self._pairs(lengths, targets_BT, held_BT, batch.references_AB[i]),
                )
            )
        return microbatches

    def _replayed(self, batch: Batch, microbatches: slice = slice(None)) -> AbstractContextManager[None]:
        """Replay the batch's choices of experts, if it has any, in the passes of some micro-batches."""
        if batch.experts_ABTLK is None:
            return nullcontext()
        layout, n_tokens = self.model.layout, batch.tokens_ABT.shape[-1]
        spans = positions_of_rank(layout, n_tokens, dist.get_rank(), token_shard=layout.token_shards)
        own_T = torch.cat([torch.arange(span.start, span.stop, span.step) for span in spans])
        experts_ABTLK = self._on_device(batch.experts_ABTLK[microbatches, :, own_T].long())
        return replayed(self.model.parts, self.model.spec, list(experts_ABTLK))

    def _pairs(
        self,
        lengths: Sequence[Sequence[int]],
        targets_BT: Tensor,
        held_BT: Tensor,
        references: Sequence[Sequence[float]],
    ) -> PairTargets:
        """Return the pairs of a micro-batch. `lengths`, `targets_BT`: of whole sequences; `held_BT`: the positions of
        this rank's tokens; `references`: of each sequence."""
        values = [value for row in references for value in row]
        rows, n_before = [], 0
        for lengths_of_row, row in zip(lengths, references, strict=True):
            assert len(lengths_of_row) - len(row) in (0, 1), (lengths_of_row, row)
            numbers = [*range(n_before, n_before + len(row)), len(values)][: len(lengths_of_row)]
            parts = zip(numbers, lengths_of_row, strict=True)
            rows.append(torch.cat([torch.full((length,), number) for number, length in parts]))
            n_before += len(row)
        documents_BT = torch.stack(rows)
        counts = torch.zeros(len(values) + 1, dtype=torch.float64)
        counts.index_add_(0, documents_BT.flatten(), (targets_BT != IGNORE).flatten().double())
        return PairTargets(
            self._on_device(documents_BT.gather(1, held_BT)),
            self._on_device(counts[:-1]),
            self._on_device(torch.tensor(values, dtype=torch.float64)),
        )

    def _on_device(self, tensor: Tensor) -> Tensor:
        return to_device(tensor, self.device)

    def _loss_sum(self, compiled: bool) -> Callable[..., Tensor]:
        """Return the function for the summed cross-entropy of logits or, with chunks, of the head's input."""
        tp, layout, rows = self.model.groups.tp, self.model.layout, self.model.vocabulary
        last = [part for part in self.model.parts if part.norm is not None]
        if layout.loss_chunk_tokens and last:
            axis = None if tp is None else TensorAxis(tp, layout.token_shards)
            return ChunkedLoss(last[0], rows, axis, layout.loss_chunk_tokens, IGNORE, compiled)
        return partial(loss_sum, self.cross_entropy)

    def _pair_loss(self, preference: PreferenceSection) -> PairLoss:
        groups, layout = self.model.groups, self.model.layout
        context = [group for group in (groups.cp_ring, groups.cp_ulysses) if group is not None]
        at = layout.coordinates(dist.get_rank())
        return PairLoss(preference, self.cross_entropy, context, counts=at["cp_ring"] == at["cp_ulysses"] == 0)

    def _random_keys(self, step: int | None, sample_ids_B: Tensor) -> Tensor | None:
        """Return the keys of random numbers. In evaluation, which has no step, only the choice of drawn experts uses
        keys."""
        if not self.model.spec.draws:
            return None
        step = EVALUATION if step is None else step
        return sample_keys(self.seed, step, self._on_device(sample_ids_B))

    def evaluate(self, batches: Iterable[Batch]) -> Tensor:
        """Return losses per target token over batches sharded over the data ranks, equal on every rank, as (1 + K,):
        next-token loss, then each MTP module's loss; of pairs their loss and `METRICS`. NaN without targets."""
        losses, counts = self.evaluation_sums(batches)
        return losses / counts

    @torch.no_grad()
    def evaluation_sums(self, batches: Iterable[Batch]) -> Tensor:
        """Return the sums of the losses of `evaluate` and the numbers of their target tokens, of shape (2, 1 + K); of
        pairs the sums of their losses and of `METRICS`, and the numbers of pairs, (2, 1 + 4)."""
        self.model.train(False)
        n_modules = self.model.spec.mtp_modules if self.pair_loss is None else len(METRICS)
        losses = self._pair_sums if self.pair_loss is not None else self._ahead_sums if n_modules else self.loss_sum
        sums = torch.zeros(2, 1 + n_modules, dtype=torch.float64, device=self.device)
        remaining = (microbatch for batch in batches for microbatch in self._microbatches(batch, None))
        while microbatches := list(islice(remaining, EVALUATED_TOGETHER)):
            sums[0] += self.model.runner.evaluate(microbatches, losses)
            if self.model.counts_targets:
                counts = [self._n_losses(microbatch) for microbatch in microbatches]
                sums[1] += torch.stack(counts).sum(0)
        self.model.runner.release()
        self.model.sum_over_losses(sums)
        return sums

    def _n_losses(self, microbatch: Microbatch) -> Tensor:
        """Return the targets of a micro-batch on this rank, or its pairs."""
        if self.pair_loss is None:
            return (microbatch.targets_BT != IGNORE).sum((-2, -1))
        assert microbatch.pairs is not None
        n_pairs = len(microbatch.pairs.counts_D) // 2 if self.pair_loss.counts else 0
        return torch.full((), n_pairs, device=self.device)

    def _pair_sums(self, logits_BTV: Tensor, targets_BT: Tensor, pairs: PairTargets) -> Tensor:
        assert self.pair_loss is not None
        return self.pair_loss(logits_BTV, targets_BT, pairs, torch.ones((), device=self.device))

    @torch.no_grad()
    def document_log_probs(self, batches: Iterable[Batch]) -> list[Tensor]:
        """Return the log-probability of each answer of each micro-batch, summed over its targets, (D,) float64, without
        dropout, equal on the ranks that have the same samples."""
        assert self.pair_loss is not None
        self.model.train(False)
        results: list[Tensor] = []
        remaining = (microbatch for batch in batches for microbatch in self._microbatches(batch, None))
        while microbatches := list(islice(remaining, EVALUATED_TOGETHER)):
            sums: list[Tensor] = []

            def collect(logits: Tensor, *targets: Any, sums: list[Tensor] = sums) -> Tensor:
                assert self.pair_loss is not None
                sums.append(self.pair_loss.log_probs(logits, *targets))
                return logits.new_zeros(())

            self.model.runner.evaluate(microbatches, collect)
            counts = [len(microbatch.pairs.counts_D) for microbatch in microbatches if microbatch.pairs is not None]
            flat = torch.cat(sums) if sums else torch.zeros(sum(counts), dtype=torch.float64, device=self.device)
            if self.model.groups.pp is not None:  # one stage has the head
                dist.all_reduce(flat, group=self.model.groups.pp)
            results += flat.split(counts)
        self.model.runner.release()
        return results

    @torch.no_grad()
    def token_log_probs(self, batch: Batch) -> Tensor:
        """Return the log-probability of each target of a batch, (A B, T) float64 in nats, without dropout; 0 where a
        target does not count. Equal on the ranks that have the same samples."""
        self.model.train(False)
        microbatches, parts = self._microbatches(batch, None), list[Tensor]()
        if self.model.spec.mtp_modules:  # only the next token is scored
            microbatches = [micro._replace(ahead_KBT=None, targets_BT=micro.targets_BT[0]) for micro in microbatches]

        def collect(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
            if is_batch_invariant():  # the same function as in generation
                parts.append(self._log_probs(logits_BTV, targets_BT))
            else:
                parts.append(-token_losses(self.cross_entropy, logits_BTV, targets_BT).double())
            return logits_BTV.new_zeros(())

        for first in range(0, len(microbatches), EVALUATED_TOGETHER):
            together = slice(first, first + EVALUATED_TOGETHER)
            with self._replayed(batch, together):
                self.model.runner.evaluate(microbatches[together], collect)
        self.model.runner.release()
        n_tokens = batch.tokens_ABT.shape[-1]
        whole_NT = torch.zeros(batch.sample_ids_AB.numel(), n_tokens, dtype=torch.float64, device=self.device)
        if parts:
            whole_NT[:, self._on_device(self.model.positions(n_tokens))] = torch.cat(parts)
        for group in (self.model.groups.cp_ring, self.model.groups.cp_ulysses, self.model.groups.pp):
            if group is not None:
                dist.all_reduce(whole_NT, group=group)
        return whole_NT

    def _log_probs(self, logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
        """Return the log-probability of each target in float64, of all rows of the vocabulary, 0 for an ignored one."""
        logits_NV = gather_vocabulary(logits_BTV.flatten(0, 1), self.model.spec.vocab_size, self.model.groups.tp)
        counted_BT = targets_BT != IGNORE
        values_N = log_probabilities([logits_NV], targets_BT.where(counted_BT, 0).flatten())
        return values_N.view_as(targets_BT) * counted_BT

    def _ahead_sums(self, logits: Sequence[Tensor], targets_PBT: Tensor) -> Tensor:
        return torch.stack([self.loss_sum(*inputs) for inputs in zip(logits, targets_PBT, strict=True)])
