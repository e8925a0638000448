"""Ring attention: each rank keeps its queries, and the ranks send blocks of keys and values round a ring.

In step s, ring rank r holds the keys and values of rank (r - s) mod n. It computes attention of its queries to them
while it sends them to rank r + 1 (Ring Attention, arXiv 2310.01889). With `zigzag` a rank holds an early and a late
chunk of the sequence (Llama 3, arXiv 2407.21783; zhuzilin/ring-flash-attention), so that in each step all ranks compute
the same number of scores:

| keys of         | contiguous tokens     | zig-zag tokens                              |
| --------------- | --------------------- | ------------------------------------------- |
| this rank       | causal                | causal                                      |
| an earlier rank | all queries, all keys | all queries, the early half of the keys     |
| a later rank    | nothing               | the late half of the queries, all keys      |

In the backward pass the blocks are sent round again. The gradient of each block follows it one hop behind; every rank
adds its term, and the last hop returns the sum to the block's own rank. Between forward and backward a rank saves its
own q, k, v, output and log-sum-exp. There are at most two buffers of keys and values, one to read and one to receive
into, and in backward two of gradients, in fp32 or wider since they are sums over the ring.

Shapes: B batch, T tokens (local), H heads, K kv heads, C width of one head; 2 is k and v.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.model.blocks import accumulator_dtype, kernel_for, merge
from shardwright.parallel.point_to_point import PendingMessage, TensorMessage, start

ALL = slice(None)
KEYS, GRADIENTS = 0, 1  # tags of messages
IN_WORDS = ("keys and values", "gradients of keys and values")


class RingAttention(torch.autograd.Function):
    """(q_BTHC, k_BTKC, v_BTKC, ring, zigzag) -> o_BTHC: causal attention over the tokens of all ranks of a ring."""

    @staticmethod
    def forward(
        ctx: Any, q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor, ring: dist.ProcessGroup, zigzag: bool
    ) -> Tensor:
        n, rank = ring.size(), ring.rank()
        q_BHTC = q_BTHC.transpose(1, 2)
        attend = kernel_for(q_BHTC).attend
        own_2BTKC = torch.stack((k_BTKC, v_BTKC))  # one message; also saved for backward
        keys = RingBuffer(own_2BTKC, ring, KEYS)
        for step in range(n):
            held_2BTKC = keys.start(last=step == n - 1)
            if (piece := _piece((rank - step) % n, rank, q_BHTC.shape[2], zigzag)) is not None:
                rows, columns, causal = piece
                k_BKTC, v_BKTC = held_2BTKC.transpose(2, 3)[:, :, :, columns]
                block = attend(q_BHTC[:, :, rows], k_BKTC, v_BKTC, causal)
                if step == 0:
                    o_BHTC, lse_BHT = block[0].to(accumulator_dtype(q_BHTC.dtype)), block[1]
                else:
                    merge(o_BHTC[:, :, rows], lse_BHT[:, :, rows], *block)
                del block  # otherwise it would stay in memory while the next one is computed
            keys.wait()
        o_BHTC = o_BHTC.to(q_BHTC.dtype)
        ctx.save_for_backward(q_BTHC, own_2BTKC, o_BHTC, lse_BHT)
        ctx.ring, ctx.zigzag = ring, zigzag
        return o_BHTC.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, do_BTHC: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q_BTHC, own_2BTKC, o_BHTC, lse_BHT = ctx.saved_tensors
        ring, zigzag = ctx.ring, ctx.zigzag
        n, rank = ring.size(), ring.rank()
        q_BHTC, do_BHTC = q_BTHC.transpose(1, 2), do_BTHC.transpose(1, 2)
        gradient = kernel_for(q_BHTC).gradient
        wide = accumulator_dtype(q_BHTC.dtype)
        keys = RingBuffer(own_2BTKC, ring, KEYS)
        sums = RingBuffer(torch.zeros_like(own_2BTKC, dtype=wide), ring, GRADIENTS, overwrite=True)
        for step in range(n):
            held_2BTKC = keys.start(last=step == n - 1)
            block = None
            if (piece := _piece((rank - step) % n, rank, q_BHTC.shape[2], zigzag)) is not None:
                rows, columns, causal = piece
                k_BKTC, v_BKTC = held_2BTKC.transpose(2, 3)[:, :, :, columns]
                q, do, o, lse = (x[:, :, rows] for x in (q_BHTC, do_BHTC, o_BHTC, lse_BHT))
                dq_block, *block = gradient(do, q, k_BKTC, v_BKTC, o, lse, causal)
                if step == 0:
                    dq_BHTC, own_block = dq_block.to(wide), block
                else:
                    dq_BHTC[:, :, rows] += dq_block
                del dq_block
            if step > 0:
                sum_2BTKC = sums.wait()
                if block is not None:
                    _add(sum_2BTKC, columns, block)
                sums.start()
            keys.wait()
        sum_2BTKC = sums.wait()
        _add(sum_2BTKC, ALL, own_block)
        dk_BTKC, dv_BTKC = sum_2BTKC.to(q_BTHC.dtype)
        return dq_BHTC.to(q_BTHC.dtype).transpose(1, 2), dk_BTKC, dv_BTKC, None, None


def _piece(source: int, rank: int, tokens: int, zigzag: bool) -> tuple[slice, slice, bool] | None:
    """Return (queries, keys, causal) of the attention of ring rank `rank` to the keys of rank `source`; None if all
    scores are masked."""
    if source == rank:
        return ALL, ALL, True
    if not zigzag:
        return (ALL, ALL, False) if source < rank else None
    early, late = slice(tokens // 2), slice(tokens // 2, None)
    return (ALL, early, False) if source < rank else (late, ALL, False)


def _add(sum_2BTKC: Tensor, columns: slice, block_BKTC: list[Tensor]) -> None:
    """Add a block's dk and dv at the columns of its keys."""
    for sum_BTKC, part_BKTC in zip(sum_2BTKC, block_BKTC, strict=True):
        sum_BTKC[:, columns] += part_BKTC.transpose(1, 2)


class RingBuffer:
    """A double buffer whose tensor is sent round a ring: one tensor to read and send, one to receive into.

    With `overwrite` the first tensor is reused as a receive buffer; otherwise it is only read.
    """

    def __init__(self, local: Tensor, ring: dist.ProcessGroup, tag: int, overwrite: bool = False) -> None:
        self._ring = ring
        self._tag = tag
        self._block = local
        self._free_next = overwrite
        self._coming: Tensor | None = None
        self._spare: Tensor | None = None
        self._on_their_way: list[PendingMessage] = []

    def start(self, last: bool = False) -> Tensor:
        """Start to send the current tensor to the next rank and to receive one from the previous rank, unless this is
        the `last` step; return the current tensor."""
        if not last:
            n, rank = self._ring.size(), self._ring.rank()
            self._coming = torch.empty_like(self._block) if self._spare is None else self._spare
            what = IN_WORDS[self._tag]
            sent = TensorMessage(True, self._block, (rank + 1) % n, what)
            received = TensorMessage(False, self._coming, (rank - 1) % n, what)
            self._on_their_way = start([sent, received], self._ring, "cp", self._tag)
        return self._block

    def wait(self) -> Tensor:
        """Wait for the messages that `start` has started, if any; return the current tensor."""
        for message in self._on_their_way:
            message.wait()
        if self._coming is not None:
            self._spare = self._block if self._free_next else None
            self._block, self._coming, self._on_their_way = self._coming, None, []
            self._free_next = True
        return self._block
