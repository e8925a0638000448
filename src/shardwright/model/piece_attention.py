"""Causal attention in pieces: within documents, within windows, with soft caps and with sinks, on one device or with
the keys of other ranks.

Outputs of pieces are merged by their log-sum-exp (`blocks.py`). Every query has its own key in step 0, and every row
of a piece has a key, so no log-sum-exp of an empty block is ever computed.

A sink is a learned logit of each head without a value (gpt-oss): exp(sink) is added to the sum of exponentials. So it
is merged like a block of keys whose output is 0 and whose log-sum-exp is the sink, and

    d loss / d sink = - sum_N exp(sink - lse) sum_C do o

with o and lse over all keys and the sink.

Shapes: B sequences, T tokens of each (local), N = B T, M tokens of a step, H heads, K kv heads, C width of one head; 2
is k and v.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from shardwright.model.batch_invariant import attend_in_blocks, is_batch_invariant
from shardwright.model.blocks import accumulator_dtype, attend, gradients, merge
from shardwright.model.documents import Documents
from shardwright.model.pieces import AttentionPiece, causal_pieces


class AttentionRule(NamedTuple):
    """The rules of a layer in addition to softmax(q k) v.

    `window`: a token attends to the last `window` tokens, itself included; 0: all. `softcap`: scores s become
    softcap tanh(s / softcap); 0: none. `sinks_H`: a logit of each head that has no value, or None. `chunked`: a token
    attends to its chunk of `window` tokens instead; chunks are counted from the first token of a document or sequence.
    """

    window: int = 0
    softcap: float = 0.0
    sinks_H: Tensor | None = None
    chunked: bool = False


class ReturnPath(Protocol):
    """The way back of gradients of keys and values to the ranks that sent these."""

    def start(self, step: int, gradient_2MKC: Tensor) -> None:
        """Start to return the gradients of a step to the rank that its keys came from."""

    def finish(self) -> None:
        """Add the gradients that come back."""


class KeyExchange(Protocol):
    """The keys and values of other ranks."""

    def keys(self, own_2NKC: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield (step, keys and values of that step, (2, M, K, C)), this rank's own in step 0."""

    def returns(self, sum_2NKC: Tensor) -> ReturnPath:
        """Return the way back of gradients; `sum_2NKC`: the gradients of the own keys, to which others are added."""


