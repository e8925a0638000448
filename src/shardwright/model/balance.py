"""Load balancing of experts: the balance loss and the z-loss of a router, its selection bias, and the load counts.

None of these may depend on how samples are assigned to ranks and micro-batches. The reason for each:

| quantity            | computed from                                  | independent of the layout because             |
| ------------------- | ---------------------------------------------- | ----------------------------------------------|
| aux, scope sequence | load and mean scores of the same sequence      | a mean over sequences; within one, linear in  |
|                     |                                                | the scores, with its whole load               |
| aux, scope batch    | load of the previous step, mean scores of this | linear in the scores: partial means add up    |
| z-loss              | each token on its own                          | a mean over tokens: partial means add up      |
| selection bias      | load of the whole global batch, after the step | integer sums have no rounding                 |

The balance loss is a product of two means, of counts and of scores. Over the global batch its gradient in the first
micro-batch would need the counts of the last one, which are not known yet, and a product of partial means would be a
different loss for each layout. So scope batch uses the counts of the previous step (in the first step a uniform load,
which has no gradient). Counts have no gradient, so the gradient has the paper's form; it lags by one step, like the
selection bias.

A layer adds its losses in its own backward pass (`attach`), in any stage and for any micro-batch, so the loss that the
caller sees is the cross-entropy alone. The losses are means over the tokens of a forward pass; `parallel/routing.py`
scales them by the forward pass's fraction of the global batch. Padding has weight 0 in these means, and real tokens
weigh more in proportion (`RealTokens`), so that the sums are means over real tokens: over a sequence's in the balance
loss, over the global batch's in the z-loss. No number depends on the amount of padding.

Shapes: B sequences, T tokens of each, E experts, K experts of a token.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor


class RealTokens(NamedTuple):
    """The numbers of tokens that are not padding. The real tokens of a sequence come first; padding follows them. A
    router gives no expert to padding and leaves it out of counts, capacity and losses."""

    counts_B: Tensor
    """Real tokens of each whole sequence of the micro-batch; int64."""
    total: Tensor
    """Real tokens of the global batch; int64 scalar."""
    seq_len: int
    """Tokens of a whole sequence, padding included."""
    n_sequences: int
    """Sequences of the global batch."""

    def mask(self, positions_T: Tensor) -> Tensor:
        """Return whether the tokens at these positions of their sequences, (T,) or (B, T), are real; (B, T)."""
        return positions_T < self.counts_B.unsqueeze(1)

    def weights(self) -> tuple[Tensor, Tensor]:
        """Return the weights of a real token in the balance loss, (B, 1), and in the z-loss, a scalar; float64. With
        weight 0 for padding their mean is 1: over each sequence in the balance loss, over the global batch in the
        z-loss."""
        aux_B1 = self.seq_len / self.counts_B.double().clamp(min=1).unsqueeze(1)
        return aux_B1, self.n_sequences * self.seq_len / self.total.double()


class LayerLoad(NamedTuple):
    """The load of a layer's experts, and its losses; the values of micro-batches and ranks are summed."""

    counts_E: Tensor
    """Tokens that picked each expert, before any is dropped; int64."""
    dropped: Tensor
    """Pairs of a token and an expert that were dropped; int64 scalar."""
    aux_loss: Tensor
    """The balance loss with its coefficient, scaled to its part of the global batch; scalar, 0 if it is off."""
    z_loss: Tensor
    """The z-loss, scaled likewise."""


def max_over_mean(counts_E: Tensor) -> Tensor:
    """Return the load of the busiest expert divided by the mean load, 1 to E; a scalar."""
    return counts_E.max() * counts_E.numel() / counts_E.sum()


def entropy(counts_E: Tensor) -> Tensor:
    """Return the entropy -sum_i f_i ln f_i of the load's fractions f, divided by its maximum ln E: 1 for a uniform
    load, 0 if one expert gets all tokens; a scalar."""
    fractions_E = counts_E / counts_E.sum()
    return torch.special.entr(fractions_E).sum() / math.log(max(2, counts_E.numel()))


