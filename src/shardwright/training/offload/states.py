"""The optimizer states of a rank in a file, in chunks: read ahead, updated in a buffer, written in the background.

A chunk contains all states of some elements of some parameters, so that it is one request. One thread executes requests
in order. There are three buffers: while a chunk is updated in one buffer, the previous chunk is written from the
second, and then the next chunk is read into the third.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwright.layout.layout import Layout
from shardwright.optimizers import OFFLOAD_CHUNK_BYTES
from shardwright.parallel.norm import local_part
from shardwright.system.units import MiB, round_up
from shardwright.training.offload.scratch import BLOCK, OffloadFile, scratch_file

BUFFERS = 3
CUT = 512
"""Parameters are cut at multiples of CUT elements: whole vectors of any processor. The elements at the end of a tensor
that an update computes one by one are therefore the same as without cuts."""
_ALIGNED = 64


@dataclass(frozen=True)
class Disk:
    """Optimizer states in `folder`, in chunks of about `chunk_bytes`. `opened(folder, bytes)`: this rank's file."""

    folder: Path
    chunk_bytes: int = OFFLOAD_CHUNK_BYTES
    opened: Callable[[Path, int], OffloadFile] = scratch_file


@dataclass(frozen=True)
class Host:
    """Optimizer states in host memory. Parameters are updated in buckets of at most `bucket_bytes`, or of one."""

    bucket_bytes: int = 64 * MiB


Where = Disk | Host | None
"""The location of a run's optimizer states; None: on the device."""


def states_location(
    layout: Layout,
    folder: Path,
    part_bytes: int | None = None,
    opened: Callable[[Path, int], OffloadFile] = scratch_file,
) -> Where:
    """Return the location of the optimizer states in a layout.

    `folder`: for states on a disk. `part_bytes`: size of a chunk or bucket instead of the default. `opened`: as in
    `Disk`. None if the states are with the parameters, on the device or the host.
    """
    sized = () if part_bytes is None else (part_bytes,)
    if layout.offload_optimizer == "disk":
        return replace(Disk(folder, *sized), opened=opened)
    if layout.offload_optimizer == "cpu" and layout.offload_parameters == "none":
        return Host(*sized)
    return None


class OffloadedParameter(NamedTuple):
    """A parameter of an optimizer group, the types of its states by name, and its counters, which stay in memory."""

    group: dict[str, Any]
    parameter: nn.Parameter
    dtypes: Mapping[str, torch.dtype]
    counters: Mapping[str, Tensor]


@dataclass(frozen=True)
class StatePiece:
    """Elements [first, first + count) of this rank's flattened shard of a parameter. `at`: for each state its first
    byte in the chunk. `last`: whether these are the last elements of the shard."""

    member: OffloadedParameter
    first: int
    count: int
    at: dict[str, int]
    last: bool


@dataclass
class Chunk:
    """`n_bytes` bytes of the file from byte `begin`, both multiples of BLOCK."""

    begin: int
    pieces: list[StatePiece] = field(default_factory=list)
    used: int = 0

    @property
    def n_bytes(self) -> int:
        return round_up(self.used, BLOCK)


