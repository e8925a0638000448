"""Lengths of the documents in packed sequences, and their effect on attention; no torch."""

from collections.abc import Sequence

import numpy as np


def packed_lengths(document_lengths: np.ndarray, seq_len: int) -> np.ndarray:
    """Return the lengths of the documents of all packed sequences, one sequence after another; int64.

    Documents are packed one after another and split every `seq_len` tokens; the incomplete sequence at the end is left
    out. Empty for too few tokens.
    """
    ends = np.cumsum(document_lengths, dtype=np.int64)
    n_tokens = int(ends[-1]) - 1 if len(ends) else 0
    cuts = np.arange(0, n_tokens // seq_len + 1, dtype=np.int64) * seq_len
    return np.diff(np.union1d(ends[ends < cuts[-1]], cuts))


def attended_tokens(lengths: np.ndarray | Sequence[int]) -> float:
    """Return the mean length of a token's document, sum L^2 / sum L.

    Attention within documents has as many scores as attention over sequences of this length.
    """
    as_floats = np.asarray(lengths, dtype=np.float64)
    return float((as_floats**2).sum() / as_floats.sum())
