"""Context parallelism with attention within documents: which keys are sent to which rank, and attention to them.

`split/documents.py` assigns tokens to ranks, and plans a rank's attention from the lengths of the documents: causal
squares of its own tokens and, for the keys of each other rank, rectangles of tokens of one document. A rank sends keys
and values of needed tokens directly to the rank that needs them, and gradients directly back; between two ranks
without a common document there is no message and no work. Communication of one layer per rank, where the others need
M of the rank's tokens, each counted once for every rank that needs it:

| method                  | forward                         | backward                                        |
| ----------------------- | ------------------------------- | ----------------------------------------------- |
| `ring`, `zigzag`, `usp` | up to r-1 messages, 2MKC in all | up to r-1 messages of keys, 2MKC, and as many of |
|                         |                                 | gradients, 2MKC                                 |
| `allgather`             | one all-to-all, 2MKC            | two all-to-alls, 2MKC each                      |

The messages of a step overlap with the attention of the step before. Outputs of pieces are merged by their log-sum-exp
(`blocks.py`). A query always has its own key, in the first step, and a piece always has keys, so no log-sum-exp of an
empty block is ever computed or merged. Gradients are sent in the activations' type and summed in fp32 or wider.

Shapes: B sequences, T tokens of each (local), N = B T, M tokens received, H heads, K kv heads, C width of one head, r
ranks of the ring; 2 is k and v.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.model.attention import has_varlen
from shardwright.parallel import varlen
from shardwright.parallel.blocks import accumulator_dtype, kernel_for, merge
from shardwright.parallel.point_to_point import PendingMessage, TensorMessage, start
from shardwright.parallel.ring import GRADIENTS, IN_WORDS, KEYS
from shardwright.split.documents import AttentionPiece, RingPlan


class Ring(NamedTuple):
    """A process group and how tensors are sent in it: in one all-to-all, or in a message for each step."""

    group: dist.ProcessGroup
    together: bool


class DocumentAttention(torch.autograd.Function):
    """(q_BTHC, k_BTKC, v_BTKC, plan, ring) -> o_BTHC: causal attention within the documents of all ranks of a ring."""

    @staticmethod
    def forward(ctx: Any, q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor, plan: RingPlan, ring: Ring) -> Tensor:
        q_1HNC, own_2NKC = _heads_first(q_BTHC.flatten(0, 1)), torch.stack((k_BTKC, v_BTKC)).flatten(1, 2)
        wide = accumulator_dtype(q_1HNC.dtype)
        o_1HNC = torch.empty_like(q_1HNC, dtype=wide)
        lse_1HN = torch.empty(q_1HNC.shape[:3], dtype=wide, device=q_1HNC.device)
        for step, held_2MKC in _keys(own_2NKC, plan, ring):
            k_1KMC, v_1KMC = map(_heads_first, held_2MKC)
            for rows, block_o, block_lse in attend(q_1HNC, k_1KMC, v_1KMC, plan.pieces[step]):
                if step == 0:
                    o_1HNC[:, :, rows], lse_1HN[:, :, rows] = block_o.to(wide), block_lse.to(wide)
                    continue
                o, lse = o_1HNC[:, :, rows], lse_1HN[:, :, rows]
                merge(o, lse, block_o, block_lse)
                o_1HNC[:, :, rows], lse_1HN[:, :, rows] = o, lse
        o_1HNC = o_1HNC.to(q_1HNC.dtype)
        ctx.save_for_backward(q_BTHC, own_2NKC, o_1HNC, lse_1HN)
        ctx.plan, ctx.ring = plan, ring
        return _tokens_first(o_1HNC).unflatten(0, q_BTHC.shape[:2])

    @staticmethod
    def backward(ctx: Any, do_BTHC: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q_BTHC, own_2NKC, o_1HNC, lse_1HN = ctx.saved_tensors
        plan, ring, dtype = ctx.plan, ctx.ring, q_BTHC.dtype
        q_1HNC, do_1HNC = (_heads_first(x.flatten(0, 1)) for x in (q_BTHC, do_BTHC))
        wide = accumulator_dtype(dtype)
        dq_1HNC, sum_2NKC = torch.zeros_like(q_1HNC, dtype=wide), torch.zeros_like(own_2NKC, dtype=wide)
        returns = _GradientReturns(sum_2NKC, plan, ring)
        for step, held_2MKC in _keys(own_2NKC, plan, ring):
            k_1KMC, v_1KMC = map(_heads_first, held_2MKC)
            found_2MKC = sum_2NKC if step == 0 else torch.zeros_like(held_2MKC, dtype=wide)
            saved = do_1HNC, q_1HNC, k_1KMC, v_1KMC, o_1HNC, lse_1HN
            for rows, columns, dq, *block in gradients(*saved, plan.pieces[step]):
                dq_1HNC[:, :, rows] += dq
                for found_MKC, part_1KSC in zip(found_2MKC, block, strict=True):
                    found_MKC[columns] += _tokens_first(part_1KSC)
            if step > 0:
                returns.start(step, found_2MKC.to(dtype))
        returns.finish()
        shape = do_BTHC.shape[:2]
        dk_BTKC, dv_BTKC = sum_2NKC.to(dtype).unflatten(1, shape)
        return _tokens_first(dq_1HNC).to(dtype).unflatten(0, shape), dk_BTKC, dv_BTKC, None, None


def attend(
    q_1HNC: Tensor, k_1KMC: Tensor, v_1KMC: Tensor, pieces: Sequence[AttentionPiece]
) -> Iterator[tuple[slice | Tensor, Tensor, Tensor]]:
    """Yield (rows, o, lse) for each piece of a step, or once for all pieces with a variable-length kernel."""
    if pieces and has_varlen(q_1HNC):
        yield varlen.attend(q_1HNC, k_1KMC, v_1KMC, pieces)
        return
    kernel = kernel_for(q_1HNC).attend
    for piece in pieces:
        k, v = k_1KMC[:, :, piece.columns], v_1KMC[:, :, piece.columns]
        yield piece.rows, *kernel(q_1HNC[:, :, piece.rows], k, v, piece.causal)


def gradients(
    do_1HNC: Tensor,
    q_1HNC: Tensor,
    k_1KMC: Tensor,
    v_1KMC: Tensor,
    o_1HNC: Tensor,
    lse_1HN: Tensor,
    pieces: Sequence[AttentionPiece],
) -> Iterator[tuple[slice | Tensor, slice, Tensor, Tensor, Tensor]]:
    """Yield (rows, columns, dq, dk, dv) as `attend` does; `o_1HNC` and `lse_1HN` are over all keys."""
    if pieces and has_varlen(q_1HNC):
        yield varlen.gradient(do_1HNC, q_1HNC, k_1KMC, v_1KMC, o_1HNC, lse_1HN, pieces)
        return
    kernel = kernel_for(q_1HNC).gradient
    for piece in pieces:
        do, q, o, lse = (x[:, :, piece.rows] for x in (do_1HNC, q_1HNC, o_1HNC, lse_1HN))
        k, v = k_1KMC[:, :, piece.columns], v_1KMC[:, :, piece.columns]
        yield piece.rows, piece.columns, *kernel(do, q, k, v, o, lse, piece.causal)


Messages = dict[int, Tensor]
"""Step -> keys and values or their gradients, (2, M, K, C)."""


def _keys(own_2NKC: Tensor, plan: RingPlan, ring: Ring) -> Iterator[tuple[int, Tensor]]:
    """Yield (step, keys and values of that step), this rank's first; later ones are received meanwhile."""
    ready = {0: own_2NKC}
    for steps in [*_rounds(ring), ()]:
        sent = {step: torch.cat([own_2NKC[:, at] for at in (*plan.sends[step], slice(0))], 1) for step in steps}
        coming = _DocumentExchange(sent, [plan.receives[step] for step in steps], 1, KEYS, ring) if sent else None
        yield from ready.items()
        ready = coming.wait() if coming else {}


