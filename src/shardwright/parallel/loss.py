"""Cross-entropy of a micro-batch: from logits that are sharded over tp along the vocabulary, or from the head's input
for some tokens at a time, so that the logits of a micro-batch are never all in memory.

The gradient of the logits is computed in the forward pass, in their own memory. The chunked loss computes, for each
chunk of C tokens, logits = x W^T, their loss, and the gradients

    dlogits = softmax(logits) - [target]        dx = dlogits W        dW += dlogits^T x

and frees the logits. dx (of all tokens) and dW are kept for the backward pass, which multiplies both by the gradient of
the loss. So W is used in the forward pass alone, and a split backward pass has nothing to defer.

Shapes: B batch, T tokens, N tokens of B sequences, C tokens of a chunk, D model, v a rank's rows of the vocabulary, V
vocabulary, W wanted tokens.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardwright.model import matmul
from shardwright.model.device_type import device_type
from shardwright.model.transformer import Transformer
from shardwright.parallel.norm import local_part
from shardwright.parallel.tensor import TensorAxis, VocabularyHead
from shardwright.split.compression import LOGITS_TOGETHER, LOGITS_TOGETHER_ON_GPU
from shardwright.split.tensor import vocabulary_rows
from shardwright.system.torch_private import all_gather_single


def cross_entropy(
    logits_Nv: Tensor,
    targets_N: Tensor,
    factor: Tensor | None,
    *,
    rows: range,
    ignore: int,
    group: dist.ProcessGroup | None,
) -> Tensor:
    """Return the cross-entropy of each target, 0 for an `ignore`d one, (N,) in fp32 or wider, equal on all ranks of
    `group`. With a `factor` in that type, a scalar or (N, 1), the gradient of the sum of factor x loss overwrites
    the logits.

    `rows` are the token ids whose logits this rank holds. The logits are never gathered: the ranks all-reduce, for each
    token, its largest logit, then its sum of exponentials and its target's logit (Shoeybi et al., arXiv 1909.08053,
    section 3). Logits of 16 bits are raised to fp32 some tokens at a time, and their gradient is rounded once.
    """
    n_together = len(logits_Nv) if torch.compiler.is_compiling() else _n_together(logits_Nv)
    wide = torch.promote_types(logits_Nv.dtype, torch.float32)
    largest_N = logits_Nv.amax(-1).to(wide)
    if group is not None:
        dist.all_reduce(largest_N, dist.ReduceOp.MAX, group=group)
    own_N = (targets_N >= rows.start) & (targets_N < rows.stop)
    columns_N1 = (targets_N - rows.start).where(own_N, 0)[:, None]
    target_N = (logits_Nv.gather(-1, columns_N1)[:, 0].to(wide) - largest_N) * own_N
    counted_N = targets_N != ignore
    in_place = factor is not None and logits_Nv.dtype == wide
    gradient = None
    if factor is not None:
        at_target_N1 = -factor * (own_N & counted_N)[:, None]
        gradient = partial(_overwrite, _split(n_together, logits_Nv, columns_N1, at_target_N1), in_place)
    weights_N1 = counted_N[:, None] if factor is None else factor * counted_N[:, None]
    kept, sums = [], []
    for logits_Pv, largest_P1, weights_P1 in _split(n_together, logits_Nv, largest_N[:, None], weights_N1):
        powers_Pv = _powers(logits_Pv, largest_P1, in_place)
        sums.append(powers_Pv.sum(-1))
        if gradient is not None and group is None:
            gradient(powers_Pv, weights_P1 / sums[-1][:, None])
        elif in_place or len(logits_Nv) <= n_together:
            kept.append(powers_Pv)
        del powers_Pv  # before the next ones exist
    sum_N = torch.cat(sums)
    if group is not None:
        sums_2N = torch.stack((sum_N, target_N))
        dist.all_reduce(sums_2N, group=group)
        sum_N, target_N = sums_2N.unbind(0)
        if gradient is not None:
            parts = _split(n_together, logits_Nv, largest_N[:, None], weights_N1 / sum_N[:, None])
            for i, (logits_Pv, largest_P1, scale_P1) in enumerate(parts):
                gradient(kept[i] if kept else _powers(logits_Pv, largest_P1, in_place), scale_P1)
    return (sum_N.log() - target_N) * counted_N


_ROWS_TOGETHER = 1024
"""Rows of logits whose log-probabilities are computed in float64 at a time."""


def log_probabilities(logits: Sequence[Tensor], tokens_N: Tensor) -> Tensor:
    """Return the log-probability of each token in nats, (N,) float64, from logits (W, V) that together have N rows: the
    model's own distribution, without temperature."""
    rows = [part_WV for logits_WV in logits for part_WV in logits_WV.split(_ROWS_TOGETHER)]
    tokens = tokens_N.to(rows[0].device).split([len(part_WV) for part_WV in rows])
    return torch.cat(
        [
            part_WV.double().log_softmax(-1).gather(1, tokens_W[:, None])[:, 0]
            for part_WV, tokens_W in zip(rows, tokens, strict=True)
        ]
    )


