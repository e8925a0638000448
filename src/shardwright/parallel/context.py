"""Context parallelism: causal attention over a sequence whose tokens are sharded over a group of ranks.

All other modules compute each token on its own, so only attention communicates. `split/sequence.py` assigns tokens to
ranks. Communication of one layer per rank, in messages or calls and in elements:

| method           | forward                               | backward                                     |
| ---------------- | ------------------------------------- | -------------------------------------------- |
| `ring`, `zigzag` | n-1 messages of 2BTKC                 | n-1 messages of 2BTKC, n-1 of 2BTKC*         |
| `allgather`      | all-gather, (n-1) 2BTKC               | all-gather and all-to-all, (n-1) 2BTKC each  |
| `ulysses`        | all-to-all, (n-1)/n BT(H+2K')C,       | the same two in the other order              |
|                  | and one of (n-1)/n BTHC               |                                              |
| `usp`            | as `ulysses` over u ranks,            | as `ulysses`, and for `zigzag` over          |
|                  | and r-1 messages of 2BTK'C            | r ranks, r-1 of 2BTK'C and r-1 of 2BTK'C*    |

K' = max(K, n) for `ulysses` and max(K, u) for `usp`, since a rank needs a whole kv head; the other methods send each kv
head once, not once for each query head. Elements have the activations' type; those marked * are sums over the ring and
have fp32 or wider. Ring messages overlap with the computation of a block, except the last hop of the gradients; the
all-gather overlaps with the computation of the rank's own block. The part of an all-to-all that a rank keeps is not
counted.

| method      | maximum ranks | saved for backward | balanced | source                                            |
| ----------- | ------------- | ------------------ | -------- | ------------------------------------------------- |
| `ring`      | S             | BT(2H+2K)C         | no       | Ring Attention, arXiv 2310.01889                  |
| `zigzag`    | S/2           | BT(2H+2K)C         | yes      | Llama 3, arXiv 2407.21783; ring-flash-attention   |
| `allgather` | S/2           | BT(2H+2K)C         | yes      | Llama 3, arXiv 2407.21783, section 3.3.2          |
| `ulysses`   | H             | BT(2H+2K')C        | yes      | DeepSpeed-Ulysses, arXiv 2309.14509               |
| `usp`       | H S/2         | BT(2H+2K')C        | yes      | USP, arXiv 2405.07719                             |

Temporary buffers while a layer is computed: `allgather` has the keys and values of the whole sequence and, in backward,
their gradients; a ring has two blocks of keys and values, for any n, and in backward two of gradients (`ring.py`).

Shapes: B batch, T tokens (local), S tokens of the sequence, H heads, K kv heads, C width of one head, n ranks of the
group, u of Ulysses and r of the ring in `usp`; c = T / 2 tokens of a chunk.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.layout.keys import CP_METHODS
from shardwright.model.attention import attend
from shardwright.model.blocks import accumulator_dtype, kernel_for, merge
from shardwright.model.documents import Documents
from shardwright.model.piece_attention import AttentionRule, PieceAttention
from shardwright.parallel.collectives import all_gather_single
from shardwright.parallel.documents import Ring, RingKeys
from shardwright.parallel.ring import RingAttention
from shardwright.parallel.ulysses import HeadsToTokens, TokensToHeads
from shardwright.split.documents import plan


class ContextAttention:
    """A replacement for `model.attention.attend` that attends to the tokens of all ranks of a context-parallel group.

    Inputs and output are this rank's tokens, in the order of `split.sequence.spans`: q_BTHC, k_BTKC, v_BTKC -> o_BTHC.
    All ranks of the group have to call it, and run backward through it, the same number of times. A group is None
    where its axis has degree 1.
    """

    def __init__(
        self,
        method: str,
        ring: dist.ProcessGroup | None,
        ulysses: dist.ProcessGroup | None,
        balances_documents: bool = False,
    ) -> None:
        """`balances_documents`: see `split.documents.balances_documents`."""
        assert method in CP_METHODS, method
        assert ring is None or method != "ulysses"
        assert ulysses is None or method in ("ulysses", "usp")
        self.method = method
        self.ring = ring
        self.ulysses = ulysses
        self.balances_documents = balances_documents

    def __call__(
        self,
        q_BTHC: Tensor,
        k_BTKC: Tensor,
        v_BTKC: Tensor,
        documents: Documents | None = None,
        rule: AttentionRule | None = None,
    ) -> Tensor:
        if self.ulysses is None:
            return self._over_ring(q_BTHC, k_BTKC, v_BTKC, documents, rule)
        q_BShC, k_BSkC, v_BSkC = TokensToHeads.apply(q_BTHC, k_BTKC, v_BTKC, self.ulysses)
        if rule is not None and rule.sinks_H is not None:
            sinks_h = rule.sinks_H.unflatten(0, (self.ulysses.size(), -1))[self.ulysses.rank()]
            rule = rule._replace(sinks_H=sinks_h)
        o_BTHC = self._over_ring(q_BShC, k_BSkC, v_BSkC, documents, rule)
        return HeadsToTokens.apply(o_BTHC, self.ulysses)

    def _over_ring(
        self, q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor, documents: Documents | None, rule: AttentionRule | None
    ) -> Tensor:
        if self.ring is None:
            return attend(q_BTHC, k_BTKC, v_BTKC, documents, rule)
        if documents is not None or rule is not None:
            return self._in_pieces(q_BTHC, k_BTKC, v_BTKC, documents, rule or AttentionRule(), self.ring)
        if self.method == "allgather":
            return GatherAttention.apply(q_BTHC, k_BTKC, v_BTKC, self.ring)
        return RingAttention.apply(q_BTHC, k_BTKC, v_BTKC, self.ring, self.method != "ring")

    @torch.compiler.disable  # the plan differs from one micro-batch to the next
    def _in_pieces(
        self,
        q_BTHC: Tensor,
        k_BTKC: Tensor,
        v_BTKC: Tensor,
        documents: Documents | None,
        rule: AttentionRule,
        ring: dist.ProcessGroup,
    ) -> Tensor:
        n, t = ring.size(), q_BTHC.shape[1]
        lengths = ((n * t,),) * len(q_BTHC) if documents is None else documents.lengths
        deals = self.balances_documents and documents is not None
        at = plan(lengths, self.method, n, ring.rank(), deals, rule.window, rule.chunked)
        keys = RingKeys(at, Ring(ring, self.method == "allgather"))
        return PieceAttention.apply(q_BTHC, k_BTKC, v_BTKC, rule.sinks_H, at.pieces, rule.softcap, keys)


class GatherAttention(torch.autograd.Function):
    """(q_BTHC, k_BTKC, v_BTKC, ring) -> o_BTHC: zig-zag tokens; one all-gather brings the keys and values of all ranks.

    Attention to the rank's own two chunks overlaps with the all-gather. Let the 2n-2 chunks of other ranks be in the
    order of the sequence: the early half of the queries attends to the first r, the late half to the first 2n-2-r. So
    none of these scores is masked, and every rank computes the same number of scores. The backward pass gathers keys
    and values again instead of saving them.
    """

    @staticmethod
    def forward(ctx: Any, q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor, ring: dist.ProcessGroup) -> Tensor:
        q_BHTC = q_BTHC.transpose(1, 2)
        own_2BTKC = torch.stack((k_BTKC, v_BTKC))
        gathered_n2BTKC, work = _start_gather(own_2BTKC, ring)
        attend = kernel_for(q_BHTC).attend
        k_BKTC, v_BKTC = own_2BTKC.transpose(2, 3)
        o_BHTC, lse_BHT = attend(q_BHTC, k_BKTC, v_BKTC, True)
        o_BHTC = o_BHTC.to(accumulator_dtype(q_BHTC.dtype))
        work.wait()
        k_BKSC, v_BKSC = _others(gathered_n2BTKC, ring.rank()).transpose(2, 3)
        del gathered_n2BTKC
        for rows, columns in _halves(q_BHTC.shape[2], ring):
            block_o, block_lse = attend(q_BHTC[:, :, rows], k_BKSC[:, :, columns], v_BKSC[:, :, columns], False)
            merge(o_BHTC[:, :, rows], lse_BHT[:, :, rows], block_o, block_lse)
        o_BHTC = o_BHTC.to(q_BHTC.dtype)
        ctx.save_for_backward(q_BTHC, own_2BTKC, o_BHTC, lse_BHT)
        ctx.ring = ring
        return o_BHTC.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, do_BTHC: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q_BTHC, own_2BTKC, o_BHTC, lse_BHT = ctx.saved_tensors
        ring, dtype = ctx.ring, q_BTHC.dtype
        gathered_n2BTKC, work = _start_gather(own_2BTKC, ring)
        q_BHTC, do_BHTC = q_BTHC.transpose(1, 2), do_BTHC.transpose(1, 2)
        gradient = kernel_for(q_BHTC).gradient
        k_BKTC, v_BKTC = own_2BTKC.transpose(2, 3)
        dq_BHTC, *own = gradient(do_BHTC, q_BHTC, k_BKTC, v_BKTC, o_BHTC, lse_BHT, True)
        dq_BHTC = dq_BHTC.to(accumulator_dtype(dtype))
        work.wait()
        others_2BSKC = _others(gathered_n2BTKC, ring.rank())
        del gathered_n2BTKC
        sums_2BSKC = torch.zeros_like(others_2BSKC, dtype=dq_BHTC.dtype)
        k_BKSC, v_BKSC = others_2BSKC.transpose(2, 3)
        for rows, columns in _halves(q_BHTC.shape[2], ring):
            q, do, o, lse = (x[:, :, rows] for x in (q_BHTC, do_BHTC, o_BHTC, lse_BHT))
            dq_block, *block = gradient(do, q, k_BKSC[:, :, columns], v_BKSC[:, :, columns], o, lse, False)
            dq_BHTC[:, :, rows] += dq_block
            for sum_BSKC, part_BKSC in zip(sums_2BSKC, block, strict=True):
                sum_BSKC[:, columns] += part_BKSC.transpose(1, 2)
        dk_BTKC, dv_BTKC = (
            (home.add_(part.transpose(1, 2))).to(dtype)
            for home, part in zip(_sum_at_home(sums_2BSKC, dtype, ring), own, strict=True)
        )
        return dq_BHTC.to(dtype).transpose(1, 2), dk_BTKC, dv_BTKC, None


def _start_gather(own_2BTKC: Tensor, ring: dist.ProcessGroup) -> tuple[Tensor, dist.Work]:
    gathered_n2BTKC = own_2BTKC.new_empty(ring.size(), *own_2BTKC.shape)
    return gathered_n2BTKC, all_gather_single(gathered_n2BTKC.flatten(0, 1), own_2BTKC, group=ring, async_op=True)


def _halves(tokens: int, ring: dist.ProcessGroup) -> list[tuple[slice, slice]]:
    """Return (queries, preceding keys of other ranks) for the late and the early half of this rank's tokens."""
    chunk, n, rank = tokens // 2, ring.size(), ring.rank()
    early = [(slice(chunk), slice(rank * chunk))] if rank > 0 else []
    return [(slice(chunk, None), slice((2 * n - 2 - rank) * chunk)), *early]


