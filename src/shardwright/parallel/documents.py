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

The messages of a step overlap with the attention of the step before (`model/piece_attention.py`). Gradients are sent
in the activations' type and summed in fp32 or wider. Attention within a window, with or without documents, is planned
and computed in the same way: keys outside of the windows of a rank's queries are not sent to it.

Shapes: B sequences, T tokens of each (local), N = B T, M tokens received, H heads, K kv heads, C width of one head, r
ranks of the ring; 2 is k and v.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.parallel.point_to_point import PendingMessage, TensorMessage, start
from shardwright.parallel.ring import GRADIENTS, IN_WORDS, KEYS
from shardwright.split.documents import RingPlan


class Ring(NamedTuple):
    """A process group and how tensors are sent in it: in one all-to-all, or in a message for each step."""

    group: dist.ProcessGroup
    together: bool


Messages = dict[int, Tensor]
"""Step -> keys and values or their gradients, (2, M, K, C)."""


class RingKeys:
    """The keys and values of the ranks of a ring, as `plan` says (`model.piece_attention.KeyExchange`)."""

    def __init__(self, plan: RingPlan, ring: Ring) -> None:
        self.plan, self.ring = plan, ring

    def keys(self, own_2NKC: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield (step, keys and values of that step), this rank's first; later ones are received meanwhile."""
        return _keys(own_2NKC, self.plan, self.ring)

    def returns(self, sum_2NKC: Tensor) -> "_GradientReturns":
        """Return the way back of gradients of received keys and values."""
        return _GradientReturns(sum_2NKC, self.plan, self.ring)


def _keys(own_2NKC: Tensor, plan: RingPlan, ring: Ring) -> Iterator[tuple[int, Tensor]]:
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