def gather_vocabulary(logits_Wv: Tensor, size: int, group: dist.ProcessGroup | None) -> Tensor:
    """All-gather logits over tp; (W, v) -> (W, V) for a vocabulary of `size` rows."""
    if group is None:
        return logits_Wv
    rows = len(vocabulary_rows(size, group.size(), 0))
    own_Wv = F.pad(logits_Wv, (0, rows - logits_Wv.shape[1])).contiguous()
    gathered_nWv = own_Wv.new_empty(group.size(), *own_Wv.shape)
    all_gather_single(gathered_nWv.flatten(0, 1), own_Wv, group=group)
    return gathered_nWv.transpose(0, 1).flatten(1)[:, :size]


def _overwrite(parts: Iterator[tuple[Tensor, ...]], in_place: bool, powers_Pv: Tensor, scale_P1: Tensor) -> None:
    """Overwrite the next logits of `parts` with their gradient: d loss / d logit = softmax, minus 1 at the target; 0
    for ignored tokens."""
    logits_Pv, columns_P1, at_target_P1 = next(parts)
    powers_Pv.mul_(scale_P1).scatter_add_(-1, columns_P1, at_target_P1)
    if not in_place:
        logits_Pv.copy_(powers_Pv)


def _n_together(logits_Nv: Tensor) -> int:
    """Return the number of tokens whose logits are raised to fp32 at a time."""
    together = LOGITS_TOGETHER if device_type(logits_Nv) == "cpu" else LOGITS_TOGETHER_ON_GPU
    return max(1, together // logits_Nv.shape[-1])


def _split(n_tokens: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Return an iterator of views of the same tokens of each tensor, `n_tokens` at a time."""
    return zip(*(tensor.split(n_tokens) for tensor in tensors), strict=True)


def _powers(logits_Pv: Tensor, largest_P1: Tensor, in_place: bool) -> Tensor:
    """Return exp(logits - largest) in the type of `largest_P1`."""
    if in_place:
        return logits_Pv.sub_(largest_P1).exp_()
    # One kernel widens and subtracts on a GPU; a CPU would widen into a second tensor next to the difference.
    if logits_Pv.dtype == largest_P1.dtype or device_type(logits_Pv) == "cuda":
        return (logits_Pv - largest_P1).exp_()
    return logits_Pv.to(largest_P1.dtype).sub_(largest_P1).exp_()


CrossEntropy = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""`cross_entropy` with rows, ignored targets and group bound."""


def bound(rows: range, ignore: int, group: dist.ProcessGroup | None, compiled: bool) -> CrossEntropy:
    """Bind these arguments to `cross_entropy`; `compiled`: with torch.compile, unless the loss has collectives."""
    loss_of = torch.compile(cross_entropy) if compiled and group is None else cross_entropy
    whole = partial(loss_of, rows=rows, ignore=ignore, group=group)
    return partial(_in_parts, whole) if compiled and group is None else whole


def _in_parts(loss_of: CrossEntropy, logits_Nv: Tensor, targets_N: Tensor, factor: Tensor | None) -> Tensor:
    """Return the losses, computed for some tokens at a time; a compiled `loss_of` keeps its logits in fp32 twice."""
    n_tokens, n_together = len(logits_Nv), _n_together(logits_Nv)
    if n_tokens <= n_together:
        return loss_of(logits_Nv, targets_N, factor)
    least = math.ceil(n_tokens / n_together)
    # Parts of one size are compiled once, so up to twice as many parts are used if all then have one size.
    n_parts = next((n for n in range(least, 2 * least) if n_tokens % n == 0), least)
    of_part = math.ceil(n_tokens / n_parts)
    factors = [factor] * n_parts if factor is None or not factor.dim() else factor.split(of_part)
    parts = zip(logits_Nv.split(of_part), targets_N.split(of_part), factors, strict=False)
    return torch.cat([loss_of(*part) for part in parts])


def loss_sum(loss_of: CrossEntropy, logits_BTv: Tensor, targets_BT: Tensor, factor: Tensor | None = None) -> Tensor:
    """Return the loss of a micro-batch, differentiable. The forward pass overwrites the logits with their
    gradient, because it has the exponentials then. `factor`, a scalar in fp32 or wider: the gradient of the loss in the
    backward pass, if known; the gradient of 16-bit logits is then rounded once, after this multiplication."""
    total: Tensor = _LossFunction.apply(logits_BTv, targets_BT, loss_of, factor)
    return total


class _LossFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_BTv: Tensor, targets_BT: Tensor, loss_of: CrossEntropy, factor: Tensor | None
    ) -> Tensor:
        logits_Nv, wanted = logits_BTv.detach().flatten(0, 1), ctx.needs_input_grad[0]
        if wanted:
            factor = _factor(factor, logits_BTv)
            ctx.shape = logits_BTv.shape
            ctx.save_for_backward(logits_Nv, factor)
        return loss_of(logits_Nv, targets_BT.flatten(), factor if wanted else None).sum()

    @staticmethod
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor | None, ...]:
        dlogits_Nv, factor = ctx.saved_tensors
        _multiply(dlogits_Nv, dtotal / factor)
        return dlogits_Nv.view(ctx.shape), None, None, None


