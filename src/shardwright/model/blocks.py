"""Attention of a block of queries to a block of keys, and the merge of the outputs of several blocks of keys.

For each block of keys the kernel gives an output and the log-sum-exp of its scores (lse). The output over two blocks
is the mean of their outputs, weighted by exp(lse). The gradient of a block is exact and needs no other block when the
kernel is given the output and the lse over *all* keys (FlashAttention-2, arXiv 2307.08691, section 3.2):

    s = q k^T / sqrt(C)      p = exp(s - lse)      dv = p^T do      ds = p * (do v^T - sum_C(do * o))
    dq = ds k / sqrt(C)      dk = ds^T q / sqrt(C)

Shapes: B batch, T queries, S keys, H heads, K kv heads (K divides H), G = H / K, C width of one head.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from shardwright.model import varlen
from shardwright.model.device_type import device_type
from shardwright.model.pieces import ROWS_TOGETHER, AttentionPiece, refuses_flash
from shardwright.system.torch_private import (
    flash_attention_cpu,
    flash_attention_cpu_backward,
    flash_attention_cuda,
    flash_attention_cuda_backward,
)

Mask = bool | Tensor
"""Whether a block is causal, or the scores that are not hidden, (T, S)."""


class Kernel(NamedTuple):
    """An attention op that returns the log-sum-exp, and its backward op, which takes one.

    A causal block is square. lse is in fp32, or in fp64 for fp64 inputs; all other results have the type of the inputs.
    """

    attend: Callable[[Tensor, Tensor, Tensor, Mask], tuple[Tensor, Tensor]]
    """q_BHTC, k_BKSC, v_BKSC, mask -> o_BHTC, lse_BHT"""
    gradient: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Mask], tuple[Tensor, Tensor, Tensor]]
    """do_BHTC, q_BHTC, k_BKSC, v_BKSC, o_BHTC, lse_BHT, mask -> dq_BHTC, dk_BKSC, dv_BKSC"""


def kernel_for(q_BHTC: Tensor, softcap: float = 0.0) -> Kernel:
    """Return the kernel for the device, dtype and head width of the queries; no other code chooses one. With a
    `softcap` scores s are softcap tanh(s / softcap)."""
    if softcap:
        return Kernel(partial(_rows_attend, softcap=softcap), partial(_rows_gradient, softcap=softcap))
    if device_type(q_BHTC) == "cpu":
        return FLASH_CPU
    return FLASH_CUDA if refuses_flash(q_BHTC.element_size(), q_BHTC.shape[-1]) is None else ROWS


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which partial results are summed: fp32 or wider."""
    return torch.promote_types(dtype, torch.float32)


def merge(o_BHTC: Tensor, lse_BHT: Tensor, block_o_BHTC: Tensor, block_lse_BHT: Tensor) -> None:
    """Merge the output of another block of keys into o and lse, in place:
    o += (block_o - o) e^block_lse / (e^lse + e^block_lse)."""
    weight_BHT = torch.sigmoid(block_lse_BHT - lse_BHT)
    o_BHTC.lerp_(block_o_BHTC.to(o_BHTC.dtype), weight_BHT.unsqueeze(-1))
    torch.logaddexp(lse_BHT, block_lse_BHT, out=lse_BHT)


def attend(
    q_1HNC: Tensor, k_1KMC: Tensor, v_1KMC: Tensor, pieces: Sequence[AttentionPiece], softcap: float = 0.0
) -> Iterator[tuple[slice | Tensor, Tensor, Tensor]]:
    """Yield (rows, o, lse) for each piece, or once for several pieces with a variable-length kernel."""
    if pieces and not softcap and varlen.has_varlen(q_1HNC):
        for together in varlen.grouped(pieces):
            yield varlen.attend(q_1HNC, k_1KMC, v_1KMC, together)
        return
    kernel = kernel_for(q_1HNC, softcap)
    for piece, mask in _with_masks(pieces, q_1HNC.device):
        k, v = k_1KMC[:, :, piece.columns], v_1KMC[:, :, piece.columns]
        yield piece.rows, *kernel.attend(q_1HNC[:, :, piece.rows], k, v, mask)