def _others(gathered_n2BTKC: Tensor, rank: int) -> Tensor:
    """Return the chunks of all other ranks in the order of the sequence: 0, 1, ..., 2n-1 without r and 2n-1-r."""
    ranks = [other for other in range(len(gathered_n2BTKC)) if other != rank]
    chunk = gathered_n2BTKC.shape[3] // 2
    early = [gathered_n2BTKC[other, :, :, :chunk] for other in ranks]
    late = [gathered_n2BTKC[other, :, :, chunk:] for other in reversed(ranks)]
    return torch.cat(early + late, dim=2)


def _sum_at_home(sums_2BSKC: Tensor, dtype: torch.dtype, ring: dist.ProcessGroup) -> Tensor:
    """Return the sum over all other ranks of their gradients of this rank's keys and values; inverse of `_others`.

    This reduce-scatter is an all-to-all in `dtype` and a local sum in fp32 or wider. gloo's own reduce-scatter is an
    all-reduce inside (it sent 2 (n-1) parts instead of n-1), and NCCL's adds n terms in 16 bits, whose error grows with
    the size of the ring.
    """
    n, rank = ring.size(), ring.rank()
    ranks = [other for other in range(n) if other != rank]
    two, b, s, k, c = sums_2BSKC.shape
    chunk = s // (2 * n - 2)
    chunks = sums_2BSKC.split(chunk, dim=2)
    sent_m2BTKC = sums_2BSKC.new_empty(n - 1, two, b, 2 * chunk, k, c, dtype=dtype)
    for i in range(n - 1):
        sent_m2BTKC[i, :, :, :chunk] = chunks[i]
        sent_m2BTKC[i, :, :, chunk:] = chunks[2 * n - 3 - i]
    received_m2BTKC = torch.empty_like(sent_m2BTKC)
    counts = [int(other in ranks) for other in range(n)]
    dist.all_to_all_single(received_m2BTKC, sent_m2BTKC, counts, counts, group=ring)
    return received_m2BTKC.sum(0, dtype=sums_2BSKC.dtype)