class OwnKeys:
    """The exchange of one device: its own keys, and no others."""

    def keys(self, own_2NKC: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield the own keys and values as step 0."""
        yield 0, own_2NKC

    def returns(self, sum_2NKC: Tensor) -> "OwnKeys":
        """Return this object: nothing comes back."""
        return self

    def start(self, step: int, gradient_2MKC: Tensor) -> None:
        """Raise AssertionError: one device has no second step."""
        raise AssertionError(f"one device has no step {step}")

    def finish(self) -> None:
        """Do nothing."""


class PieceAttention(torch.autograd.Function):
    """(q_BTHC, k_BTKC, v_BTKC, sinks_H or None, pieces of each step, softcap, exchange) -> o_BTHC"""

    @staticmethod
    def forward(
        ctx: Any,
        q_BTHC: Tensor,
        k_BTKC: Tensor,
        v_BTKC: Tensor,
        sinks_H: Tensor | None,
        pieces: Sequence[Sequence[AttentionPiece]],
        softcap: float,
        exchange: KeyExchange,
    ) -> Tensor:
        q_1HNC, own_2NKC = _heads_first(q_BTHC.flatten(0, 1)), torch.stack((k_BTKC, v_BTKC)).flatten(1, 2)
        wide = accumulator_dtype(q_1HNC.dtype)
        o_1HNC = torch.zeros_like(q_1HNC, dtype=wide)
        lse_1HN = torch.full(q_1HNC.shape[:3], float("-inf"), dtype=wide, device=q_1HNC.device)
        if is_batch_invariant():
            for piece in pieces[0]:
                at, keys = (0, slice(None), piece.rows), (slice(None), piece.columns)
                k_KSC, v_KSC = (x_NKC.transpose(0, 1)[keys] for x_NKC in own_2NKC)
                mask = piece.shift, piece.window, piece.first
                o_1HNC[at], lse_1HN[at] = attend_in_blocks(q_1HNC[at], k_KSC, v_KSC, sinks_H, *mask, softcap)
        else:
            once = sum(piece.n_rows for piece in pieces[0]) == q_1HNC.shape[2]  # no row has a second piece in step 0
            for step, held_2MKC in exchange.keys(own_2NKC):
                k_1KMC, v_1KMC = map(_heads_first, held_2MKC)
                for rows, block_o, block_lse in attend(q_1HNC, k_1KMC, v_1KMC, pieces[step], softcap):
                    if step == 0 and once:
                        o_1HNC[:, :, rows], lse_1HN[:, :, rows] = block_o.to(wide), block_lse.to(wide)
                        continue
                    o, lse = o_1HNC[:, :, rows], lse_1HN[:, :, rows]
                    merge(o, lse, block_o, block_lse.to(wide))
                    o_1HNC[:, :, rows], lse_1HN[:, :, rows] = o, lse
            if sinks_H is not None:
                merge(o_1HNC, lse_1HN, torch.zeros_like(o_1HNC), sinks_H.to(wide)[:, None].expand_as(lse_1HN))
        o_1HNC = o_1HNC.to(q_1HNC.dtype)
        ctx.save_for_backward(q_BTHC, own_2NKC, o_1HNC, lse_1HN, sinks_H)
        ctx.pieces, ctx.softcap, ctx.exchange = pieces, softcap, exchange
        return _tokens_first(o_1HNC).unflatten(0, q_BTHC.shape[:2])

    @staticmethod
    def backward(ctx: Any, do_BTHC: Tensor) -> tuple[Tensor | None, ...]:
        q_BTHC, own_2NKC, o_1HNC, lse_1HN, sinks_H = ctx.saved_tensors
        dtype = q_BTHC.dtype
        q_1HNC, do_1HNC = (_heads_first(x.flatten(0, 1)) for x in (q_BTHC, do_BTHC))
        wide = accumulator_dtype(dtype)
        dsinks_H = None
        if sinks_H is not None:
            shares_1HN = (sinks_H.to(wide)[:, None] - lse_1HN).exp_()
            dsinks_H = -(shares_1HN * (do_1HNC.to(wide) * o_1HNC).sum(-1)).sum((0, 2)).to(sinks_H.dtype)
        dq_1HNC, sum_2NKC = torch.zeros_like(q_1HNC, dtype=wide), torch.zeros_like(own_2NKC, dtype=wide)
        returns = ctx.exchange.returns(sum_2NKC)
        for step, held_2MKC in ctx.exchange.keys(own_2NKC):
            k_1KMC, v_1KMC = map(_heads_first, held_2MKC)
            step_sum_2MKC = sum_2NKC if step == 0 else torch.zeros_like(held_2MKC, dtype=wide)
            saved = do_1HNC, q_1HNC, k_1KMC, v_1KMC, o_1HNC, lse_1HN
            for rows, columns, dq, *block in gradients(*saved, ctx.pieces[step], ctx.softcap):
                dq_1HNC[:, :, rows] += dq
                for sum_MKC, part_1KSC in zip(step_sum_2MKC, block, strict=True):
                    sum_MKC[columns] += _tokens_first(part_1KSC)
            if step > 0:
                returns.start(step, step_sum_2MKC.to(dtype))
        returns.finish()
        shape = do_BTHC.shape[:2]
        dk_BTKC, dv_BTKC = sum_2NKC.to(dtype).unflatten(1, shape)
        return _tokens_first(dq_1HNC).to(dtype).unflatten(0, shape), dk_BTKC, dv_BTKC, dsinks_H, None, None, None


@torch.compiler.disable  # pieces differ from one micro-batch to the next
def piece_attention(
    q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor, documents: Documents | None, rule: AttentionRule
) -> Tensor:
    """Return the attention of one device by `rule`, within documents if given; (B, T, H, C)."""
    n_sequences, n_tokens = q_BTHC.shape[:2]
    lengths = ((n_tokens,),) * n_sequences if documents is None else documents.lengths
    pieces = causal_pieces(lengths, rule.window, rule.chunked)
    o_BTHC: Tensor = PieceAttention.apply(q_BTHC, k_BTKC, v_BTKC, rule.sinks_H, (pieces,), rule.softcap, OwnKeys())
    return o_BTHC


def _heads_first(x_NHC: Tensor) -> Tensor:
    """(N, H, C) -> (1, H, N, C), a view."""
    return x_NHC.transpose(0, 1).unsqueeze(0)


def _tokens_first(x_1HNC: Tensor) -> Tensor:
    """(1, H, N, C) -> (N, H, C), a view."""
    return x_1HNC.squeeze(0).transpose(0, 1)
