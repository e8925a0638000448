"""The new tokens of several sequences in one forward pass: one after another in one row, without padding between them.

    sequence a, positions 5 to 7    sequence b, position 12    ->    a5 a6 a7 b12     (1, N), N = 4

So a pass may have sequences of any lengths, and the model sees one sequence of N tokens with their positions. Only
attention knows the sequence of each token (`cache.py`).

Shapes: N tokens of a pass, B sequences, S positions of the cache.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor


class SequenceSegment(NamedTuple):
    """Consecutive new tokens of one sequence, at positions `start` to `start + length - 1`; their keys and values are
    in row `slot` of the cache."""

    slot: int
    start: int
    length: int

    @property
    def stop(self) -> int:
        """The position after the last of these tokens, equal to the number of tokens that the last attends to."""
        return self.start + self.length


class RaggedBatch:
    """The segments of one forward pass, and the wanted tokens, whose logits are returned: the last `n_wanted` of each
    segment, by default one."""

    def __init__(
        self, segments: Sequence[SequenceSegment], tokens: Sequence[int], n_wanted: Sequence[int] | None = None
    ) -> None:
        assert len(tokens) == sum(segment.length for segment in segments), (len(tokens), segments)
        self.segments = tuple(segments)
        self.tokens = tokens
        self.n_wanted = [1] * len(segments) if n_wanted is None else n_wanted
        self.spans: list[range] | None = None
        """This rank's tokens of the padded row with context parallelism; None if it has all."""
        self.replayed_NLK: Tensor | None = None
        """The experts that the tokens get in each layer with experts, before the pass (`model/expert_choices.py`)."""
        self.chosen_NLK: Tensor | None = None
        """The experts that the tokens got, after the pass of an engine that records them."""

    @property
    def n_tokens(self) -> int:
        """Tokens of all segments, without padding."""
        return len(self.tokens)

    @cached_property
    def positions(self) -> list[int]:
        return [position for segment in self.segments for position in range(segment.start, segment.stop)]

    @cached_property
    def wanted(self) -> list[int]:
        """Indices in the row of the wanted tokens."""
        indices: list[int] = []
        at = 0
        for segment, n in zip(self.segments, self.n_wanted, strict=True):
            at += segment.length
            indices += range(at - n, at)
        return indices

    @cached_property
    def is_prefill(self) -> bool:
        """Return whether every sequence starts with this pass, so that it attends to nothing in the cache."""
        return all(segment.start == 0 for segment in self.segments)

    @cached_property
    def is_decode(self) -> bool:
        """Return whether every sequence has one token in this pass."""
        return all(segment.length == 1 for segment in self.segments)

    @cached_property
    def longest(self) -> int:
        """The most tokens that a token of this pass attends to."""
        return max((segment.stop for segment in self.segments), default=0)

    @cached_property
    def slots(self) -> Tensor:
        """The row of the cache of each sequence; (B,)."""
        return torch.tensor([segment.slot for segment in self.segments])

    @cached_property
    def starts(self) -> Tensor:
        """The position of the first new token of each sequence; (B,)."""
        return torch.tensor([segment.start for segment in self.segments])

    @cached_property
    def rows(self) -> slice | Tensor:
        """The rows of the cache; a slice if they are adjacent, because it is read without a copy."""
        first, n = self.segments[0].slot, len(self.segments)
        neighbours = all(segment.slot == first + i for i, segment in enumerate(self.segments))
        return slice(first, first + n) if neighbours else self.slots

    def decode_mask(self, device: torch.device) -> Tensor | None:
        """Return the cache positions that each sequence of a decode pass attends to, (B, 1, 1, S); None for all."""
        stops = [segment.stop for segment in self.segments]
        if min(stops) == max(stops):
            return None
        stop_B = torch.tensor(stops, device=device)
        return (torch.arange(self.longest, device=device) < stop_B[:, None])[:, None, None]