class StatesOnDisk:
    """The states of `members`, initially zero, in a file of this rank. Construction is a collective over all ranks.

    Raises InputError if there is no room for the files of all ranks, or if no file can be created. After a disk failure
    the next call raises WorkerError.
    """

    def __init__(self, members: Sequence[OffloadedParameter], disk: Disk) -> None:
        self.chunks = in_chunks(members, disk.chunk_bytes)
        n_bytes = sum(chunk.n_bytes for chunk in self.chunks)
        self.file = disk.opened(disk.folder, n_bytes)
        largest = max((chunk.n_bytes for chunk in self.chunks), default=BLOCK)
        self._buffers = [mmap(-1, largest, flags=MAP_PRIVATE | MAP_ANONYMOUS) for _ in range(BUFFERS)]
        self._thread = ThreadPoolExecutor(1, "optimizer-states")
        self._writes: deque[Future[None]] = deque()
        self._stored = _stored(self, members)

    @property
    def buffer_bytes(self) -> int:
        """Return the bytes of the buffers for chunks in host memory."""
        return sum(map(len, self._buffers))

    def stored_states(self, parameter: nn.Parameter) -> dict[str, "StoredTensor"]:
        """Return the states of this rank's shard of a parameter, by name."""
        return self._stored[parameter]

    def in_turn(self) -> Iterator[tuple[Chunk, Tensor]]:
        """Yield each chunk with its bytes, which may be modified until the next chunk is requested."""
        self._require_written()
        ahead = deque(self._read_ahead(number) for number in range(min(BUFFERS - 1, len(self.chunks))))
        for number, chunk in enumerate(self.chunks):
            ahead.popleft().result()
            yield chunk, torch.frombuffer(self._buffers[number % BUFFERS], dtype=torch.uint8)
            self._writes.append(self._thread.submit(self.file.write, chunk.begin, self._part(number), direct=True))
            if number + BUFFERS - 1 < len(self.chunks):
                # Into the buffer of the previous chunk, whose write is ahead of this read in the queue.
                ahead.append(self._read_ahead(number + BUFFERS - 1))

    def read(self, at: int, into: Tensor) -> None:
        """Fill a tensor from byte `at`, after all earlier writes."""
        self._require_written()
        self._thread.submit(self.file.read, at, _bytes(into)).result()

    def write(self, at: int, data: Tensor) -> None:
        """Write a tensor from byte `at`, after all earlier reads and writes."""
        self._thread.submit(self.file.write, at, _bytes(data)).result()

    def _read_ahead(self, number: int) -> "Future[None]":
        return self._thread.submit(self.file.read, self.chunks[number].begin, self._part(number), direct=True)

    def _part(self, number: int) -> memoryview:
        return memoryview(self._buffers[number % BUFFERS])[: self.chunks[number].n_bytes]

    def _require_written(self) -> None:
        """Wait for pending writes and raise their error."""
        while self._writes:
            self._writes.popleft().result()


class StoredTensor:
    """A state of this rank's shard of a parameter, in the file."""

    def __init__(self, states: StatesOnDisk, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.shape, self.dtype = tuple(shape), dtype
        self.runs: list[tuple[int, int, int]] = []
        """Runs of consecutive elements: first byte in the file, first element, number of elements."""
        self._states = states

    def read(self) -> Tensor:
        """Return the whole state on the CPU."""
        flat = torch.empty(math.prod(self.shape), dtype=self.dtype)
        for at, first, count in self.runs:
            self._states.read(at, flat[first : first + count])
        return flat.view(self.shape)

    def write(self, offsets: Sequence[int], part: Tensor) -> None:
        """Write `part` into the box that starts at `offsets`."""
        whole = self.read()
        box = tuple(slice(at, at + size) for at, size in zip(offsets, part.shape, strict=True))
        whole[box] = part
        flat = whole.view(-1)
        for at, first, count in self.runs:
            self._states.write(at, flat[first : first + count])


def in_chunks(members: Iterable[OffloadedParameter], chunk_bytes: int) -> list[Chunk]:
    """Return chunks of about `chunk_bytes` or less with every element of every parameter once, in order."""
    chunks = [Chunk(0)]
    for member in members:
        sizes = {name: dtype.itemsize for name, dtype in member.dtypes.items()}
        first, numel = 0, local_part(member.parameter).numel()
        while first < numel:
            chunk, left = chunks[-1], numel - first
            count = max(0, min(left, (chunk_bytes - chunk.used) // sum(sizes.values())))
            if count < left:
                count -= count % CUT
            if not count and chunk.pieces:
                chunks.append(Chunk(chunk.begin + chunk.n_bytes))
                continue
            count = count or min(left, CUT)
            at = {}
            for name, size in sizes.items():
                at[name] = chunk.used
                chunk.used += round_up(count * size, _ALIGNED)
            chunk.pieces.append(StatePiece(member, first, count, at, first + count == numel))
            first += count
        if not numel:  # it has counters to advance
            chunks[-1].pieces.append(StatePiece(member, 0, 0, dict.fromkeys(sizes, chunks[-1].used), True))
    return [chunk for chunk in chunks if chunk.pieces]


def _stored(states: StatesOnDisk, members: Iterable[OffloadedParameter]) -> dict[nn.Parameter, dict[str, StoredTensor]]:
    result = {
        entry.parameter: {
            name: StoredTensor(states, local_part(entry.parameter).shape, dtype) for name, dtype in entry.dtypes.items()
        }
        for entry in members
    }
    for chunk in states.chunks:
        for piece in chunk.pieces:
            for name, at in piece.at.items():
                result[piece.member.parameter][name].runs.append((chunk.begin + at, piece.first, piece.count))
    return result


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy().data)
