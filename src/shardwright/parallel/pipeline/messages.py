"""Asynchronous point-to-point messages between the ranks of `pp`.

A rank's list defines where it starts the messages of an exchange (`schedule.messages`). Each exchange is one
`batch_isend_irecv` on a process group of its two ranks. Sends and receives return at once; an action waits only for the
tensor that it needs; a sent tensor is freed when its send is complete.

This cannot deadlock on NCCL, for any schedule that orders every action after its dependencies:

- NCCL matches the messages of two ranks by order, without tags, and runs the operations of a process group one after
  another on one stream. Both ranks have the same exchanges between them in the same order. The two directions of an
  exchange are one grouped launch, in which neither waits for the other.
- An exchange begins when the previous one on its process group is done and, on both ranks, the actions before it in
  their lists (its stream waits for the computation started before it). An action begins when the previous one on its
  rank is done, and the exchange that brings its input. All of these come earlier in the common order of rounds from
  which the lists are made, so there is no cyclic wait. There is none even if a rank waits at each exchange for the
  other rank (tests/schedule/test_messages.py), so nothing relies on messages being buffered.
- Ranks of tp, cp, ep and data with the same rank of `pp` have the same list. Their collectives are parts of actions, so
  all of them start these in the same order.
- The first call on a process group creates its communicator, for which NCCL needs all its ranks; an exchange includes
  both.
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Literal

import torch.distributed as dist
from torch import Tensor

from shardwright.parallel.point_to_point import PendingMessage, TensorMessage, start
from shardwright.schedule.messages import PairExchange

Need = tuple[int, Literal["F", "B"], int]
"""(stage, op, micro-batch): the input of the stage for F, the gradient of its output for B."""


class PipelineMessages:
    """Sends and receives the messages of this rank, and keeps the incomplete ones."""

    def __init__(self, rank: int, groups: Mapping[tuple[int, ...], dist.ProcessGroup]) -> None:
        """`rank`: this rank of `pp`; `groups`: (lower rank, higher rank) of `pp` -> the process group of the two, for
        every rank that exchanges messages with this one."""
        self.rank, self.groups = rank, groups
        self._sending: deque[PendingMessage] = deque()
        self._receiving: dict[Need, PendingMessage] = {}

    def start(self, exchange: PairExchange, results: dict[Need, Tensor], empty: Callable[[], Tensor]) -> None:
        """Start the messages of one exchange: send tensors of `results`, removing them from it, and receive into new
        tensors from `empty`."""
        peer, messages = 0 if self.rank == exchange.high else 1, []
        for stage, op, microbatch, sender, _ in exchange.messages:
            sends = sender == self.rank
            tensor = results.pop((stage, op, microbatch)).contiguous() if sends else empty()
            messages.append(TensorMessage(sends, tensor, peer, f"the input of {stage}{op}{microbatch}"))
        started = start(messages, self.groups[exchange.low, exchange.high], "pp")
        for (stage, op, microbatch, sender, _), message in zip(exchange.messages, started, strict=True):
            if sender == self.rank:
                self._sending.append(message)
            else:
                self._receiving[stage, op, microbatch] = message
        while self._sending and self._sending[0].is_completed():
            self._sending.popleft()

    def receive(self, need: Need) -> Tensor:
        """Wait for a message whose receive was started; return its tensor."""
        return self._receiving.pop(need).wait()

    def finish(self) -> None:
        """Wait until all sends are complete."""
        assert not self._receiving
        while self._sending:
            self._sending.popleft().wait()
