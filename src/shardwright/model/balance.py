"""Even load for experts: losses on the router, the bias that does without, and the counts that both go by.

Nothing here may depend on how samples are dealt out over ranks and microbatches. What does that for each quantity:

| quantity            | made of                                         | exact because                             |
| ------------------- | ----------------------------------------------- | ----------------------------------------- |
| aux, scope sequence | load and mean scores of the same sequence       | a mean over sequences: parts of it add up; |
|                     |                                                 | so do those of one, by the whole's load   |
| aux, scope batch    | load of the step before, mean scores of this    | linear in the scores: parts of it add up  |
| z-loss              | each token alone                                | a mean over tokens: parts of it add up    |
| selection bias      | load of the whole global batch, after the step  | sums of whole numbers have no rounding    |

The balance loss is a product of two means, of counts and of scores. For the global batch, its gradient in the first
microbatch would need the counts of the last one, which is not known yet, and a product of partial means is another
loss for each layout. So the counts are those of the step before (even, in the first step: no gradient). They have no
gradient themselves, so the gradient has the form of the paper's; it lags by the change of load in one step, as the
selection bias does.

A layer hands its losses to the backward pass itself (`attach`): their gradient enters there, whatever stage or
microbatch the layer runs in, and the loss that the caller sees is the cross-entropy alone. They are means over the
tokens of a forward pass; where that has a part of the global batch, whoever splits the batch scales them
(`parallel/routing.py`).

Shapes: B sequences, T tokens of each, E experts, K experts of a token.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Load(NamedTuple):
    """What a layer's experts were given; parts of it, from microbatches and ranks, add up."""

    counts_E: Tensor
    """Tokens that picked each expert, before any is dropped; int64."""
    dropped: Tensor
    """Pairs of a token and an expert that were dropped; int64 scalar."""
    aux_loss: Tensor
    """The balance loss with its coefficient, as a part of that of the global batch; scalar, 0 without one."""
    z_loss: Tensor
    """The same of the z-loss."""


def max_over_mean(counts_E: Tensor) -> Tensor:
    """The load of the busiest expert beside that of an even share, 1 to E; a scalar."""
    return counts_E.max() * counts_E.numel() / counts_E.sum()


def entropy(counts_E: Tensor) -> Tensor:
    """-sum_i f_i ln f_i of the shares f of the load, beside that of an even load, ln E: 1 is even, 0 one expert for all
    tokens; a scalar."""
    shares_E = counts_E / counts_E.sum()
    return torch.special.entr(shares_E).sum() / math.log(max(2, counts_E.numel()))


def aux_loss(scores_BTE: Tensor, relative_load: Tensor) -> Tensor:
    """sum_i (E f_i) P_i, the mean over sequences; 1 where the load is even.

    f_i is expert i's share of the load, and `relative_load` = E f_i: of each sequence (B, E), or of a batch (E,); no
    gradient. P_i is the mean over tokens of score i divided by the sum of the token's scores, which for a softmax is 1.
    Sources: Switch Transformers, arXiv 2101.03961, equations 4 to 6 (K = 1); GShard, arXiv 2006.16668, algorithm 1; for
    each sequence DeepSeek-V3, arXiv 2412.19437, equations 17 to 20.
    """
    means_BE = (scores_BTE / scores_BTE.sum(-1, keepdim=True)).mean(1)
    return (relative_load.to(means_BE.dtype) * means_BE).sum(-1).mean()


def z_loss(logits_BTE: Tensor) -> Tensor:
    """The mean over tokens of (ln sum_i e^logit_i)^2 (ST-MoE, arXiv 2202.08906, equation 5)."""
    return logits_BTE.logsumexp(-1).square().mean()


def relative_load(counts: Tensor) -> Tensor:
    """Counts (..., E) beside their mean over the experts, E f_i; float64."""
    return counts.double() * counts.shape[-1] / counts.sum(-1, keepdim=True)


def attach(y: Tensor, loss: Tensor) -> Tensor:
    """`y`, with `loss` (a scalar) put into the backward pass beside it: d loss = 1, whatever the gradient of y is."""
    attached: Tensor = _Attach.apply(y, loss)
    return attached


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor) -> Tensor:
        ctx.loss_dtype = loss.dtype
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], torch.ones((), dtype=ctx.loss_dtype, device=grads[0].device)


class Tally:
    """The load of a layer since it was last asked for; what stands in it is on the device."""

    def __init__(self) -> None:
        self._load: Load | None = None

    def record(self, x: Tensor, load: Load) -> None:
        """Add `load` in the backward pass of `x`: once for every microbatch that is learned from, also where its
        forward pass runs a second time, and never for one that is only evaluated."""
        if x.requires_grad:
            x.register_hook(lambda _: self.add(load))

    def add(self, load: Load) -> None:
        """Count more."""
        held = self._load
        self._load = load if held is None else Load(*(a + b for a, b in zip(held, load, strict=True)))

    def take(self) -> Load | None:
        """What was counted, which begins anew; None if there was no backward pass."""
        load, self._load = self._load, None
        return load


@torch.no_grad()
def update_bias(bias_E: Tensor, counts_E: Tensor, rate: float) -> None:
    """In place, b_i += rate * sign(mean count - count_i), with the counts of the whole global batch
    (Wang et al., arXiv 2408.15664, algorithm 1). Compared as whole numbers, E * count_i with the sum."""
    below_E = torch.sign(counts_E.sum() - counts_E * counts_E.numel())
    bias_E.add_(below_E.to(bias_E.dtype), alpha=rate)
