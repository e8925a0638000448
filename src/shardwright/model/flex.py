"""Attention with a soft cap in one kernel of a GPU: PyTorch's FlexAttention, compiled by Triton (arXiv 2412.05496).

Causal attention within documents, windows or chunks has one rule: query n reads the keys from `first_N[n]` to n.

    s[n, m] = softcap tanh(q[n] k[m] / sqrt(C) / softcap)      first_N[n] <= m <= n

The kernel computes squares of `SQUARE` queries and keys. Tables name the squares that have a score, and among them the
squares in which no score is masked, for which the kernel does not evaluate the rule. They are made on the host and have
16 / SQUARE^2 bytes for each pair of tokens, 1 MiB for 32,768 tokens. All other memory is linear in the tokens.

Shapes: B sequences, T tokens of each, H heads, K kv heads, C width of a head, N tokens of one mask, S squares of a row
of the mask, N / SQUARE rounded up.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from shardwright.model.device_type import to_device
from shardwright.model.documents import Documents
from shardwright.model.pieces import first_keys

SQUARE = 128
"""Queries and keys of a square, the default of FlexAttention."""


def attend(
    q_BTHC: Tensor,
    k_BTKC: Tensor,
    v_BTKC: Tensor,
    documents: Documents | None,
    softcap: float,
    window: int = 0,
    *,
    chunked: bool = False,
    kernel: Callable[..., Any] | None = None,
) -> Tensor:
    """Return attention with a soft cap, within documents if given, and within a window or chunks; (B, T, H, C).
    `kernel`: computes `flex_attention`; by default its compiled form."""
    tensors = [q_BTHC, k_BTKC, v_BTKC]
    lengths: tuple[int, ...] = (q_BTHC.shape[1],)
    if documents is not None:  # one mask over the tokens of all sequences
        lengths = tuple(length for row in documents.lengths for length in row)
        tensors = [x.flatten(0, 1).unsqueeze(0) for x in tensors]
    q_BHTC, k_BKTC, v_BKTC = (x.transpose(1, 2) for x in tensors)
    mask = kept_mask(lengths, window, chunked, q_BTHC.device)
    grouped = q_BHTC.shape[1] != k_BKTC.shape[1]
    o_BHTC: Tensor = (kernel or compiled())(
        q_BHTC, k_BKTC, v_BKTC, score_mod=soft_cap(softcap), block_mask=mask, enable_gqa=grouped
    )
    return o_BHTC.transpose(1, 2).reshape(q_BTHC.shape)


@lru_cache(maxsize=1)
def compiled() -> Callable[..., Any]:
    """Return FlexAttention as one kernel forward and one backward; it is compiled for the shapes of its calls."""
    return torch.compile(flex_attention)


def soft_cap(softcap: float) -> Callable[..., Tensor]:
    """Return the function of a score that FlexAttention calls."""

    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped


def block_mask(lengths: tuple[int, ...], window: int, chunked: bool, device: torch.device) -> BlockMask:
    """Return the mask of documents of `lengths` tokens on a device, with its tables of squares."""
    first_N = first_keys(lengths, window, chunked)
    tables = [table for seen_SS in squares(first_N) for table in (*_ordered(seen_SS), *_ordered(seen_SS.T))]
    on_device = [to_device(torch.from_numpy(table)[None, None], device) for table in tables]
    n_kv, kv, n_q, q, n_full_kv, full_kv, n_full_q, full_q = on_device
    first = to_device(torch.from_numpy(first_N), device)

    def is_read(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key >= first[query])

    shape, size = (len(first_N), len(first_N)), (SQUARE, SQUARE)
    return BlockMask(shape, n_kv, kv, n_full_kv, full_kv, n_q, q, n_full_q, full_q, size, is_read)


@lru_cache(maxsize=8)
def kept_mask(lengths: tuple[int, ...], window: int, chunked: bool, device: torch.device) -> BlockMask:
    """Return `block_mask` of the arguments; the 8 masks used last are kept. The layers of a micro-batch with the
    same window share a mask, and without documents all micro-batches do.

    Queries of all types share it, because its tensors are indices. They are filled on the stream that is current in the
    first call, and attention in all layers runs on that stream. Generation calls this in inference mode, and autograd
    cannot save a tensor that was made in it, so the tensors are made outside."""
    with torch.inference_mode(False):
        return block_mask(lengths, window, chunked, device)


def squares(first_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the squares with some masked scores and some others, and the squares without a masked score, both (S, S).
    `first_N` does not decrease."""
    starts = np.arange(0, len(first_N), SQUARE)
    low, high = first_N[starts], first_N[np.minimum(starts + SQUARE, len(first_N)) - 1]
    row, column = np.meshgrid(starts, starts, indexing="ij")
    seen = (column <= row) & (column + SQUARE > low[:, None])
    full = (column < row) & (column >= high[:, None])
    return seen & ~full, full


def _ordered(seen_SS: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of squares of each row, (S,), and their columns, then the other columns, (S, S)."""
    columns = np.argsort(~seen_SS, axis=1, kind="stable")
    return seen_SS.sum(1, dtype=np.int32), columns.astype(np.int32)