def gradients(
    do_1HNC: Tensor,
    q_1HNC: Tensor,
    k_1KMC: Tensor,
    v_1KMC: Tensor,
    o_1HNC: Tensor,
    lse_1HN: Tensor,
    pieces: Sequence[AttentionPiece],
    softcap: float = 0.0,
) -> Iterator[tuple[slice | Tensor, slice, Tensor, Tensor, Tensor]]:
    """Yield (rows, columns, dq, dk, dv) as `attend` does; `o_1HNC` and `lse_1HN` are over all keys."""
    if pieces and not softcap and varlen.has_varlen(q_1HNC):
        for together in varlen.grouped(pieces):
            yield varlen.gradient(do_1HNC, q_1HNC, k_1KMC, v_1KMC, o_1HNC, lse_1HN, together)
        return
    kernel = kernel_for(q_1HNC, softcap)
    for piece, mask in _with_masks(pieces, q_1HNC.device):
        do, q, o, lse = (x[:, :, piece.rows] for x in (do_1HNC, q_1HNC, o_1HNC, lse_1HN))
        k, v = k_1KMC[:, :, piece.columns], v_1KMC[:, :, piece.columns]
        yield piece.rows, piece.columns, *kernel.gradient(do, q, k, v, o, lse, mask)


def _with_masks(pieces: Sequence[AttentionPiece], device: torch.device) -> Iterator[tuple[AttentionPiece, Mask]]:
    """Yield pieces with their masks, cut so that memory grows with the number of keys and not with its square."""
    for piece in pieces:
        if piece.is_triangle or not (piece.hides_early or piece.hides_late):
            yield piece, piece.is_triangle
            continue
        for part in piece.cut(min(piece.window or ROWS_TOGETHER, ROWS_TOGETHER)):
            yield part, _mask(part, device) if part.hides_early or part.hides_late else False


def _mask(piece: AttentionPiece, device: torch.device) -> Tensor:
    """Return the scores of a piece that are not hidden, (T, S)."""
    seen_TS = torch.ones(piece.n_rows, piece.n_columns, dtype=torch.bool, device=device)
    seen_TS = seen_TS.tril(piece.shift) if piece.causal else seen_TS
    return seen_TS.triu(piece.shift - piece.window + 1) if piece.window else seen_TS


def _cpu_mask(mask: Mask, q_BHTC: Tensor) -> dict[str, Tensor | None]:
    """Return the terms that are added to the scores, 0 or minus infinity, in the type of the queries."""
    if isinstance(mask, bool):
        return {"attn_mask": None}
    return {"attn_mask": q_BHTC.new_zeros(mask.shape).masked_fill_(~mask, float("-inf"))}


