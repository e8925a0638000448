"""Cross-entropy of a micro-batch: of logits that are sharded over tp along the vocabulary, or from the input of the
head for some tokens at a time, so that the logits of a micro-batch are never whole.

The chunked loss computes, for each chunk of C tokens, logits = x W^T, their loss, and the gradients

    dlogits = softmax(logits) - [target]        dx = dlogits W        dW += dlogits^T x

and frees the logits. dx (of all tokens) and dW are kept for the backward pass, which multiplies both by the gradient of
the loss. So W is used in the forward pass alone, and there is nothing to defer in a split backward pass.

Shapes: B batch, T tokens, N tokens of B sequences, C tokens of a chunk, D model, v a rank's rows of the vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.model import matmul
from shardwright.model.transformer import Transformer
from shardwright.parallel.norm import local_part
from shardwright.parallel.tensor import TensorAxis, VocabularyHead


def cross_entropy(
    logits_Nv: Tensor, targets_N: Tensor, rows: range, ignore: int, group: dist.ProcessGroup | None, wanted: bool
) -> tuple[Tensor, Tensor | None]:
    """Cross-entropy summed over the targets that are not `ignore`, a scalar, equal on all ranks of `group`; and, if
    `wanted`, its gradient with respect to the logits, (N, v).

    `rows` are the token ids whose logits this rank holds. The logits are never gathered: the ranks all-reduce, for each
    token, its largest logit, then its sum of exponentials and its target's logit (Shoeybi et al., arXiv 1909.08053,
    section 3). The gradient is made in place of the exponentials. Both results are in fp32 or wider.
    """
    wide = torch.promote_types(logits_Nv.dtype, torch.float32)
    largest_N = logits_Nv.amax(-1).to(wide)
    if group is not None:
        dist.all_reduce(largest_N, dist.ReduceOp.MAX, group=group)
    powers_Nv = (logits_Nv.to(wide) - largest_N[:, None]).exp_()
    own_N = (targets_N >= rows.start) & (targets_N < rows.stop)
    columns_N1 = (targets_N - rows.start).where(own_N, 0)[:, None]
    target_N = (logits_Nv.gather(-1, columns_N1)[:, 0].to(wide) - largest_N) * own_N
    sums_2N = torch.stack((powers_Nv.sum(-1), target_N))
    if group is not None:
        dist.all_reduce(sums_2N, group=group)
    sum_N, target_N = sums_2N.unbind(0)
    counted_N = targets_N != ignore
    total = ((sum_N.log() - target_N) * counted_N).sum()
    if not wanted:
        return total, None
    # d loss / d logit = softmax, minus 1 at the target; 0 for ignored tokens
    gradient_Nv = powers_Nv.mul_((counted_N / sum_N)[:, None])
    gradient_Nv.scatter_add_(-1, columns_N1, -(own_N & counted_N).to(wide)[:, None])
    return total, gradient_Nv


def vocabulary_loss_sum(
    logits_BTv: Tensor, targets_BT: Tensor, rows: range, group: dist.ProcessGroup, ignore: int
) -> Tensor:
    """`cross_entropy` of a micro-batch, differentiable. The forward pass computes the gradient too, while it has the
    exponentials."""
    total: Tensor = _VocabularyLoss.apply(logits_BTv, targets_BT, rows, group, ignore)
    return total


_STRETCH = 2.0**15
"""In fp16 a gradient of the logits, which is between -1 and 1, is saved times this, since probabilities below 6e-8
would become 0, and those below 6e-5 lose digits."""


class _VocabularyLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_BTv: Tensor, targets_BT: Tensor, rows: range, group: dist.ProcessGroup, ignore: int
    ) -> Tensor:
        total, gradient_Nv = cross_entropy(
            logits_BTv.flatten(0, 1), targets_BT.flatten(), rows, ignore, group, ctx.needs_input_grad[0]
        )
        if gradient_Nv is not None:
            ctx.stretch = 1.0
            if logits_BTv.dtype == torch.float16:
                ctx.stretch = _STRETCH
                gradient_Nv.mul_(_STRETCH)
            ctx.save_for_backward(gradient_Nv.to(logits_BTv.dtype).view_as(logits_BTv))
        return total

    @staticmethod
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient_BTv,) = ctx.saved_tensors
        # Rounding the factor 1 / targets to 16 bits would scale every gradient wrongly, so only the product is rounded.
        dlogits_BTv = gradient_BTv.to(dtotal.dtype).mul_(dtotal / ctx.stretch).to(gradient_BTv.dtype)
        return dlogits_BTv, None, None, None, None


class ChunkedLoss:
    """The head and the loss of a model, `n_tokens` tokens at a time; without `axis` the vocabulary is not sharded."""

    def __init__(
        self, model: Transformer, rows: range, axis: TensorAxis | None, n_tokens: int, ignore: int, compiled: bool
    ) -> None:
        """`model`: the whole model or the last stage; `rows`, `ignore`: as of `cross_entropy`; `compiled`: the
        operations between the matmuls with torch.compile, unless they have collectives."""
        self.model, self.axis, self.n_tokens = model, axis, n_tokens
        self.factor: Tensor | None = None
        """What the gradient of the loss will be multiplied by in the backward pass, if known: in fp16 the gradients,
        which the forward pass computes, are multiplied by it before they are rounded."""
        group = None if axis is None else axis.group
        of_chunk = torch.compile(cross_entropy) if compiled and axis is None else cross_entropy
        self.of_chunk: Callable[..., tuple[Tensor, Tensor | None]] = partial(
            of_chunk, rows=rows, ignore=ignore, group=group
        )

    def __call__(self, x_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        """Cross-entropy summed over the targets that count, a scalar. `x_BTD`: the input of the head, all tokens
        (B, T, D) or a token shard of them."""
        head = self.model.head
        weight = head.matrix if isinstance(head, VocabularyHead) else (head or self.model.embedding).weight
        total: Tensor = _ChunkedLoss.apply(x_BTD, local_part(weight), targets_BT, self, torch.is_grad_enabled())
        return total


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BTD: Tensor, weight_vD: Tensor, targets_BT: Tensor, loss: ChunkedLoss, wanted: bool
    ) -> Tensor:
        axis = loss.axis
        if axis is not None and axis.token_shards:
            x_BTD = axis.start_gather(x_BTD).wait()
        wide = torch.promote_types(x_BTD.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=x_BTD.device)
        # Contiguous, so that its chunks are views of it: gathered token shards may not be.
        dx_BTD = torch.zeros_like(x_BTD, memory_format=torch.contiguous_format) if wanted else x_BTD
        dweight_vD = torch.zeros_like(weight_vD, dtype=wide) if wanted else weight_vD
        chunks = [
            tensor.split(loss.n_tokens) for tensor in (x_BTD.flatten(0, 1), targets_BT.flatten(), dx_BTD.flatten(0, 1))
        ]
        summing = None
        for at, (x_CD, targets_C, dx_CD) in enumerate(zip(*chunks, strict=True), start=1):
            part, dlogits_Cv = loss.of_chunk(matmul.forward(x_CD, weight_vD), targets_C, wanted=wanted)
            total += part
            if dlogits_Cv is None:
                continue
            if loss.factor is not None:
                dlogits_Cv = dlogits_Cv * loss.factor
            dlogits_Cv = dlogits_Cv.to(x_CD.dtype)
            matmul.input_gradient(dlogits_Cv, weight_vD, add_to=dx_CD)
            if axis is not None and at == len(chunks[0]):
                summing = axis.start_sum(dx_BTD)  # overlaps with the last weight gradient
            matmul.weight_gradient(dlogits_Cv, x_CD, add_to=dweight_vD)
            del dlogits_Cv  # before the next logits exist
        if wanted:
            ctx.save_for_backward(dx_BTD if summing is None else summing.wait(), dweight_vD)
            ctx.dtype, ctx.factor = weight_vD.dtype, loss.factor
        return total

    @staticmethod
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor | None, ...]:
        dx_BTD, dweight_vD = ctx.saved_tensors
        if ctx.factor is not None:
            dtotal = dtotal / ctx.factor
        # As above, only the products are rounded.
        return (
            dx_BTD.to(dtotal.dtype).mul_(dtotal).to(dx_BTD.dtype),
            dweight_vD.mul_(dtotal).to(ctx.dtype),
            None,
            None,
            None,
        )
