"""Messages between two ranks: starts them, and knows which of them this rank has begun and which it waits for.

PyTorch's Flight Recorder keeps the collectives of a rank, and on gloo no messages. What is known here is for the
monitor of a run that hangs (`training/resilience/monitor.py`), which reads it from a thread of its own.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor


class Message(NamedTuple):
    """A tensor that is sent to, or received from, rank `peer` of a process group. `what`: what is in it, in words."""

    sends: bool
    tensor: Tensor
    peer: int
    what: str


class Line(NamedTuple):
    """Messages of one kind from rank `source` to rank `target` of the world. Both begin the same ones in the same
    order, so that number n of one is number n of the other."""

    axis: str
    tag: int
    source: int
    target: int


class OnItsWay:
    """A message that has been started: number `number`, counted from 1, of its line."""

    def __init__(self, message: Message, work: Any, line: Line, number: int) -> None:
        self.what, self.tensor, self.line, self.number = message.what, message.tensor, line, number
        self._work = work

    def wait(self) -> Tensor:
        """Wait until it has been sent, or has come; its tensor."""
        _waited_for.append(self)
        try:
            self._work.wait()
        finally:
            _waited_for.remove(self)
        return self.tensor

    def is_completed(self) -> bool:
        """Whether it is known to have been sent, or to have come; on gloo it is once it was waited for."""
        return bool(self._work.is_completed())


_begun: Counter[Line] = Counter()
_waited_for: list[OnItsWay] = []


def begun() -> dict[Line, int]:
    """The number of the last message of each line that this rank has begun to send or to receive."""
    return dict(_begun)


def waited_for() -> list[OnItsWay]:
    """The messages that this rank waits for now."""
    return list(_waited_for)


def start(messages: Sequence[Message], group: dist.ProcessGroup, axis: str, tag: int = 0) -> list[OnItsWay]:
    """Start messages, on NCCL in one launch in which none waits for another; those of one `tag` between two ranks
    arrive in the order in which they were sent. `axis`: of the layout, along which the group lies."""
    if not messages:
        return []
    ranks, here = dist.get_process_group_ranks(group), dist.get_rank()
    ends = ((here, ranks[each.peer]) if each.sends else (ranks[each.peer], here) for each in messages)
    lines = [Line(axis, tag, source, target) for source, target in ends]
    numbers = []
    for line in lines:
        _begun[line] += 1
        numbers.append(_begun[line])
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(
                dist.isend if each.sends else dist.irecv, each.tensor, group=group, tag=tag, group_peer=each.peer
            )
            for each in messages
        ]
    )
    works *= len(messages) // len(works)  # NCCL returns one for the whole batch
    return [OnItsWay(*each) for each in zip(messages, works, lines, numbers, strict=True)]
