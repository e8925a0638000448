"""Pieces of attention: rectangles of queries and keys whose scores are computed together; no torch.

A mask of causal attention within documents, also within a window of tokens, is a set of such pieces. One device has
one piece for each document; a rank of context parallelism has pieces for the keys of each rank (`split/documents.py`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np

ROWS_TOGETHER = 512
"""The most queries that are computed at a time where the mask or the scores of a piece are in memory."""


@dataclass(frozen=True)
class AttentionPiece:
    """Queries `rows` attend to keys `columns` of a block. Both are indices into the tokens of all sequences of a
    micro-batch, concatenated.

    Row i of the piece, from 0, reads its column j unless `causal` and j > i + shift, or unless there is a `window` and
    j <= i + shift - window. Every row reads at least one column.
    """

    rows: slice
    columns: slice
    causal: bool = False
    shift: int = 0
    window: int = 0
    """0: none."""
    first: int = 0
    """The position of the first column in its document, or in its chunk."""

    @property
    def n_rows(self) -> int:
        """The number of queries."""
        return self.rows.stop - self.rows.start

    @property
    def n_columns(self) -> int:
        """The number of keys."""
        return self.columns.stop - self.columns.start

    @property
    def pairs(self) -> int:
        """The number of unmasked scores."""
        before = pairs_up_to(self.n_rows, self.n_columns, self.shift - self.window) if self.window else 0
        if not self.causal:
            return self.n_rows * self.n_columns - before
        return pairs_up_to(self.n_rows, self.n_columns, self.shift) - before

    @property
    def is_triangle(self) -> bool:
        """Return whether the mask is a triangle: tokens attend to themselves causally."""
        return self.causal and self.shift == 0 and self.n_rows == self.n_columns and not self.hides_early

    @property
    def hides_early(self) -> bool:
        """Return whether the window hides the first column from the last row."""
        return 0 < self.window <= self.n_rows - 1 + self.shift

    @property
    def hides_late(self) -> bool:
        """Return whether the causal mask hides the last column from the first row."""
        return self.causal and self.n_columns - 1 > self.shift

    def cut(self, n_rows: int) -> Iterator["AttentionPiece"]:
        """Yield pieces of at most `n_rows` queries, each without the columns that none of its rows reads."""
        for row in range(0, self.n_rows, n_rows):
            stop = min(row + n_rows, self.n_rows)
            low = max(0, row + self.shift - self.window + 1) if self.window else 0
            high = min(self.n_columns, stop + self.shift) if self.causal else self.n_columns
            at = self.rows.start + row, self.rows.start + stop
            columns = slice(self.columns.start + low, self.columns.start + high)
            yield AttentionPiece(slice(*at), columns, self.causal, row + self.shift - low, self.window)

    def moved(self, rows: int, columns: int) -> "AttentionPiece":
        """Return the piece with both indices increased."""
        return AttentionPiece(
            slice(self.rows.start + rows, self.rows.stop + rows),
            slice(self.columns.start + columns, self.columns.stop + columns),
            self.causal,
            self.shift,
            self.window,
        )


def pairs_up_to(n_rows: int, n_columns: int, shift: int) -> int:
    """Return the number of (row, column) with column <= row + shift: the sum over rows i = 0, 1, ... of
    min(max(i + shift + 1, 0), columns)."""

    def up_to(x: int) -> int:
        """Return min(0, columns) + min(1, columns) + ... + min(x, columns); 0 for a negative x."""
        below = max(0, min(x, n_columns))
        return below * (below + 1) // 2 + max(0, x - n_columns) * n_columns

    return up_to(n_rows + shift) - up_to(shift)


def chunk_lengths(n_tokens: int, chunk: int) -> list[int]:
    """Return the tokens of each chunk of a document; the last may be shorter."""
    return [min(chunk, n_tokens - start) for start in range(0, n_tokens, chunk)]


@lru_cache(maxsize=256)
def causal_pieces(
    sequences: tuple[tuple[int, ...], ...], window: int = 0, chunked: bool = False
) -> tuple[AttentionPiece, ...]:
    """Return causal attention within the documents of all sequences on one device, given by the tokens of each, with a
    `window` to the last `window` tokens only, a token itself included, or, if `chunked`, to its chunk."""
    lengths: Sequence[int] = [length for row in sequences for length in row]
    if chunked:
        lengths, window = [chunk for length in lengths for chunk in chunk_lengths(length, window)], 0
    documents = [slice(start, stop) for start, stop in pairwise([0, *accumulate(lengths)])]
    return tuple(
        AttentionPiece(at, at, causal=True, window=window if window < at.stop - at.start else 0) for at in documents
    )


def first_keys(lengths: tuple[int, ...], window: int = 0, chunked: bool = False) -> np.ndarray:
    """Return the first token that each token of the documents reads, int32 (N,): of its document, its chunk or its
    window. Tokens are numbered over all documents."""
    pieces = causal_pieces((lengths,), window, chunked)
    first_N = np.repeat([piece.rows.start for piece in pieces], [piece.n_rows for piece in pieces])
    if window and not chunked:
        first_N = np.maximum(first_N, np.arange(len(first_N)) - window + 1)
    return first_N.astype(np.int32)


_WIDEST = 256
"""The most elements of a head in the flash attention of GPUs."""
_ALIGNMENT_BYTES = 16
"""A head takes a multiple of these bytes in PyTorch's memory-efficient attention, in fp32 and in 16 bits."""