def token_losses(loss_of: CrossEntropy, logits_BTv: Tensor, targets_BT: Tensor) -> Tensor:
    """Return the loss `loss_of` each target, (B, T), differentiable. The backward pass overwrites the logits with their
    gradient."""
    losses_BT: Tensor = _TokenLossFunction.apply(logits_BTv, targets_BT, loss_of)
    return losses_BT


class _TokenLossFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_BTv: Tensor, targets_BT: Tensor, loss_of: CrossEntropy) -> Tensor:
        ctx.loss_of, ctx.shape = loss_of, logits_BTv.shape
        logits_Nv = logits_BTv.detach().flatten(0, 1)
        ctx.save_for_backward(logits_Nv, targets_BT)
        return loss_of(logits_Nv, targets_BT.flatten(), None).view_as(targets_BT)

    @staticmethod
    def backward(ctx: Any, dlosses_BT: Tensor) -> tuple[Tensor | None, ...]:
        logits_Nv, targets_BT = ctx.saved_tensors
        ctx.loss_of(logits_Nv, targets_BT.flatten(), dlosses_BT.reshape(-1, 1))
        return logits_Nv.view(ctx.shape), None, None


def _factor(known: Tensor | None, x: Tensor) -> Tensor:
    """Return the factor of a gradient that is computed in the forward pass: the `known` one, otherwise 1."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.ones((), dtype=wide, device=x.device) if known is None else known.to(wide)


def _multiply(x_Nv: Tensor, ratio: Tensor) -> None:
    """Multiply in place. If the factor was known the ratio is 1 and nothing is rounded. Otherwise only the products are
    rounded, not the ratio, whose error would be in every gradient."""
    if x_Nv.dtype == ratio.dtype:
        x_Nv.mul_(ratio)
        return
    for x_Pv in x_Nv.split(_n_together(x_Nv)):
        x_Pv.copy_(x_Pv.to(ratio.dtype).mul_(ratio))


class ChunkedLoss:
    """The head and the loss of a model, `n_tokens` tokens at a time; without `axis` the vocabulary is not sharded."""

    def __init__(
        self, model: Transformer, rows: range, axis: TensorAxis | None, n_tokens: int, ignore: int, compiled: bool
    ) -> None:
        """`model`: the whole model or the last stage; `rows`, `ignore`: see `cross_entropy`; `compiled`: the operations
        between the matmuls use torch.compile, unless they have collectives."""
        self.model, self.axis, self.n_tokens = model, axis, n_tokens
        of_chunk = bound(rows, ignore, None if axis is None else axis.group, compiled)
        softcap = model.spec.logit_softcap
        self.of_chunk = partial(_capped, of_chunk, softcap) if softcap else of_chunk

    def __call__(self, x_BTD: Tensor, targets_BT: Tensor, factor: Tensor | None = None) -> Tensor:
        """Return the cross-entropy summed over the targets that count, a scalar. `x_BTD`: the head's input, all tokens
        (B, T, D) or a token shard of them; `factor`: see `loss_sum`."""
        head = self.model.head
        weight = head.matrix if isinstance(head, VocabularyHead) else (head or self.model.embedding).weight
        factor = _factor(factor, x_BTD) if torch.is_grad_enabled() else None
        total: Tensor = _ChunkedLossFunction.apply(x_BTD, local_part(weight), targets_BT, self, factor)
        return total


def _capped(
    loss_of: CrossEntropy, softcap: float, logits_Cv: Tensor, targets_C: Tensor, factor: Tensor | None
) -> Tensor:
    """Return the loss of softcap tanh(logits / softcap). With a `factor`, the gradient of the logits before the cap
    overwrites them."""
    tanh_Cv = logits_Cv.div_(softcap).tanh_().clone()
    loss = loss_of(logits_Cv.mul_(softcap), targets_C, factor)
    if factor is not None:
        logits_Cv.mul_(tanh_Cv.square_().neg_().add_(1))
    return loss


class _ChunkedLossFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BTD: Tensor, weight_vD: Tensor, targets_BT: Tensor, loss: ChunkedLoss, factor: Tensor | None
    ) -> Tensor:
        axis, wanted = loss.axis, factor is not None
        if axis is not None and axis.token_shards:
            x_BTD = axis.start_gather(x_BTD).wait()
        wide = torch.promote_types(x_BTD.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=x_BTD.device)
        # Contiguous, so that its chunks are views; gathered token shards may not be contiguous.
        dx_BTD = torch.zeros_like(x_BTD, memory_format=torch.contiguous_format) if wanted else x_BTD
        dweight_vD = torch.zeros_like(weight_vD, dtype=wide) if wanted else weight_vD
        chunks = [
            tensor.split(loss.n_tokens) for tensor in (x_BTD.flatten(0, 1), targets_BT.flatten(), dx_BTD.flatten(0, 1))
        ]
        summing = None
        for at, (x_CD, targets_C, dx_CD) in enumerate(zip(*chunks, strict=True), start=1):
            dlogits_Cv = matmul.forward(x_CD, weight_vD)
            total += loss.of_chunk(dlogits_Cv, targets_C, factor).sum()  # which overwrites logits with their gradient
            if not wanted:
                continue
            matmul.input_gradient(dlogits_Cv, weight_vD, add_to=dx_CD)
            if axis is not None and at == len(chunks[0]):
                summing = axis.start_sum(dx_BTD)  # overlaps with the last weight gradient
            matmul.weight_gradient(dlogits_Cv, x_CD, add_to=dweight_vD)
            del dlogits_Cv  # before the next logits exist
        if wanted:
            ctx.save_for_backward(dx_BTD if summing is None else summing.wait(), dweight_vD, factor)
            ctx.dtype = weight_vD.dtype
        return total

    @staticmethod
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor | None, ...]:
        dx_BTD, dweight_vD, factor = ctx.saved_tensors
        ratio = dtotal / factor
        _multiply(dx_BTD.flatten(0, 1), ratio)
        return dx_BTD, dweight_vD.mul_(ratio).to(ctx.dtype), None, None, None
