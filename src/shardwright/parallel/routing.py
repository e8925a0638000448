"""Routers for ranks that hold a part of each sequence (cp, sequence parallelism) and of the global batch.

Two computations of a router need more than one token. The balance loss of scope sequence needs the number of tokens of
the sequence that picked each expert. The capacity needs, for each token, the same count over earlier tokens. Counts
have no gradient, so ranks exchange integers and no activations (`ShardedRouter`):

| what           | per layer, micro-batch, group of ranks | elements (int64; int32 for pieces) |
| -------------- | -------------------------------------- | ---------------------------------- |
| balance loss   | 1 all-reduce                           | B E                                |
| capacity       | 1 all-reduce                           | B P E                              |

For the capacity a sequence is divided into P pieces of equal length; P is the smallest number for which every rank
holds whole pieces: two per rank if `zigzag` gives it two chunks, otherwise mostly one. The ranks all-reduce the counts
of each expert in each piece. The counts of a piece start from the sum over earlier pieces. So the same tokens are
dropped as on one device, for every way of sharding the sequence.

The tokens that are padding follow from their positions and from the number of real tokens of their sequence, which
every rank knows (`RealTokens`).

The balance loss needs no other communication: it is linear in the mean scores, and the partial means over shards of
equal length add up. `LossScale` scales each partial loss by its fraction of the tokens of the global batch.

Shapes: B sequences, T tokens of each (local), E experts, P pieces of a sequence, p pieces of this rank, t tokens of a
piece.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.layout.layout import Layout
from shardwright.model.balance import RealTokens
from shardwright.model.moe import Router, Routing, expert_layers, picked
from shardwright.parallel.mesh import Groups
from shardwright.parallel.tensor import TensorAxis
from shardwright.split.rules import sequence_cuts
from shardwright.split.sequence import positions_of_rank


class ShardedRouter(Router):
    """A router of sequences that are sharded in equal parts over the ranks of `groups`. This rank holds `pieces`, in
    this order, of the `n_pieces` of a sequence."""

    def __init__(
        self, router: Router, groups: Sequence[dist.ProcessGroup], pieces: Sequence[int], n_pieces: int
    ) -> None:
        nn.Module.__init__(self)
        self.moe, self.choices = router.moe, router.choices
        self.weight, self.logit_bias = router.weight, router.logit_bias
        self.bias, self.load = router.bias, router.load
        self.groups, self.pieces, self.n_pieces = groups, pieces, n_pieces

    def losses(
        self,
        scores_BTE: Tensor,
        logits_BTE: Tensor,
        asked_BE: Tensor,
        aux_weights_BT: Tensor | None = None,
        z_weights_BT: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        if self.moe.aux_loss and self.load is None:
            asked_BE = self.sum(asked_BE.clone())
        return super().losses(scores_BTE, logits_BTE, asked_BE, aux_weights_BT, z_weights_BT)

    def keep(self, experts_BTK: Tensor, real: RealTokens | None = None) -> Tensor:
        places_BTE = self.places(picked(experts_BTK, self.moe.n_experts))
        n_tokens = experts_BTK.shape[1] // len(self.pieces) * self.n_pieces
        return places_BTE.gather(-1, experts_BTK) <= self.capacity(n_tokens, real)

    @torch.compiler.disable
    def places(self, picked_BTE: Tensor) -> Tensor:
        """Return for each local token the number of tokens of the whole sequence, up to this one, that picked each
        expert; (B, T, E)."""
        places_BptE = picked_BTE.unflatten(1, (len(self.pieces), -1)).cumsum(2, dtype=torch.int32)
        found_BpE = places_BptE[:, :, -1]
        counts_BPE = found_BpE.new_zeros(len(picked_BTE), self.n_pieces, picked_BTE.shape[-1])
        for index, piece in enumerate(self.pieces):
            counts_BPE[:, piece] = found_BpE[:, index]
        before_BPE = self.sum(counts_BPE).cumsum(1) - counts_BPE
        before_BpE = torch.stack([before_BPE[:, piece] for piece in self.pieces], 1)
        return (places_BptE + before_BpE.unsqueeze(2)).flatten(1, 2)

    @torch.compiler.disable
    def sum(self, counts: Tensor) -> Tensor:
        """All-reduce (sum), in place, over the ranks that hold tokens of the same sequences."""
        for group in self.groups:
            dist.all_reduce(counts, group=group)
        return counts


class LossScale:
    """Scales the balance loss and z-loss of routers, which are means over the tokens of a forward pass, so that they
    add up to the mean over the global batch."""

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        """`parts`: the whole model, or this rank's pipeline stages."""
        self.share = 1.0
        """The forward pass's fraction of the global batch's tokens."""
        for part in parts:
            for layer in expert_layers(part).values():
                layer.router.register_forward_hook(self._scale)

    def _scale(self, router: nn.Module, inputs: Any, routing: Routing) -> Routing:
        aux, z = (None if loss is None else loss * self.share for loss in (routing.aux_loss, routing.z_loss))
        return routing._replace(aux_loss=aux, z_loss=z)


def shard_routers(model: nn.Module, layout: Layout, groups: Groups) -> None:
    """Replace the routers of a model, or of a pipeline stage, by routers that count over whole sequences, if sequences
    are sharded."""
    token_groups = (groups.cp_ring, groups.cp_ulysses, groups.tp if layout.token_shards else None)
    sharing = [group for group in token_groups if group is not None]
    if sharing:
        n_pieces = sequence_cuts(layout)
        local = positions_of_rank(layout, n_pieces, dist.get_rank(), token_shard=layout.token_shards)
        pieces = [piece for span in local for piece in span]
        for layer in expert_layers(model).values():
            layer.router = ShardedRouter(layer.router, sharing, pieces, n_pieces)
            if layout.token_shards and groups.tp is not None:
                own_tokens = TensorAxis(groups.tp, token_shards=True).own_tokens
                layer.router.register_forward_pre_hook(partial(_narrow_positions, own_tokens))


def _narrow_positions(own_tokens: Callable[[Tensor], Tensor], router: nn.Module, inputs: Any) -> Any:
    """Replace the positions of all tokens, the third argument of a router, by this token shard's positions."""
    return (*inputs[:2], own_tokens(inputs[2]), *inputs[3:]) if inputs[2] is not None else inputs
