"""CUDA streams and events without a GPU: everything is computed at once, on the CPU, and what is checked is the order.

Each stream, and the host, has a vector clock (Mattern 1988, as in race detectors): how much of the work of each other
it is known to come after. An operation on tensors of the device belongs to the current stream, one on tensors of the
host alone to the host. Waiting for a stream or an event joins clocks. An operation that reads what another wrote, or
writes what another read or wrote, without coming after it, is a race: on a GPU it may see older or newer values. So is
memory that is freed, and may be given to the next operation of its stream, while another stream still uses it.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwright.parallel import offload
from shardwright.training.offload import on_host

DEVICE = torch.device("cpu", 0)
"""What is made on this device, and all that is computed from tensors there, counts as memory of the GPU; pinned memory
and all else is the host's."""
HOST = 0
Clock = dict[int, int]
"""Number of a stream, or HOST -> how many of its operations come before."""


@dataclass
class _Storage:
    """Who wrote a storage last, and who has read it since, each with the operation's number and name. `owner`: the
    stream whose memory it is, None for the host's; `recorded`: the streams that it is kept for after it is freed."""

    reference: StorageWeakRef
    owner: int | None = None
    written: tuple[int, int, str] = (HOST, 0, "")
    read: dict[int, tuple[int, str]] = field(default_factory=dict)
    recorded: set[int] = field(default_factory=set)

    def uses(self) -> list[tuple[int, int, str]]:
        """The operations that may not be over: stream, number and name."""
        return [self.written, *((by, *each) for by, each in self.read.items())]


class Streams:
    """The streams of one device, and the races that were seen."""

    def __init__(self) -> None:
        self.races: list[str] = []
        self.clocks: dict[int, Clock] = {HOST: {HOST: 0}}
        self.default = FakeStream(self)
        self._here = threading.local()
        self._storages: dict[int, _Storage] = {}

    @property
    def current(self) -> "FakeStream":
        """The current stream of this thread."""
        return getattr(self._here, "stream", self.default)

    @contextmanager
    def switch_to(self, stream: "FakeStream") -> Iterator[None]:
        """What `torch.cuda.stream` does."""
        before, self._here.stream = self.current, stream
        try:
            yield
        finally:
            self._here.stream = before

    def on_device(self, *tensors: Tensor) -> None:
        """Let the memory of tensors be the device's, written by the current stream."""
        for tensor in tensors:
            self._storage(tensor).owner = self.current.number
            self.ran("the operation that made it", [], [tensor])

    def allocated(self, tensor: Tensor) -> None:
        """Let a new tensor have memory of the current stream, whose operations up to now may still use it."""
        stream, storage = self.current.number, self._storage(tensor)
        storage.owner = stream
        storage.written = stream, self.clocks[stream].get(stream, 0), "what had the memory before"

    def record(self, tensor: Tensor, stream: "FakeStream") -> None:
        """What `Tensor.record_stream` does."""
        self._storage(tensor).recorded.add(stream.number)

    def host_reads(self, tensor: Tensor) -> None:
        """The host reads a tensor, in another way than by an operation of PyTorch."""
        self._check(HOST, "the host", [tensor], [])

    def ran(self, name: str, read: list[Tensor], written: list[Tensor], blocking: bool = False) -> None:
        """Note an operation; `blocking`: if it is between host and device, the host waits until it is done."""
        self.look_for_freed()
        new = [each for each in written if id_of(each) not in self._storages]
        places = {self._storage(each).owner is not None for each in (*read, *written) if id_of(each) in self._storages}
        if True not in places:
            self._check(HOST, name, read, written)
            return
        stream = self.current.number
        for each in new:
            self._storage(each).owner = stream
        join(self.clocks[stream], self.clocks[HOST])  # launched now
        self._check(stream, name, read, written)
        if blocking and False in places:
            self.clocks[HOST] |= self.clocks[stream]

    def look_for_freed(self) -> None:
        """Forget storages that are no longer there, and see that their streams come after all uses of them."""
        for number, storage in [*self._storages.items()]:
            if not storage.reference.expired():
                continue
            del self._storages[number]
            if storage.owner is not None:
                over = dict(self.clocks[storage.owner])
                for stream in storage.recorded:
                    join(over, self.clocks[stream])
                late = [name for by, at, name in storage.uses() if over.get(by, 0) < at]
                self.races += [f"memory is free while {name} may still use it" for name in late]

    def _storage(self, tensor: Tensor) -> _Storage:
        return self._storages.setdefault(id_of(tensor), _Storage(StorageWeakRef(tensor.untyped_storage())))

    def _check(self, actor: int, name: str, read: list[Tensor], written: list[Tensor]) -> None:
        clock = self.clocks[actor]
        at = clock[actor] = clock.get(actor, 0) + 1
        for tensor in (*read, *written):
            by, number, what = self._storage(tensor).written
            if clock.get(by, 0) < number:
                self.races.append(f"{name} does not wait for {what}")
        for tensor in written:
            for by, (number, what) in self._storage(tensor).read.items():
                if clock.get(by, 0) < number:
                    self.races.append(f"{name} writes what {what} may still read")
        for tensor in read:
            self._storage(tensor).read[actor] = at, name
        for tensor in written:
            self._storage(tensor).written, self._storage(tensor).read = (actor, at, name), {}


