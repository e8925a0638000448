"""Context parallelism of linear attention: the states of heads pass between the ranks that share a sequence.

A sequence is cut into P equal pieces; each rank holds one or more (`split.sequence.SequencePieces`). What a
piece does to a state S is one affine map for each head, S -> A S + Z, with A and Z of the piece alone. So all ranks
compute their chunks at the same time, exchange the maps, and each composes the maps of the pieces before its own. Only
the composition is serial, over P small matrices:

    S_0 = 0      S_p+1 = A_p S_p + Z_p                    state before piece p
    G_P-1 = 0    G_p-1 = A_p^T G_p + D_p                  gradient of the state after piece p - 1

D_p is the gradient of S_p through the outputs of piece p. A document that starts in a piece makes A zero, so no state
passes it. The convolution reads the last W - 1 projections before a piece, the tail of the pieces before it.

Communication of one layer per rank, all-gathers over cp of this rank's p pieces, in elements:

| what                     | forward              | backward                          |
| ------------------------ | -------------------- | --------------------------------- |
| tails of the convolution | p B (W - 1) F        | p B (W - 1) F of gradients        |
| maps of states           | p B H K (K + V) *    | p B H K (K + V) * of A and of D   |

Elements marked * have fp32 or wider. The messages do not grow with the sequence; all methods of cp use them, since a
contiguous part, zig-zag chunks and Ulysses' tokens are all equal pieces. With usp an all-gather over Ulysses' ranks
comes first, then one over the ring. Saved for the backward pass are the projections, the tails, and S and A of this
rank's pieces.

Source: the chunked form of Gated Delta Networks (arXiv 2412.06464, section 3.3), with a rank's piece as one chunk;
LASP-2 (arXiv 2502.07563) all-gathers the states of linear attention over ranks too.

Shapes: B sequences, T tokens of each (local), p pieces of this rank, R = B p rows, L = T / p tokens of a piece, m
tokens of a tail, F features of the convolution, H value heads, K and V widths of their heads, X = K + V.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardwright.model.device_type import to_device
from shardwright.model.documents import Documents
from shardwright.model.linear_attention import GatedDeltaNet, document_numbers, scan, transition
from shardwright.parallel.collectives import all_gather_single
from shardwright.split.sequence import SequencePieces


class ContextDeltaNet:
    """A replacement for `GatedDeltaNet.mix` of `net` that continues the states of the pieces before this rank's.

    All ranks of the groups have to call it, and run backward through it, the same number of times.
    """

    def __init__(self, net: GatedDeltaNet, pieces: SequencePieces, groups: Sequence[dist.ProcessGroup | None]) -> None:
        """`groups`: the ranks of Ulysses and of the ring; None for an axis of degree 1."""
        self.net, self.pieces = net, pieces
        self.groups = [group for group in groups if group is not None]
        ulysses, ring = groups
        rank = (0 if ulysses is None else ulysses.rank()) + (
            0 if ring is None else ring.rank() * (1 if ulysses is None else ulysses.size())
        )
        self.own = pieces.of_ranks[rank]
        gathered = [piece for of_rank in pieces.of_ranks for piece in of_rank]
        self._places = [gathered.index(piece) for piece in range(pieces.n_pieces)]

    @torch.compiler.disable
    def __call__(self, qkvz_BTF: Tensor, ba_BTF: Tensor, weights: list[Tensor], documents: Documents | None) -> Tensor:
        document_RU = None if documents is None else self._document_numbers(documents, qkvz_BTF.device)
        output_BTF: Tensor = _PieceScan.apply(self, document_RU, qkvz_BTF, ba_BTF, *weights)
        return output_BTF

    def _document_numbers(self, documents: Documents, device: torch.device) -> Tensor:
        """Return the numbers of the documents of each piece's tokens and of the tokens before it, (R, U)."""
        numbers_BS = document_numbers(documents)
        length, before = numbers_BS.shape[1] // self.pieces.n_pieces, self.net.n_before
        numbers_BU = F.pad(numbers_BS, (before, 0), value=-1)
        of_pieces = [numbers_BU[:, piece * length : (piece + 1) * length + before] for piece in self.own]
        return to_device(torch.stack(of_pieces, 1).flatten(0, 1), device)

    def rows(self, x_BTF: Tensor) -> Tensor:
        """Return the pieces of this rank as sequences of their own, (R, L, F)."""
        return x_BTF.unflatten(1, (len(self.own), -1)).flatten(0, 1)

    def gather(self, x_R: Tensor) -> list[Tensor]:
        """All-gather a tensor of this rank's rows; return the tensors (B, ...) of all pieces, in sequence order."""
        gathered = x_R.unflatten(0, (-1, len(self.own))).transpose(0, 1).contiguous()
        for group in self.groups:
            sent = gathered
            gathered = sent.new_empty(group.size() * len(sent), *sent.shape[1:])
            all_gather_single(gathered, sent, group=group)
        return [gathered[place] for place in self._places]

    def own_rows(self, of_pieces: Sequence[Tensor]) -> Tensor:
        """Return the rows of this rank from tensors (B, ...) of all pieces; (R, ...)."""
        return torch.stack([of_pieces[piece] for piece in self.own], 1).flatten(0, 1)

    def tails(self, qkvz_RLF: Tensor) -> Tensor | None:
        """Return the W - 1 inputs of the convolution before each row, zeros before the sequence; None if W is 1."""
        width = self._tail_width(qkvz_RLF)
        if not width:
            return None
        of_pieces = self.gather(self.net.conv_inputs(qkvz_RLF[:, -width:]))
        n_before = self.net.n_before
        all_BUF = F.pad(torch.cat(of_pieces, 1), (0, 0, n_before, 0))
        return self.own_rows([all_BUF[:, p * width : p * width + n_before] for p in range(len(of_pieces))])

    def add_gradients_of_tails(self, dqkvz_RLF: Tensor, dbefore_RWF: Tensor | None) -> None:
        """Add the gradients of tails, which the rows after them have, to the gradients of this rank's projections."""
        if dbefore_RWF is None:
            return
        width, n_before = self._tail_width(dqkvz_RLF), self.net.n_before
        of_pieces = self.gather(dbefore_RWF)
        wide = torch.promote_types(dbefore_RWF.dtype, torch.float32)
        b, _, features = of_pieces[0].shape
        sum_BUF = dbefore_RWF.new_zeros(b, n_before + len(of_pieces) * width, features, dtype=wide)
        for piece, dbefore_BWF in enumerate(of_pieces):
            sum_BUF[:, piece * width : piece * width + n_before] += dbefore_BWF
        parts = sum_BUF[:, n_before:].split(width, 1)
        with torch.enable_grad():
            last_RmF = torch.zeros_like(dqkvz_RLF[:, -width:], dtype=wide).requires_grad_()
            inputs_RmF = self.net.conv_inputs(last_RmF)
        (dlast_RmF,) = torch.autograd.grad(inputs_RmF, last_RmF, self.own_rows(parts))
        dqkvz_RLF[:, -width:] += dlast_RmF

    def states_before(self, map_RHKX: Tensor) -> Tensor:
        """Return the state before each row, (R, H, K, V), from the maps A and Z of this rank's rows."""
        k_dim = map_RHKX.shape[-2]
        state_BHKV = torch.zeros_like(map_RHKX[:: len(self.own), ..., k_dim:])
        states = []
        for map_BHKX in self.gather(map_RHKX):
            states.append(state_BHKV)
            state_BHKV = map_BHKX[..., :k_dim] @ state_BHKV + map_BHKX[..., k_dim:]
        return self.own_rows(states)

    def gradients_after(self, map_RHKX: Tensor) -> Tensor:
        """Return the gradient of the state after each row, (R, H, K, V), from A and D of this rank's rows."""
        k_dim = map_RHKX.shape[-2]
        gradient_BHKV = torch.zeros_like(map_RHKX[:: len(self.own), ..., k_dim:])
        gradients = []
        for map_BHKX in reversed(self.gather(map_RHKX)):
            gradients.append(gradient_BHKV)
            gradient_BHKV = map_BHKX[..., :k_dim].mT @ gradient_BHKV + map_BHKX[..., k_dim:]
        return self.own_rows(gradients[::-1])

    def _tail_width(self, qkvz_RLF: Tensor) -> int:
        return min(self.net.q_conv.weight.shape[-1] - 1, qkvz_RLF.shape[1])


