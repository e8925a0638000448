"""The documents of packed sequences, within which attention stays (`[data] attention = "document"`).

Shapes: B sequences, T tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.errors import InputError


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of a micro-batch.

    `lengths`: for each sequence the tokens of each of its documents, in order; they are on the host, since kernels are
    launched by them. `positions_BT`: the positions for rotary or learned position embeddings of the tokens that a rank
    holds, where they restart with each document; None where they are those in the sequence.
    """

    lengths: tuple[tuple[int, ...], ...]
    positions_BT: Tensor | None = None

    @staticmethod
    def of(lengths: Sequence[Sequence[int]], seq_len: int, *, restart: bool = False) -> "Documents":
        """The documents of whole sequences of `seq_len` tokens; with `restart` each begins at position 0.

        Raises InputError for lengths below 1 or that do not add up to `seq_len`.
        """
        for row, each in enumerate(lengths):
            if sum(each) != seq_len or min(each) < 1:
                raise InputError(
                    f"documents of sequence {row} have {list(each)} tokens, {sum(each)} together; each needs 1 or "
                    f"more, and together they have to be the {seq_len} of the sequence"
                )
        whole = tuple(tuple(each) for each in lengths)
        return Documents(whole, restarted(whole) if restart else None)


def restarted(lengths: Sequence[Sequence[int]]) -> Tensor:
    """The position of every token in its document, int64 (B, T)."""
    return torch.stack([torch.cat([torch.arange(length) for length in each]) for each in lengths])
