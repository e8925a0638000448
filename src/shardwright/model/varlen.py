"""The pieces of a step of attention within documents in one call of PyTorch's variable-length flash attention (CUDA, 16
bits; FlashAttention-2, arXiv 2307.08691).

The kernel takes pieces one after another, so rows are gathered and results scattered. A key that several pieces read is
copied for each piece, and its gradients are summed.

Shapes: N tokens of queries, M of keys, R rows of all pieces, S columns of all pieces, H heads, K kv heads, C width.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardwright.model.device_type import device_type, to_device
from shardwright.model.pieces import AttentionPiece, refuses_flash
from shardwright.system.torch_private import flash_attention_pieces, flash_attention_pieces_backward

ALL = slice(None)


class _VarlenIndices(NamedTuple):
    """The positions of the rows and columns of pieces, and the arguments of the kernel."""

    rows_R: Tensor
    columns_S: Tensor
    arguments: tuple[Tensor, Tensor, int, int, float, bool]
    """Cumulative numbers of rows and of columns, the largest of each, dropout, and whether the mask is causal."""
    window: dict[str, int]
    """The kernel's window: the numbers of columns that row i reads before and after column i + columns - rows, the
    kernel's diagonal; without a window of the model empty."""

    @staticmethod
    def from_pieces(pieces: Sequence[AttentionPiece], device: torch.device) -> "_VarlenIndices":
        causal, windowed = pieces[0].causal, pieces[0].window > 0
        assert len(pieces) == 1 if windowed else all(piece.causal == causal for piece in pieces)
        rows, columns = [piece.rows for piece in pieces], [piece.columns for piece in pieces]
        n_rows, n_columns = ([at.stop - at.start for at in kind] for kind in (rows, columns))
        ends = cumulative(n_rows, device), cumulative(n_columns, device)
        arguments = (*ends, max(n_rows), max(n_columns), 0.0, causal and not windowed)
        window = _window(pieces[0]) if windowed else {}
        return _VarlenIndices(_indices(rows, device), _indices(columns, device), arguments, window)


def _window(piece: AttentionPiece) -> dict[str, int]:
    after = piece.shift - (piece.n_columns - piece.n_rows)
    assert after >= 0 or not piece.causal, "the kernel reads a negative window as none: cut the columns first"
    return {"window_size_left": piece.window - 1 - after, "window_size_right": after if piece.causal else -1}


def has_varlen(q: Tensor) -> bool:
    """Return whether PyTorch has variable-length attention for a tensor's device, type and head width (last dim)."""
    return device_type(q) == "cuda" and refuses_flash(q.element_size(), q.shape[-1]) is None


def cumulative(lengths: list[int], device: torch.device) -> Tensor:
    """Return 0 and the sums of the first 1, 2, ... lengths, int32, as variable-length kernels need them."""
    return to_device(torch.tensor([0, *lengths]).cumsum(0).to(torch.int32), device)


def grouped(pieces: Sequence[AttentionPiece]) -> Iterator[Sequence[AttentionPiece]]:
    """Yield the pieces of each call: all pieces without a window, then each piece with one."""
    if plain := [piece for piece in pieces if not piece.window]:
        yield plain
    for piece in pieces:
        if piece.window:
            yield [piece]


def attend(
    q_1HNC: Tensor, k_1KMC: Tensor, v_1KMC: Tensor, pieces: Sequence[AttentionPiece]
) -> tuple[Tensor, Tensor, Tensor]:
    """-> rows_R, o_1HRC, lse_1HR"""
    places = _VarlenIndices.from_pieces(pieces, q_1HNC.device)
    q, k, v = (*_gathered((q_1HNC,), places.rows_R), *_gathered((k_1KMC, v_1KMC), places.columns_S))
    o_RHC, lse_HR, *_ = flash_attention_pieces(q, k, v, *places.arguments, False, **places.window)
    return places.rows_R, o_RHC.transpose(0, 1).unsqueeze(0), lse_HR.unsqueeze(0)


def gradient(
    do_1HNC: Tensor,
    q_1HNC: Tensor,
    k_1KMC: Tensor,
    v_1KMC: Tensor,
    o_1HNC: Tensor,
    lse_1HN: Tensor,
    pieces: Sequence[AttentionPiece],
) -> tuple[Tensor, slice, Tensor, Tensor, Tensor]:
    """-> rows_R, all columns, dq_1HRC, dk_1KMC, dv_1KMC; `o_1HNC` and `lse_1HN` are over all keys."""
    places = _VarlenIndices.from_pieces(pieces, q_1HNC.device)
    do, q, o = _gathered((do_1HNC, q_1HNC, o_1HNC), places.rows_R)
    k, v = _gathered((k_1KMC, v_1KMC), places.columns_S)
    lse_HR = lse_1HN[0, :, places.rows_R].float().contiguous()
    unused = torch.empty((2,), dtype=torch.uint64, device=q.device)
    dq_RHC, *parts = flash_attention_pieces_backward(
        do, q, k, v, o, lse_HR, *places.arguments, unused, unused, **places.window
    )
    sums = []
    for whole_1KMC, part_SKC in zip((k_1KMC, v_1KMC), parts, strict=True):
        sum_1KMC = torch.zeros_like(whole_1KMC, dtype=torch.float32)
        sums.append(sum_1KMC.index_add_(2, places.columns_S, part_SKC.transpose(0, 1).unsqueeze(0).float()))
    return places.rows_R, ALL, dq_RHC.transpose(0, 1).unsqueeze(0), *sums


def _indices(places: Sequence[slice], device: torch.device) -> Tensor:
    return to_device(torch.cat([torch.arange(at.start, at.stop) for at in places]), device)


def _gathered(tensors: Sequence[Tensor], places: Tensor) -> list[Tensor]:
    """(1, H, N, C) -> (R, H, C), for each tensor."""
    return [x[0].index_select(1, places).transpose(0, 1).contiguous() for x in tensors]