def _cpu_attend(q_BHTC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    return flash_attention_cpu(q_BHTC, k_BKSC, v_BKSC, 0.0, mask is True, **_cpu_mask(mask, q_BHTC))


def _cpu_gradient(
    do_BHTC: Tensor, q_BHTC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, o_BHTC: Tensor, lse_BHT: Tensor, mask: Mask
) -> tuple[Tensor, Tensor, Tensor]:
    tensors = do_BHTC, q_BHTC, k_BKSC, v_BKSC, o_BHTC, lse_BHT
    return flash_attention_cpu_backward(*tensors, 0.0, mask is True, **_cpu_mask(mask, q_BHTC))


def _cuda_attend(q_BHTC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, causal: Mask) -> tuple[Tensor, Tensor]:
    assert isinstance(causal, bool)  # masked pieces have 16 bits, so they go to the variable-length kernel
    k_BHSC, v_BHSC = expand_heads(k_BKSC, q_BHTC), expand_heads(v_BKSC, q_BHTC)
    o_BHTC, lse_BHT, *_ = flash_attention_cuda(q_BHTC, k_BHSC, v_BHSC, 0.0, causal)
    return o_BHTC, lse_BHT


def _cuda_gradient(
    do_BHTC: Tensor, q_BHTC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, o_BHTC: Tensor, lse_BHT: Tensor, causal: Mask
) -> tuple[Tensor, Tensor, Tensor]:
    assert isinstance(causal, bool)
    k_BHSC, v_BHSC = expand_heads(k_BKSC, q_BHTC), expand_heads(v_BKSC, q_BHTC)
    # The random state, which the op reads only with dropout but requires as an argument.
    unused = torch.empty((2,), dtype=torch.uint64, device=q_BHTC.device)
    dq_BHTC, dk_BHSC, dv_BHSC = flash_attention_cuda_backward(
        do_BHTC,
        q_BHTC,
        k_BHSC,
        v_BHSC,
        o_BHTC,
        # The kernel reads lse as if it were contiguous, whatever its strides are, and does not check.
        lse_BHT.contiguous(),
        None,  # no cumulative lengths: all sequences of the batch have the full length
        None,
        q_BHTC.shape[2],
        k_BHSC.shape[2],
        0.0,
        causal,
        unused,
        unused,
    )
    return dq_BHTC, _fold(dk_BHSC, k_BKSC), _fold(dv_BHSC, v_BKSC)


def expand_heads(x_BKSC: Tensor, q_BHTC: Tensor) -> Tensor:
    """Repeat each kv head for the G query heads that read it, for kernels that may not support grouped heads."""
    group = q_BHTC.shape[1] // x_BKSC.shape[1]
    return x_BKSC if group == 1 else x_BKSC.repeat_interleave(group, dim=1)


def _fold(dx_BHSC: Tensor, x_BKSC: Tensor) -> Tensor:
    """Return the gradient of `expand_heads`: summed over each group (16-bit sums are accumulated in fp32 by torch)."""
    kv_heads = x_BKSC.shape[1]
    return dx_BHSC if dx_BHSC.shape[1] == kv_heads else dx_BHSC.unflatten(1, (kv_heads, -1)).sum(2)


def _dense_scores(q_BHTC: Tensor, k_BKSC: Tensor, mask: Mask, softcap: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scores, capped and hidden, and the scaled queries and keys that they are computed from, in the
    accumulator type with grouped heads."""
    wide = accumulator_dtype(q_BHTC.dtype)
    q_BKGTC = q_BHTC.to(wide).unflatten(1, (k_BKSC.shape[1], -1)) * q_BHTC.shape[-1] ** -0.5
    k_BK1SC = k_BKSC.to(wide).unsqueeze(2)
    s_BKGTS = q_BKGTC @ k_BK1SC.mT
    if softcap:
        s_BKGTS = s_BKGTS.div_(softcap).tanh_().mul_(softcap)
    if isinstance(mask, Tensor):
        s_BKGTS.masked_fill_(~mask, float("-inf"))
    return s_BKGTS, q_BKGTC, k_BK1SC


def _some_rows(q_BHTC: Tensor, k_BKSC: Tensor, mask: Mask) -> Iterator[tuple[slice, slice, Mask]]:
    """Yield queries, the keys that some of them read, and the mask of both, `ROWS_TOGETHER` queries at a time."""
    rows, columns = slice(0, q_BHTC.shape[2]), slice(0, k_BKSC.shape[2])
    for part in AttentionPiece(rows, columns, causal=mask is True).cut(ROWS_TOGETHER):
        if isinstance(mask, bool):
            yield part.rows, part.columns, _mask(part, q_BHTC.device) if part.hides_late else False
        else:
            yield part.rows, part.columns, mask[part.rows]


def _rows_attend(
    q_BHTC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, mask: Mask, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    parts = [
        _dense_attend(q_BHTC[:, :, rows], k_BKSC[:, :, columns], v_BKSC[:, :, columns], part_mask, softcap)
        for rows, columns, part_mask in _some_rows(q_BHTC, k_BKSC, mask)
    ]
    o_BHTC, lse_BHT = (torch.cat(column, 2) for column in zip(*parts, strict=True))
    return o_BHTC, lse_BHT


def _rows_gradient(
    do_BHTC: Tensor,
    q_BHTC: Tensor,
    k_BKSC: Tensor,
    v_BKSC: Tensor,
    o_BHTC: Tensor,
    lse_BHT: Tensor,
    mask: Mask,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype, wide = q_BHTC.dtype, accumulator_dtype(q_BHTC.dtype)
    dk_BKSC, dv_BKSC = (torch.zeros_like(x_BKSC, dtype=wide) for x_BKSC in (k_BKSC, v_BKSC))
    parts = []
    for rows, columns, part_mask in _some_rows(q_BHTC, k_BKSC, mask):
        do, q, o, lse = (x[:, :, rows] for x in (do_BHTC, q_BHTC, o_BHTC, lse_BHT))
        k, v = k_BKSC[:, :, columns], v_BKSC[:, :, columns]
        dq, dk, dv = _dense_gradient(do, q, k, v, o, lse, part_mask, softcap)
        parts.append(dq.to(dtype))
        dk_BKSC[:, :, columns] += dk
        dv_BKSC[:, :, columns] += dv
    return torch.cat(parts, 2), dk_BKSC.to(dtype), dv_BKSC.to(dtype)


def _dense_attend(q_BHTC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, mask: Mask, softcap: float) -> tuple[Tensor, Tensor]:
    s_BKGTS, _, _ = _dense_scores(q_BHTC, k_BKSC, mask, softcap)
    lse_BKGT = s_BKGTS.logsumexp(-1)
    o_BKGTC = s_BKGTS.sub_(lse_BKGT.unsqueeze(-1)).exp_() @ v_BKSC.to(s_BKGTS.dtype).unsqueeze(2)
    return o_BKGTC.flatten(1, 2).to(q_BHTC.dtype), lse_BKGT.flatten(1, 2)


def _dense_gradient(
    do_BHTC: Tensor,
    q_BHTC: Tensor,
    k_BKSC: Tensor,
    v_BKSC: Tensor,
    o_BHTC: Tensor,
    lse_BHT: Tensor,
    mask: Mask,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients in the accumulator type."""
    s_BKGTS, q_BKGTC, k_BK1SC = _dense_scores(q_BHTC, k_BKSC, mask, softcap)
    # d softcap tanh(x / softcap) / dx = 1 - tanh^2; hidden scores have no gradient.
    slope = 1 - (s_BKGTS / softcap).nan_to_num(neginf=0).square_() if softcap else None
    kv_heads, wide = k_BKSC.shape[1], s_BKGTS.dtype
    lse_BKGT, do_BKGTC, o_BKGTC = (x.to(wide).unflatten(1, (kv_heads, -1)) for x in (lse_BHT, do_BHTC, o_BHTC))
    p_BKGTS = s_BKGTS.sub_(lse_BKGT.unsqueeze(-1)).exp_()
    dv_BKSC = (p_BKGTS.mT @ do_BKGTC).sum(2)
    dp_BKGTS = do_BKGTC @ v_BKSC.to(wide).unsqueeze(2).mT
    ds_BKGTS = p_BKGTS.mul_(dp_BKGTS.sub_((do_BKGTC * o_BKGTC).sum(-1, keepdim=True)))
    ds_BKGTS = ds_BKGTS if slope is None else ds_BKGTS.mul_(slope)
    dq_BKGTC = ds_BKGTS @ k_BK1SC * q_BHTC.shape[-1] ** -0.5
    dk_BKSC = (ds_BKGTS.mT @ q_BKGTC).sum(2)  # q is scaled already
    return dq_BKGTC.flatten(1, 2), dk_BKSC, dv_BKSC


FLASH_CPU = Kernel(_cpu_attend, _cpu_gradient)
FLASH_CUDA = Kernel(_cuda_attend, _cuda_gradient)
ROWS = Kernel(_rows_attend, _rows_gradient)
"""Scores are in memory, of `ROWS_TOGETHER` queries at a time."""
