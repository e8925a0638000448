"""Messages between two ranks, with a record of the messages that this rank has started and waits for.

PyTorch's Flight Recorder records a rank's collectives, but no messages on gloo. The monitor of hanging runs
(`training/resilience/monitor.py`) reads this record from its own thread.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor


class TensorMessage(NamedTuple):
    """A tensor to send to, or receive from, rank `peer` of a process group. `what`: its contents, in words."""

    sends: bool
    tensor: Tensor
    peer: int
    what: str


class MessageChannel(NamedTuple):
    """Messages of one kind from rank `source` to rank `target` of the world. Both ranks start them in the same order,
    so message number n is the same message on both."""

    axis: str
    tag: int
    source: int
    target: int


class PendingMessage:
    """A started message: number `number`, counted from 1, of its line."""

    def __init__(self, message: TensorMessage, work: Any, line: MessageChannel, number: int) -> None:
        self.what, self.tensor, self.line, self.number = message.what, message.tensor, line, number
        self._work = work

    def wait(self) -> Tensor:
        """Wait until the message is sent or received, and return its tensor."""
        _waited_for.append(self)
        try:
            self._work.wait()
        finally:
            _waited_for.remove(self)
        return self.tensor

    def is_completed(self) -> bool:
        """Return whether the message is known to be sent or received; on gloo only after `wait`."""
        return bool(self._work.is_completed())


_n_launches = 0
_begun: Counter[MessageChannel] = Counter()
_waited_for: list[PendingMessage] = []


def begun() -> dict[MessageChannel, int]:
    """Return the number of the last message of each line that this rank has started."""
    return dict(_begun)


def launches() -> int:
    """Return how often this rank has started messages, several together counted once."""
    return _n_launches


def waited_for() -> list[PendingMessage]:
    """Return the messages that this rank waits for now."""
    return list(_waited_for)


_connected: WeakSet[dist.ProcessGroup] = WeakSet()


def connect(group: dist.ProcessGroup) -> None:
    """Start NCCL's communicator of a group with a message of all of its ranks, at the first call for the group.

    NCCL starts a communicator at its first message and waits for all ranks of the group. Ranks that have a message
    would wait for ranks that have none. Every rank of the group calls this at the same place."""
    if group not in _connected and "nccl" in str(dist.get_backend_config(group)):
        dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
    _connected.add(group)


def start(messages: Sequence[TensorMessage], group: dist.ProcessGroup, axis: str, tag: int = 0) -> list[PendingMessage]:
    """Start messages, on NCCL in one launch in which none waits for another. Messages of one `tag` between two ranks
    arrive in the order in which they were sent. `axis`: the axis of the layout along which the group lies. If some
    ranks of the group may have no message, all of them have called `connect` before."""
    if not messages:
        return []
    ranks, own = dist.get_process_group_ranks(group), dist.get_rank()
    ends = ((own, ranks[message.peer]) if message.sends else (ranks[message.peer], own) for message in messages)
    lines = [MessageChannel(axis, tag, source, target) for source, target in ends]
    numbers = []
    for line in lines:
        _begun[line] += 1
        numbers.append(_begun[line])
    global _n_launches
    _n_launches += 1
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(
                dist.isend if message.sends else dist.irecv,
                message.tensor,
                group=group,
                tag=tag,
                group_peer=message.peer,
            )
            for message in messages
        ]
    )
    works *= len(messages) // len(works)  # NCCL returns one for the whole batch
    return [PendingMessage(*started) for started in zip(messages, works, lines, numbers, strict=True)]
