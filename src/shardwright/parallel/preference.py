"""The loss of pairs of answers: DPO, IPO and SimPO, on any layout.

    pi_d, ref_d    sum of the log-probabilities of the target tokens of answer d, by the model and by the reference
    n_d            number of target tokens of answer d
    r_d            pi_d - ref_d for DPO, (pi_d - ref_d) / n_d for IPO, pi_d / n_d for SimPO
    h              r_chosen - r_rejected

    DPO     -log sigmoid(beta h)              Rafailov et al., arXiv 2305.18290, equation 7
    IPO     (h - 1 / (2 beta))^2              Azar et al., arXiv 2310.12036, equation 17; mean over tokens as in TRL
    SimPO   -log sigmoid(beta h - gamma)      Meng et al., arXiv 2405.14734, equation 6

A pair lies in one sequence, and attention stays within its two documents. With cp a rank has some tokens of a document:
sums over documents are all-reduced, and each rank computes the loss of the whole pair and the gradient of its tokens.

Shapes: B sequences, T tokens of a rank, P pairs of a micro-batch, D = 2 P documents, v a rank's rows of the vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardwright.config.sections import PreferenceSection
from shardwright.parallel.loss import CrossEntropy, token_losses
from shardwright.parallel.microbatch import PairTargets

METRICS = ("margin", "accuracy", "chosen_reward", "rejected_reward")
"""The numbers of a step next to its loss, means over the pairs of the global batch: beta h; the share of pairs with
h > 0; beta r of both answers."""


class PairLoss:
    """The loss of the pairs of a micro-batch on this rank, which has the head."""

    def __init__(
        self, section: PreferenceSection, loss_of: CrossEntropy, context: Sequence[dist.ProcessGroup], counts: bool
    ) -> None:
        """`loss_of`: the cross-entropy of each token. `context`: groups over which the tokens of a sequence are
        partitioned. `counts`: whether this rank's losses are part of the sum over ranks; one rank of `context` does."""
        self.section, self.loss_of, self.context, self.counts = section, loss_of, context, counts

    def __call__(self, logits_BTv: Tensor, targets_BT: Tensor, pairs: PairTargets, factor: Tensor) -> Tensor:
        """Return the loss and `METRICS`, (1 + 4,), summed over pairs and multiplied by `factor`. Only the loss has a
        gradient."""
        policy_D = self.log_probs(logits_BTv, targets_BT, pairs)
        losses_P, metrics_4P = pair_losses(self.section, policy_D, pairs.reference_D, pairs.counts_D)
        loss = losses_P.sum() * factor
        if not self.counts:
            loss = loss - loss.detach()  # the gradient of this rank's tokens alone
        metrics_4 = metrics_4P.detach().sum(1) * factor * self.counts
        return torch.cat([loss[None], metrics_4])

    def log_probs(self, logits_BTv: Tensor, targets_BT: Tensor, pairs: PairTargets) -> Tensor:
        """Return the log-probability of each document, summed over its target tokens, (D,) float64, on all ranks of
        `context`."""
        losses_N = token_losses(self.loss_of, logits_BTv, targets_BT).flatten().double()
        sums = losses_N.new_zeros(len(pairs.counts_D) + 1)
        sums = sums.index_add(0, pairs.documents_BT.flatten(), -losses_N)
        for group in self.context:
            sums = _SumOverContext.apply(sums, group)
        return sums[:-1]


def pair_losses(
    section: PreferenceSection, policy_D: Tensor, reference_D: Tensor, counts_D: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the loss of each pair, (P,), and its `METRICS`, (4, P)."""
    rewards_D = policy_D - reference_D
    if section.kind != "dpo":
        rewards_D = rewards_D / counts_D.clamp(min=1)
    chosen_P, rejected_P = rewards_D[0::2], rewards_D[1::2]
    margin_P = chosen_P - rejected_P
    if section.kind == "ipo":
        losses_P = (margin_P - 1 / (2 * section.beta)).square()
    else:
        gamma = section.gamma if section.kind == "simpo" else 0.0
        losses_P = -F.logsigmoid(section.beta * margin_P - gamma)
    beta = section.beta
    return losses_P, torch.stack([beta * margin_P, (margin_P > 0).double(), beta * chosen_P, beta * rejected_P])


class _SumOverContext(torch.autograd.Function):
    """All-reduce in the forward pass. Every rank then computes the same loss, so each has the whole gradient of the
    sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor, None]:
        return dtotal, None
