"""The documents of packed sequences, within which attention stays (`[data] attention = "document"`).

Shapes: B sequences, T tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.system.errors import InputError


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of a micro-batch.

    `lengths`: for each sequence the tokens of each of its documents, in order, on the host, because kernels are
    launched by them. `positions_BT`: the positions of this rank's tokens for position embeddings, if they restart with
    each document; None if they are the positions in the sequence.
    """

    lengths: tuple[tuple[int, ...], ...]
    positions_BT: Tensor | None = None

    @staticmethod
    def from_lengths(lengths: Sequence[Sequence[int]], seq_len: int, *, restart: bool = False) -> "Documents":
        """Return the documents of whole sequences of `seq_len` tokens; with `restart` each starts at position 0.

        Raises InputError for lengths below 1 or that do not add up to `seq_len`.
        """
        for row, tokens in enumerate(lengths):
            if sum(tokens) != seq_len or min(tokens) < 1:
                raise InputError(
                    f"documents of sequence {row} have {list(tokens)} tokens, {sum(tokens)} together; each needs 1 or "
                    f"more, and together they have to be the {seq_len} of the sequence"
                )
        whole = tuple(tuple(row) for row in lengths)
        return Documents(whole, restarted(whole) if restart else None)


def restarted(lengths: Sequence[Sequence[int]]) -> Tensor:
    """Return the position of every token in its document, int64 (B, T)."""
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths])
