"""Routing that looks at whole sequences, where cp and sequence parallelism deal their tokens out over ranks.

Two things that a router does go by more than a token: the balance loss of scope sequence by how many tokens of the
sequence picked each expert, and a capacity by how many of them did so before a token. Both are counts, which have no
gradient, so a rank sends whole numbers and no tokens:

| what           | a layer, microbatch and group of ranks | elements (int64; int32 for pieces) |
| -------------- | -------------------------------------- | ---------------------------------- |
| balance loss   | 1 all-reduce                           | B E                                |
| capacity       | 1 all-reduce                           | B P E                              |

For the order of tokens a sequence is P pieces of equal length, as many as the least number with which every rank holds
whole ones: two where `zigzag` gives it two chunks, else mostly one. Ranks tell each other how often each expert was
picked in each piece; the sum over the pieces before one is what its tokens start to count from. So the same tokens are
dropped as on one device, whatever the dealing.

The loss itself needs nothing more: it is linear in the mean scores, whose parts, from shards of equal length, add up.

Shapes: B sequences, T tokens of each (local), E experts, P pieces of a sequence, p those of this rank, t tokens of one.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.layout import Layout
from shardwright.model.moe import WholeSequences, expert_layers
from shardwright.parallel.mesh import Groups
from shardwright.split.rules import sequence_cuts
from shardwright.split.sequence import held_by


class DealtSequences(WholeSequences):
    """Sequences of which the ranks of `groups`, taken one after another, hold equal parts: this one `pieces`, in its
    order, of `n_pieces`."""

    def __init__(self, groups: Sequence[dist.ProcessGroup], pieces: Sequence[int], n_pieces: int) -> None:
        self.groups, self.pieces, self.n_pieces = groups, pieces, n_pieces
        self.n_shards = n_pieces // len(pieces)

    @torch.compiler.disable
    def total(self, counts_BE: Tensor) -> Tensor:
        return self._sum(counts_BE.clone())

    @torch.compiler.disable
    def places(self, picked_BTE: Tensor) -> Tensor:
        places_BptE = picked_BTE.unflatten(1, (len(self.pieces), -1)).cumsum(2, dtype=torch.int32)
        found_BpE = places_BptE[:, :, -1]
        counts_BPE = found_BpE.new_zeros(len(picked_BTE), self.n_pieces, picked_BTE.shape[-1])
        for here, piece in enumerate(self.pieces):
            counts_BPE[:, piece] = found_BpE[:, here]
        before_BPE = self._sum(counts_BPE).cumsum(1) - counts_BPE
        before_BpE = torch.stack([before_BPE[:, piece] for piece in self.pieces], 1)
        return (places_BptE + before_BpE.unsqueeze(2)).flatten(1, 2)

    def _sum(self, counts: Tensor) -> Tensor:
        """In place, over all ranks that have tokens of the same sequences."""
        for group in self.groups:
            dist.all_reduce(counts, group=group)
        return counts


def count_whole_sequences(model: nn.Module, layout: Layout, groups: Groups) -> None:
    """Let the routers of a model, or of a stage of one, know of the tokens on other ranks."""
    token_groups = (groups.cp_ring, groups.cp_ulysses, groups.tp if layout.token_shards else None)
    dealt = [group for group in token_groups if group is not None]
    if dealt:
        n_pieces = sequence_cuts(layout)
        # Pieces are dealt out as tokens are.
        held = held_by(layout, n_pieces, dist.get_rank(), token_shard=layout.token_shards)
        pieces = [piece for span in held for piece in span]
        for layer in expert_layers(model).values():
            layer.router.sequences = DealtSequences(dealt, pieces, n_pieces)