def _rounds(ring: Ring) -> list[Sequence[int]]:
    """Return groups of steps; the messages of a group are sent together."""
    steps = range(1, ring.group.size())
    return [steps] if ring.together else [(step,) for step in steps]


class _GradientReturns:
    """Gradients of received keys and values, which are sent back to the ranks that these came from."""

    def __init__(self, sum_2NKC: Tensor, plan: RingPlan, ring: Ring) -> None:
        """`sum_2NKC`: the gradients that come back are added to it."""
        self._sum_2NKC, self._plan, self._ring = sum_2NKC, plan, ring
        self._waiting: Messages = {}
        self._exchanges: list[_DocumentExchange] = []

    def start(self, step: int, found_2MKC: Tensor) -> None:
        """Start to send the gradients of a step, unless they are sent with the gradients of other steps."""
        self._waiting[step] = found_2MKC
        if not self._ring.together or len(self._waiting) == self._ring.group.size() - 1:
            counts = [sum(at.stop - at.start for at in self._plan.sends[step]) for step in self._waiting]
            self._exchanges.append(_DocumentExchange(self._waiting, counts, -1, GRADIENTS, self._ring))
            self._waiting = {}

    def finish(self) -> None:
        """Add the gradients that come back."""
        for exchange in self._exchanges:
            for step, found_2MKC in exchange.wait().items():
                first = 0
                for at in self._plan.sends[step]:
                    tokens = at.stop - at.start
                    self._sum_2NKC[:, at] += found_2MKC[:, first : first + tokens]
                    first += tokens


