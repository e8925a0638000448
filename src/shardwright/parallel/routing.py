"""Routers on a part of the tokens: of a sequence, which cp and sequence parallelism split over ranks, and of the global
batch, which is split into microbatches and over ranks.

Two things that a router does go by more than a token: the balance loss of scope sequence by how many tokens of the
sequence picked each expert, and a capacity by how many of them did so before a token. Both are counts, which have no
gradient, so a rank sends whole numbers and no tokens (`ShardedRouter`):

| what           | a layer, microbatch and group of ranks | elements (int64; int32 for pieces) |
| -------------- | -------------------------------------- | ---------------------------------- |
| balance loss   | 1 all-reduce                           | B E                                |
| capacity       | 1 all-reduce                           | B P E                              |

For the order of tokens a sequence is P pieces of equal length, as many as the least number with which every rank holds
whole ones: two where `zigzag` gives it two chunks, else mostly one. Ranks tell each other how often each expert was
picked in each piece; the sum over the pieces before one is what its tokens start to count from. So the same tokens are
dropped as on one device, whatever the dealing.

The loss itself needs nothing more: it is linear in the mean scores, whose parts, from shards of equal length, add up.
Each part is scaled by its share of the tokens of the global batch (`LossScale`).

Shapes: B sequences, T tokens of each (local), E experts, P pieces of a sequence, p those of this rank, t tokens of one.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.layout import Layout
from shardwright.model.moe import Router, Routing, expert_layers, picked
from shardwright.parallel.mesh import Groups
from shardwright.split.rules import sequence_cuts
from shardwright.split.sequence import held_by


class ShardedRouter(Router):
    """A router of sequences of which the ranks of `groups`, taken one after another, hold equal parts: this one
    `pieces`, in its order, of `n_pieces`."""

    def __init__(
        self, router: Router, groups: Sequence[dist.ProcessGroup], pieces: Sequence[int], n_pieces: int
    ) -> None:
        nn.Module.__init__(self)
        self.moe = router.moe
        self.weight, self.bias, self.load = router.weight, router.bias, router.load
        self.groups, self.pieces, self.n_pieces = groups, pieces, n_pieces

    def losses(self, scores_BTE: Tensor, logits_BTE: Tensor, asked_BE: Tensor) -> tuple[Tensor | None, Tensor | None]:
        if self.moe.aux_loss and self.load is None:
            asked_BE = self.sum(asked_BE.clone())
        return super().losses(scores_BTE, logits_BTE, asked_BE)

    def keep(self, experts_BTK: Tensor) -> Tensor:
        places_BTE = self.places(picked(experts_BTK, self.moe.n_experts))
        n_tokens = experts_BTK.shape[1] // len(self.pieces) * self.n_pieces
        return places_BTE.gather(-1, experts_BTK) <= self.moe.capacity(n_tokens)

    @torch.compiler.disable
    def places(self, picked_BTE: Tensor) -> Tensor:
        """For each token here, how many tokens of the whole sequence up to it picked each expert; (B, T, E)."""
        places_BptE = picked_BTE.unflatten(1, (len(self.pieces), -1)).cumsum(2, dtype=torch.int32)
        found_BpE = places_BptE[:, :, -1]
        counts_BPE = found_BpE.new_zeros(len(picked_BTE), self.n_pieces, picked_BTE.shape[-1])
        for here, piece in enumerate(self.pieces):
            counts_BPE[:, piece] = found_BpE[:, here]
        before_BPE = self.sum(counts_BPE).cumsum(1) - counts_BPE
        before_BpE = torch.stack([before_BPE[:, piece] for piece in self.pieces], 1)
        return (places_BptE + before_BpE.unsqueeze(2)).flatten(1, 2)

    @torch.compiler.disable
    def sum(self, counts: Tensor) -> Tensor:
        """In place, over all ranks that have tokens of the same sequences."""
        for group in self.groups:
            dist.all_reduce(counts, group=group)
        return counts


class LossScale:
    """Makes the balance loss and z-loss of routers, which are means over the tokens of a forward pass, parts of those
    of the global batch."""

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        """`parts` are a model, or pipeline stages of one."""
        self.share = 1.0
        """Of the tokens of the global batch, how many a forward pass has."""
        for part in parts:
            for layer in expert_layers(part).values():
                layer.router.register_forward_hook(self._scale)

    def _scale(self, router: nn.Module, inputs: Any, routing: Routing) -> Routing:
        aux, z = (None if loss is None else loss * self.share for loss in (routing.aux_loss, routing.z_loss))
        return routing._replace(aux_loss=aux, z_loss=z)


def shard_routers(model: nn.Module, layout: Layout, groups: Groups) -> None:
    """Let the routers of a model, or of a stage of one, know of the tokens of a sequence on other ranks."""
    token_groups = (groups.cp_ring, groups.cp_ulysses, groups.tp if layout.token_shards else None)
    sharing = [group for group in token_groups if group is not None]
    if sharing:
        n_pieces = sequence_cuts(layout)
        # A rank's pieces are those of its tokens.
        held = held_by(layout, n_pieces, dist.get_rank(), token_shard=layout.token_shards)
        pieces = [piece for span in held for piece in span]
        for layer in expert_layers(model).values():
            layer.router = ShardedRouter(layer.router, sharing, pieces, n_pieces)
