"""Point-to-point messages between the ranks of `pp`: started where the rank's list says, waited for where needed.

Each exchange of the list (`schedule.messages`) is one `batch_isend_irecv` on a process group of its two ranks. Sends
and receives return at once; an action waits for the one tensor it needs; a sent tensor is let go when it has left.

Why this cannot deadlock on NCCL, for any schedule in which everything comes after what it needs:

- NCCL matches messages of two ranks by order, without tags, and runs what was started on a group one after another on
  one stream. Both ranks have the same exchanges between them in the same order, and what goes both ways in one exchange
  is one grouped launch, in which neither direction waits for the other.
- An exchange begins when the one before it on its group is done, and when on both ranks the actions before it in their
  lists are done (its stream waits for what was computed until then). An action begins when the one before it on its
  rank is done, and the exchange that brings what it needs. All of these come earlier in the common order of rounds from
  which the lists are made, so nothing waits in a circle. It would even end if a rank waited at each exchange for the
  other end (tests/schedule/test_messages.py), so nothing relies on messages being buffered.
- Ranks that share an action (those of tp, cp, ep and data at the same place of `pp`) have the same list. Their
  collectives are parts of actions, and so have their place in the same order.
- The first call on a group makes its communicator, for which NCCL needs all its ranks; both are in every exchange.
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Literal

import torch.distributed as dist
from torch import Tensor

from shardwright.schedule.messages import Exchange

Need = tuple[int, Literal["F", "B"], int]
"""(stage, op, micro-batch): the input of the stage for F, the gradient of its output for B."""


class Messages:
    """The messages of this rank that are under way."""

    def __init__(self, rank: int, groups: Mapping[tuple[int, ...], dist.ProcessGroup]) -> None:
        """`rank` is of `pp`; `groups` has the group of this rank and each rank that it exchanges with, by both ranks of
        `pp`, the lower first."""
        self.rank, self.groups = rank, groups
        self._sending: deque[tuple[dist.Work, Tensor]] = deque()
        self._receiving: dict[Need, tuple[dist.Work, Tensor]] = {}

    def start(self, exchange: Exchange, results: dict[Need, Tensor], empty: Callable[[], Tensor]) -> None:
        """Start the messages of one exchange: send those of `results`, which are taken out of it, and receive into
        new tensors that `empty` makes."""
        ops = []
        for stage, op, microbatch, sender, _ in exchange.messages:
            sends = sender == self.rank
            tensor = results.pop((stage, op, microbatch)).contiguous() if sends else empty()
            ops.append(
                dist.P2POp(
                    dist.isend if sends else dist.irecv,
                    tensor,
                    group=self.groups[exchange.low, exchange.high],
                    group_peer=0 if self.rank == exchange.high else 1,
                )
            )
        works = dist.batch_isend_irecv(ops)
        works *= len(ops) // len(works)  # NCCL has one for the batch
        for (stage, op, microbatch, sender, _), started, work in zip(exchange.messages, ops, works, strict=True):
            if sender == self.rank:
                self._sending.append((work, started.tensor))
            else:
                self._receiving[stage, op, microbatch] = work, started.tensor
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()

    def receive(self, need: Need) -> Tensor:
        """Wait for a message that was started."""
        work, tensor = self._receiving.pop(need)
        work.wait()
        return tensor

    def finish(self) -> None:
        """Wait until everything that was sent has left."""
        assert not self._receiving
        while self._sending:
            self._sending.popleft()[0].wait()