class _DocumentExchange:
    """Messages of some steps in flight: `sent[s]` goes to the rank s places further, or with `towards` -1 s places
    back; `counts` tokens arrive from the rank as far on the other side."""

    def __init__(self, sent: Messages, counts: Sequence[int], towards: int, tag: int, ring: Ring) -> None:
        self._sent = sent  # in memory until they have arrived
        some = next(iter(sent.values()))
        shapes = {step: (2, count, *some.shape[2:]) for step, count in zip(sent, counts, strict=True)}
        n, rank = ring.group.size(), ring.group.rank()
        if ring.together:
            order = [(towards * (other - rank)) % n for other in range(n)]  # the step of each receiving rank
            back = [-step % n for step in order]
            out = torch.cat([sent[step].flatten() for step in order if step])
            sizes = [sent[step].numel() if step else 0 for step in order]
            sizes_in = [math.prod(shapes[step]) if step else 0 for step in back]
            received = some.new_empty(sum(sizes_in))
            work = dist.all_to_all_single(received, out, sizes_in, sizes, group=ring.group, async_op=True)
            self._works: Sequence[dist.Work | PendingMessage] = [work]
            parts = zip(back, received.split(sizes_in), strict=True)
            self._received = {step: part.view(shapes[step]) for step, part in parts if step}
            self._sent = {0: out}
            return
        self._received = {step: some.new_empty(shape) for step, shape in shapes.items()}
        messages = []
        for step, tensor in sent.items():
            to, come_from = (rank + towards * step) % n, (rank - towards * step) % n
            if tensor.numel():
                messages.append(TensorMessage(True, tensor, to, IN_WORDS[tag]))
            if (empty := self._received[step]).numel():
                messages.append(TensorMessage(False, empty, come_from, IN_WORDS[tag]))
        self._works = start(messages, ring.group, "cp", tag)

    def wait(self) -> Messages:
        """Return the received messages."""
        for work in self._works:
            work.wait()
        return dict(sorted(self._received.items()))


def _heads_first(x_NHC: Tensor) -> Tensor:
    """(N, H, C) -> (1, H, N, C), a view."""
    return x_NHC.transpose(0, 1).unsqueeze(0)


def _tokens_first(x_1HNC: Tensor) -> Tensor:
    """(1, H, N, C) -> (N, H, C), a view."""
    return x_1HNC.squeeze(0).transpose(0, 1)