class FakeStream:
    """As `torch.cuda.Stream`."""

    def __init__(self, streams: Streams) -> None:
        self.streams, self.device, self.number = streams, DEVICE, len(streams.clocks)
        streams.clocks[self.number] = {}

    @property
    def clock(self) -> Clock:
        return self.streams.clocks[self.number]

    def wait_event(self, event: "FakeEvent") -> None:
        join(self.clock, event.clock)

    def wait_stream(self, stream: "FakeStream") -> None:
        join(self.clock, stream.clock)

    def record_event(self) -> "FakeEvent":
        event = FakeEvent(self.streams)
        event.record(self)
        return event

    def synchronize(self) -> None:
        join(self.streams.clocks[HOST], self.clock)


class FakeEvent:
    """As `torch.cuda.Event`; `wait` is also that of the work of a collective."""

    def __init__(self, streams: Streams) -> None:
        self.streams, self.clock = streams, Clock()

    def record(self, stream: FakeStream | None = None) -> None:
        self.clock = dict((stream or self.streams.current).clock)

    def wait(self, stream: FakeStream | None = None) -> None:
        (stream or self.streams.current).wait_event(self)

    def synchronize(self) -> None:
        join(self.streams.clocks[HOST], self.clock)


def join(clock: Clock, other: Clock) -> None:
    """Let `clock` come after all that `other` comes after."""
    for number, at in other.items():
        clock[number] = max(clock.get(number, 0), at)


def id_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _Watched(TorchDispatchMode):
    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self.streams = streams

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        pinned = kwargs.pop("pin_memory", None)
        result = func(*args, **kwargs)
        schema = func._schema
        if any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns):
            return result  # a view
        given = {each.name: value for each, value in zip(schema.arguments, args, strict=False)} | kwargs
        writes = {each.name for each in schema.arguments if each.alias_info is not None and each.alias_info.is_write}
        read = [x for name, value in given.items() if name not in writes for x in tensors_of(value)]
        written = [x for name in writes & given.keys() for x in tensors_of(given[name])]
        if not written:
            written = tensors_of(result)
            if kwargs.get("device") == DEVICE and not pinned and "empty" in schema.name:
                self.streams.allocated(*written)
                return result
        self.streams.ran(schema.name.partition("::")[2], read, written, not given.get("non_blocking", False))
        return result


def tensors_of(value: Any) -> list[Tensor]:
    return [x for x in tree_leaves(value) if isinstance(x, Tensor)]


@contextmanager
def watched(streams: Streams) -> Iterator[None]:
    """Watch the operations of this thread. The functions of `torch.cuda` that make streams and events make these,
    memory of the host is pinned where that is asked for, and an all-reduce is on a stream of its own."""

    def all_reduce(tensor: Tensor, *_: Any, async_op: bool = False) -> FakeEvent:
        stream = FakeStream(streams)
        stream.wait_stream(streams.current)
        with streams.switch_to(stream):
            streams.ran("all_reduce", [tensor], [tensor])
        work = stream.record_event()
        if not async_op:
            work.wait()
        return work

    def tolist(tensor: Tensor, own: Any = Tensor.tolist) -> Any:
        streams.host_reads(tensor)
        return own(tensor)

    with pytest.MonkeyPatch.context() as patch, _Watched(streams):
        patch.setattr(torch.cuda, "Stream", lambda *_: FakeStream(streams))
        patch.setattr(torch.cuda, "Event", lambda **_: FakeEvent(streams))
        patch.setattr(torch.cuda, "stream", streams.switch_to)
        patch.setattr(torch.cuda, "current_stream", lambda *_: streams.current)
        patch.setattr(torch.cuda, "default_stream", lambda *_: streams.default)
        patch.setattr(Tensor, "record_stream", lambda x, stream: streams.record(x, stream))
        patch.setattr(Tensor, "tolist", tolist)
        for module in (on_host, on_host, offload):
            patch.setattr(module, "pins", lambda device: True)
        patch.setattr(dist, "all_reduce", all_reduce)
        patch.setattr(dist, "get_world_size", lambda *_: 1)
        yield
