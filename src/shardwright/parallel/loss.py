"""Vocabulary-parallel cross-entropy: the logits are sharded over tp along the vocabulary.

Shapes: B batch, T tokens, v a rank's rows of the vocabulary.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def vocabulary_loss_sum(
    logits_BTv: Tensor, targets_BT: Tensor, rows: range, group: dist.ProcessGroup, ignore: int
) -> Tensor:
    """Cross-entropy summed over the targets that are not `ignore`; a scalar, equal on all ranks of `group`.

    `rows` are the token ids whose logits this rank holds. The logits are never gathered: the ranks all-reduce, for each
    token, its largest logit, then its sum of exponentials and its target's logit (Shoeybi et al., arXiv 1909.08053,
    section 3). The forward pass computes the gradient too, while it has the exponentials. All sums are in fp32 or
    wider.
    """
    total: Tensor = _VocabularyLoss.apply(logits_BTv, targets_BT, rows, group, ignore)
    return total


class _VocabularyLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_BTv: Tensor, targets_BT: Tensor, rows: range, group: dist.ProcessGroup, ignore: int
    ) -> Tensor:
        wide = torch.promote_types(logits_BTv.dtype, torch.float32)
        largest_BT = logits_BTv.amax(-1).to(wide)
        dist.all_reduce(largest_BT, dist.ReduceOp.MAX, group=group)
        powers_BTv = (logits_BTv.to(wide) - largest_BT[..., None]).exp_()
        own_BT = (targets_BT >= rows.start) & (targets_BT < rows.stop)
        columns_BT1 = (targets_BT - rows.start).where(own_BT, 0)[..., None]
        target_BT = (logits_BTv.gather(-1, columns_BT1)[..., 0].to(wide) - largest_BT) * own_BT
        sums_2BT = torch.stack((powers_BTv.sum(-1), target_BT))
        dist.all_reduce(sums_2BT, group=group)
        sum_BT, target_BT = sums_2BT.unbind(0)
        counted_BT = targets_BT != ignore
        if ctx.needs_input_grad[0]:
            # d loss / d logit = softmax, minus 1 at the target; 0 for ignored tokens
            gradient_BTv = powers_BTv.mul_((counted_BT / sum_BT)[..., None])
            gradient_BTv.scatter_add_(-1, columns_BT1, -(own_BT & counted_BT).to(wide)[..., None])
            ctx.save_for_backward(gradient_BTv.to(logits_BTv.dtype))
        return ((sum_BT.log() - target_BT) * counted_BT).sum()

    @staticmethod
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient_BTv,) = ctx.saved_tensors
        # Rounding the factor 1 / targets to 16 bits would scale every gradient wrongly, so only the product is rounded.
        dlogits_BTv = gradient_BTv.to(dtotal.dtype).mul_(dtotal).to(gradient_BTv.dtype)
        return dlogits_BTv, None, None, None, None