class _PieceScan(torch.autograd.Function):
    """(context net, documents, qkvz_BTF, ba_BTF, *weights) -> gated outputs of this rank's tokens, (B, T, H V)"""

    @staticmethod
    def forward(
        ctx: Any, net: ContextDeltaNet, document_RU: Tensor | None, qkvz_BTF: Tensor, ba_BTF: Tensor, *weights: Tensor
    ) -> Tensor:
        qkvz_RLF, ba_RLF = net.rows(qkvz_BTF), net.rows(ba_BTF)
        before_RWF = net.tails(qkvz_RLF)
        chunks, z_RLF, _ = net.net.chunks(before_RWF, document_RU, qkvz_RLF, ba_RLF, *weights)
        map_RHKX = transition(chunks)
        state_RHKV = net.states_before(map_RHKX)
        o_RHLV, _ = scan(chunks, state_RHKV)
        ctx.net, ctx.document_RU = net, document_RU
        own_map_RHKK = map_RHKX[..., : map_RHKX.shape[-2]].contiguous()
        ctx.save_for_backward(qkvz_BTF, ba_BTF, before_RWF, state_RHKV, own_map_RHKK, *weights)
        return net.net.gated(o_RHLV, z_RLF, weights[-1]).to(qkvz_BTF.dtype).reshape(*qkvz_BTF.shape[:2], -1)

    @staticmethod
    def backward(ctx: Any, dy_BTF: Tensor) -> tuple[Tensor | None, ...]:
        qkvz_BTF, ba_BTF, before_RWF, state_RHKV, own_map_RHKK, *weights = ctx.saved_tensors
        net = ctx.net
        rows = [net.rows(qkvz_BTF), net.rows(ba_BTF), *weights, *([] if before_RWF is None else [before_RWF])]
        inputs = [x.detach().requires_grad_() for x in rows]
        before = None if before_RWF is None else inputs[-1]
        state = state_RHKV.detach().requires_grad_()
        with torch.enable_grad():
            given = inputs[: 2 + len(weights)]
            chunks, z_RLF, _ = net.net.chunks(before, ctx.document_RU, *given)
            o_RHLV, after_RHKV = scan(chunks, state)
            y_RLF = net.net.gated(o_RHLV, z_RLF, given[-1]).to(qkvz_BTF.dtype)
        dy_RLF = net.rows(dy_BTF)
        (dstate_RHKV,) = torch.autograd.grad(y_RLF, state, dy_RLF, retain_graph=True)
        dafter_RHKV = net.gradients_after(torch.cat((own_map_RHKK, dstate_RHKV), -1))
        gradients = torch.autograd.grad((y_RLF, after_RHKV), inputs, (dy_RLF, dafter_RHKV))
        dqkvz_RLF, dba_RLF, *others = gradients
        net.add_gradients_of_tails(dqkvz_RLF, None if before is None else others.pop())
        return None, None, dqkvz_RLF.reshape(qkvz_BTF.shape), dba_RLF.reshape(ba_BTF.shape), *others