def refuses_flash(element_bytes: float, width: int) -> str | None:
    """Return why the flash attention of GPUs that returns a log-sum-exp refuses heads of `width` elements of
    `element_bytes` each, or None."""
    if element_bytes != 2:
        return "flash attention of GPUs is in 16 bits"
    if width % 8 or width > _WIDEST:
        return f"flash attention of GPUs needs heads of at most {_WIDEST} elements, a multiple of 8, not of {width}"
    return None


def needs_equal_heads(*, gpu: bool, element_bytes: float, width: int) -> bool:
    """Return whether keys and values are repeated for the queries of a group in a layer without a rule whose tokens are
    on one device: outside of the flash attention of GPUs, `scaled_dot_product_attention` has no kernel for grouped
    heads except one with all scores in memory."""
    return gpu and (element_bytes != 2 or width > _WIDEST)


def scores_in_rows(
    *,
    gpu: bool,
    element_bytes: float,
    width: int,
    softcap: bool = False,
    sinks: bool = False,
    windows: bool = False,
    cp: int = 1,
) -> str | None:
    """Return why scores of a layer are in memory, `ROWS_TOGETHER` queries at a time, or None if they are in a kernel
    only. Both ways take memory linear in the sequence.

    `width`: of the queries of a head; `element_bytes`: of the type of matmuls; `windows`: or chunks; `cp`: ranks that
    pass keys to each other, `Layout.cp_ring`."""
    if softcap:
        return _refuses_fused_caps(gpu=gpu, element_bytes=element_bytes, width=width, sinks=sinks, cp=cp)
    if not gpu:
        return None
    if windows or sinks or cp > 1:
        return refuses_flash(element_bytes, width)
    if element_bytes == 8:
        return "no fused attention of GPUs is in 64 bits"
    multiple = int(_ALIGNMENT_BYTES // element_bytes)
    if needs_equal_heads(gpu=gpu, element_bytes=element_bytes, width=width) and width % multiple:
        return f"memory-efficient attention needs heads of a multiple of {multiple} elements, and they have {width}"
    return None


def _refuses_fused_caps(*, gpu: bool, element_bytes: float, width: int, sinks: bool, cp: int) -> str | None:
    """Return why `flex.py` does not compute a layer with a soft cap, or None."""
    if not gpu:
        return "FlexAttention has no gradients on CPUs"
    if element_bytes != 2:
        return "the matmuls of FlexAttention are in 16 bits"
    if width % 8 or not 16 <= width <= _WIDEST:
        return f"FlexAttention needs heads of 16 to {_WIDEST} elements, a multiple of 8, and they have {width}"
    if sinks:
        return "FlexAttention has no sinks"
    return "keys of other ranks of cp are merged step by step" if cp > 1 else None
