"""The optimizer states of a rank in a file, in chunks: read ahead, updated in a buffer, written behind.

A chunk holds, for some elements of some parameters, all their states side by side, so that it is one request. One
thread takes requests in the order in which they are made. There are three buffers: while a chunk is updated in one, the
chunk before is written from the second, and then the chunk after is read into the third.
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
"""Parameters are cut at multiples of so many elements: whole vectors of any processor, so that the elements which an
update computes one by one, at the end of a tensor, are the same as without cuts."""
_ALIGNED = 64


@dataclass(frozen=True)
class Disk:
    """Where states go: `folder`, in chunks of about `chunk_bytes`. `opened(folder, bytes)`: the file of this rank."""

    folder: Path
    chunk_bytes: int = OFFLOAD_CHUNK_BYTES
    opened: Callable[[Path, int], OffloadFile] = scratch_file


@dataclass(frozen=True)
class Host:
    """In the memory of the host; parameters are copied and updated in buckets of at most `bucket_bytes`, or one."""

    bucket_bytes: int = 64 * MiB


Where = Disk | Host | None
"""Where the optimizer states of a run are; None: on the device."""


def where_of(
    layout: Layout,
    folder: Path,
    part_bytes: int | None = None,
    opened: Callable[[Path, int], OffloadFile] = scratch_file,
) -> Where:
    """What a layout says of them; `folder`: for those on a disk; `part_bytes`: of a chunk or bucket, if not the default
    one; `opened`: as of a `Disk`. States of parameters that are on the host themselves are beside them."""
    sized = () if part_bytes is None else (part_bytes,)
    if layout.offload_optimizer == "disk":
        return replace(Disk(folder, *sized), opened=opened)
    if layout.offload_optimizer == "cpu" and layout.offload_parameters == "none":
        return Host(*sized)
    return None


class OffloadedParameter(NamedTuple):
    """A parameter of a group of the optimizer, the types of its states by name, and its counters, which stay in
    memory."""

    group: dict[str, Any]
    parameter: nn.Parameter
    dtypes: Mapping[str, torch.dtype]
    counters: Mapping[str, Tensor]


@dataclass(frozen=True)
class StatePiece:
    """Elements [first, first + count) of this rank's flattened shard of a parameter. `at`: for each state the byte of
    its chunk at which it begins; `last`: whether these are the last elements of the shard."""

    member: OffloadedParameter
    first: int
    count: int
    at: dict[str, int]
    last: bool


@dataclass
class Chunk:
    """`n_bytes` of the file from byte `begin` on, both multiples of BLOCK."""

    begin: int
    pieces: list[StatePiece] = field(default_factory=list)
    used: int = 0

    @property
    def n_bytes(self) -> int:
        return round_up(self.used, BLOCK)


class StatesOnDisk:
    """The states of `members`, zero at first, in a file of this rank. Every rank makes one, a collective.

    Raises InputError if there is no room for those of all ranks, or no file can be made; later WorkerError, if the disk
    fails, from the next call.
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
        """Bytes of the buffers that chunks are read into and written from, in the memory of the host."""
        return sum(map(len, self._buffers))

    def stored_states(self, parameter: nn.Parameter) -> dict[str, "StoredTensor"]:
        """The states of this rank's shard of a parameter, by name."""
        return self._stored[parameter]

    def in_turn(self) -> Iterator[tuple[Chunk, Tensor]]:
        """Each chunk with its bytes, which may be changed until the next chunk is asked for."""
        self._require_written()
        ahead = deque(self._read_ahead(number) for number in range(min(BUFFERS - 1, len(self.chunks))))
        for number, chunk in enumerate(self.chunks):
            ahead.popleft().result()
            yield chunk, torch.frombuffer(self._buffers[number % BUFFERS], dtype=torch.uint8)
            self._writes.append(self._thread.submit(self.file.write, chunk.begin, self._part(number), direct=True))
            if number + BUFFERS - 1 < len(self.chunks):
                # Into the buffer of the chunk before, whose write is ahead of this in the queue.
                ahead.append(self._read_ahead(number + BUFFERS - 1))

    def read(self, at: int, into: Tensor) -> None:
        """Fill a tensor from byte `at` on, after all that was to be written before."""
        self._require_written()
        self._thread.submit(self.file.read, at, _bytes(into)).result()

    def write(self, at: int, data: Tensor) -> None:
        """Write a tensor from byte `at` on, after all that was to be read and written before."""
        self._thread.submit(self.file.write, at, _bytes(data)).result()

    def _read_ahead(self, number: int) -> "Future[None]":
        return self._thread.submit(self.file.read, self.chunks[number].begin, self._part(number), direct=True)

    def _part(self, number: int) -> memoryview:
        return memoryview(self._buffers[number % BUFFERS])[: self.chunks[number].n_bytes]

    def _require_written(self) -> None:
        """Waits for the writes behind; raises what one has met."""
        while self._writes:
            self._writes.popleft().result()


class StoredTensor:
    """A state of this rank's shard of a parameter, in the file."""

    def __init__(self, states: StatesOnDisk, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.shape, self.dtype = tuple(shape), dtype
        self.runs: list[tuple[int, int, int]] = []
        """Byte of the file at which elements begin, the first of them, and how many there are."""
        self._states = states

    def read(self) -> Tensor:
        """All of it, on the CPU."""
        flat = torch.empty(math.prod(self.shape), dtype=self.dtype)
        for at, first, count in self.runs:
            self._states.read(at, flat[first : first + count])
        return flat.view(self.shape)

    def write(self, offsets: Sequence[int], part: Tensor) -> None:
        """Put `part` in the place of the box that begins at `offsets`."""
        whole = self.read()
        box = tuple(slice(at, at + size) for at, size in zip(offsets, part.shape, strict=True))
        whole[box] = part
        flat = whole.view(-1)
        for at, first, count in self.runs:
            self._states.write(at, flat[first : first + count])


def in_chunks(members: Iterable[OffloadedParameter], chunk_bytes: int) -> list[Chunk]:
    """Every element of every parameter in exactly one chunk, in order; a chunk has about `chunk_bytes` or less."""
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
    found = {
        each.parameter: {
            name: StoredTensor(states, local_part(each.parameter).shape, dtype) for name, dtype in each.dtypes.items()
        }
        for each in members
    }
    for chunk in states.chunks:
        for piece in chunk.pieces:
            for name, at in piece.at.items():
                found[piece.member.parameter][name].runs.append((chunk.begin + at, piece.first, piece.count))
    return found


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy().data)