def aux_loss(scores_BTE: Tensor, relative_load: Tensor, weights_BT: Tensor | None = None) -> Tensor:
    """Return sum_i (E f_i) P_i, the mean over sequences; 1 for a uniform load.

    f_i is expert i's fraction of the load, and `relative_load` = E f_i: of each sequence (B, E), or of a batch (E,); no
    gradient. P_i is the mean over tokens of score i divided by the sum of the token's scores (1 for a softmax), times
    the token's weight with `weights_BT`.
    Sources: Switch Transformers, arXiv 2101.03961, equations 4 to 6 (K = 1); GShard, arXiv 2006.16668, algorithm 1; for
    each sequence DeepSeek-V3, arXiv 2412.19437, equations 17 to 20.
    """
    fractions_BTE = scores_BTE / scores_BTE.sum(-1, keepdim=True)
    if weights_BT is not None:
        fractions_BTE = fractions_BTE * weights_BT.to(fractions_BTE.dtype).unsqueeze(-1)
    means_BE = fractions_BTE.mean(1)
    return (relative_load.to(means_BE.dtype) * means_BE).sum(-1).mean()


def z_loss(logits_BTE: Tensor, weights_BT: Tensor | None = None) -> Tensor:
    """Return the mean over tokens of (ln sum_i e^logit_i)^2 (ST-MoE, arXiv 2202.08906, equation 5), times the token's
    weight with `weights_BT`."""
    squares_BT = logits_BTE.logsumexp(-1).square()
    return (squares_BT if weights_BT is None else squares_BT * weights_BT.to(squares_BT.dtype)).mean()


def relative_load(counts: Tensor) -> Tensor:
    """Return counts (..., E) divided by their mean over the experts, E f_i; float64."""
    return counts.double() * counts.shape[-1] / counts.sum(-1, keepdim=True)


def attach(y: Tensor, loss: Tensor) -> Tensor:
    """Return `y`, and add `loss` (a scalar) to the backward pass of y: loss gets gradient 1 for any gradient of y."""
    attached: Tensor = _AttachLossFunction.apply(y, loss)
    return attached


class _AttachLossFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor) -> Tensor:
        ctx.loss_dtype = loss.dtype
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], torch.ones((), dtype=ctx.loss_dtype, device=grads[0].device)


class Tally:
    """Accumulates the load of a layer over micro-batches, on the device."""

    def __init__(self) -> None:
        self._load: LayerLoad | None = None
        self.copies = False
        """Whether the next micro-batch overwrites the load of this one, as CUDA graphs do."""

    def record(self, x: Tensor, load: LayerLoad) -> None:
        """Add `load` in the backward pass of `x`: once for every training micro-batch, even if its forward pass is
        recomputed, and never in evaluation."""
        if x.requires_grad:
            x.register_hook(lambda _: self.add(load))

    def add(self, load: LayerLoad) -> None:
        load_sum = self._load
        if load_sum is None:
            self._load = LayerLoad(*(part.clone() for part in load)) if self.copies else load
            return
        self._load = LayerLoad(*(a + b for a, b in zip(load_sum, load, strict=True)))

    def take(self) -> LayerLoad | None:
        """Return the sum and reset it; None if there was no backward pass."""
        load, self._load = self._load, None
        return load


@torch.no_grad()
def update_bias(bias_E: Tensor, counts_E: Tensor, rate: float) -> None:
    """Add rate * sign(mean count - count_i) to each b_i, in place, with the counts of the whole global batch
    (Wang et al., arXiv 2408.15664, algorithm 1). The comparison of the integers E * count_i and their sum is exact."""
    below_E = torch.sign(counts_E.sum() - counts_E * counts_E.numel())
    bias_E.add_(below_E.to(bias_E.dtype), alpha=rate)
