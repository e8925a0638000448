"""Asynchronous point-to-point messages between the ranks of `pp`.

A rank's list defines where it starts the messages of an exchange (`schedule.messages`). Each exchange is one
`batch_isend_irecv` on a process group of its two ranks. Sends and receives return at once; an action waits only for the
tensor that it needs; a sent tensor is freed when its send is complete.

This cannot deadlock on NCCL, for any schedule that orders every action after its dependencies:

- NCCL matches the messages of two ranks by order, without tags, and runs the operations of a process group one after
  another on one stream. Both ranks have the same exchanges between them in the same order. The two directions of an
  exchange are one grouped launch, in which neither waits for the other.
- An exchange starts when the previous one on its process group is done and, on both ranks, the actions before it in
  their lists (its stream waits for the computation started before it). An action starts when the previous one on its
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

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.parallel.compression import Codec, decode_rows, encode_rows
from shardwright.parallel.observer import MessageWait, Need, Observer, PostedMessage, ReceivedMessage
from shardwright.parallel.point_to_point import PendingMessage, TensorMessage, start
from shardwright.schedule.messages import PairExchange
from shardwright.split.compression import transit_row_bytes


class PipelineMessages:
    """Sends and receives the messages of this rank, and keeps the incomplete ones."""

    def __init__(
        self, rank: int, groups: Mapping[tuple[int, ...], dist.ProcessGroup], codec: Codec | None, observer: Observer
    ) -> None:
        """`rank`: this rank of `pp`; `groups`: (lower rank, higher rank) of `pp` -> the process group of the two, for
        every rank that exchanges messages with this one. `codec`: the encoding of messages, if they are compressed."""
        self.rank, self.groups, self.codec, self.observer = rank, groups, codec, observer
        self._sending: deque[PendingMessage] = deque()
        self._receiving: dict[Need, PendingMessage] = {}
        self._shapes: dict[Need, tuple[torch.Size, torch.dtype]] = {}
        """Of the tensors that arrive encoded."""

    def start(self, exchange: PairExchange, results: dict[Need, Tensor], empty: Callable[[], Tensor]) -> None:
        """Start the messages of one exchange: send tensors of `results`, removing them from it, and receive into new
        tensors from `empty`."""
        peer, messages = 0 if self.rank == exchange.high else 1, []
        for stage, op, microbatch, sender, _ in exchange.messages:
            sends = sender == self.rank
            need: Need = (stage, op, microbatch)
            self.observer.transfer(PostedMessage(need, sender, results[need] if sends else None))
            tensor = results.pop(need).contiguous() if sends else self._room(need, empty())
            if sends and self.codec is not None:
                tensor = encode_rows(tensor, self.codec)
            messages.append(TensorMessage(sends, tensor, peer, f"the input of {stage}{op}{microbatch}"))
        started = start(messages, self.groups[exchange.low, exchange.high], "pp")
        for (stage, op, microbatch, sender, _), message in zip(exchange.messages, started, strict=True):
            if sender == self.rank:
                self._sending.append(message)
            else:
                self._receiving[stage, op, microbatch] = message
        while self._sending and self._sending[0].is_completed():
            self._sending.popleft()

    def receive(self, wait: MessageWait) -> Tensor:
        """Wait for a message whose receive was started; return its tensor."""
        need = wait.need
        with self.observer.during(wait):
            tensor = self._receiving.pop(need).wait()
        if self.codec is not None:
            shape, dtype = self._shapes.pop(need)
            tensor = decode_rows(tensor, self.codec, shape[-1], dtype).view(shape)
        self.observer.transfer(ReceivedMessage(need, tensor))
        return tensor

    def _room(self, need: Need, tensor: Tensor) -> Tensor:
        """Return the tensor to receive into: `tensor`, or the bytes of its encoded rows."""
        if self.codec is None:
            return tensor
        self._shapes[need] = tensor.shape, tensor.dtype
        columns = tensor.shape[-1]
        return tensor.new_empty(tensor.numel() // columns, transit_row_bytes(columns), dtype=torch.uint8)

    def finish(self) -> None:
        """Wait until all sends are complete; no receive may be left."""
        assert not self._receiving
        self.wait_until_sent()

    def wait_until_sent(self) -> None:
        """Wait until all sends are complete, and free their tensors."""
        while self._sending:
            self._sending.popleft().wait()
