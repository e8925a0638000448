"""Brings sharded matrices whole to one rank each, for an update that needs whole matrices, and the results back.

A matrix has one owner among the ranks that hold shards or replicas of it. The exchange goes along one axis of its mesh
after the other, in the reverse order of the sharding:

    axis with shards    all-to-all: every rank sends its shard to the owner's place; the owner there concatenates them
    axis with replicas  nothing is sent: the rank at the owner's place goes on, the others wait for the result
    owner               computes the update of the whole matrix
    and back            all-to-all: the owner sends every rank the update of its shard

A rank sends an element of its shards at most once along each axis with shards, and receives its update once along each
axis. Owners are chosen so that their work is balanced. Matrices are exchanged in buckets; while one bucket is computed,
the next is sent. A stack of experts that is sharded by whole experts needs no exchange along that axis.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright.torch_private import StridedShard
from shardwright.units import in_groups

BUCKET_BYTES = 64 * 2**20
"""Bytes of the shards of a rank that are exchanged at once, unless one matrix has more."""
IN_FLIGHT = 2

Exchange = Generator[Any, None, list[Tensor]]
"""Yields collectives that have been started, or None; goes on when they have ended. All ranks of a bucket yield equally
often, so that all start the collectives of several buckets in one order."""


class Axis(NamedTuple):
    """An axis of a mesh: `dim` of the matrix is sharded along it, or None: its ranks hold replicas."""

    group: dist.ProcessGroup
    dim: int | None


@dataclass(frozen=True)
class Matrix:
    """A parameter with the axes of its exchange, in order.

    `sizes`: for each axis with shards how much of `dim` every rank along it has; for replicas empty. `owner`: the place
    of the owner along each axis.
    """

    number: int
    axes: tuple[Axis, ...]
    sizes: tuple[tuple[int, ...], ...]
    owner: tuple[int, ...]
    n_bytes: int

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for matrices that can be exchanged together."""
        return tuple((id(axis.group), axis.dim) for axis in self.axes)


class WholeMatrices:
    """The exchange for some parameters, which may be DTensors on different meshes; every rank that holds one of them
    makes it with the same parameters in the same order."""

    def __init__(self, parameters: Sequence[Tensor], costs: Sequence[float]) -> None:
        """`costs`: of the update of each parameter, in any unit."""
        self.matrices: list[Matrix] = []
        loads: dict[tuple[object, ...], dict[tuple[int, ...], float]] = {}
        planned = [_axes_of(parameter) for parameter in parameters]
        order = sorted(range(len(parameters)), key=lambda number: (-costs[number], number))
        owners: dict[int, tuple[int, ...]] = {}
        for number in order:
            axes = planned[number][0]
            places = product(*(range(axis.group.size()) for axis in axes))
            work = loads.setdefault(tuple(id(axis.group) for axis in axes), dict.fromkeys(places, 0.0))
            owners[number] = min(work, key=work.__getitem__)
            work[owners[number]] += costs[number]
        for number, (axes, sizes) in enumerate(planned):
            parameter = parameters[number]
            n_bytes = parameter.numel() * parameter.element_size() // prod(axis.group.size() for axis in axes)
            self.matrices.append(Matrix(number, axes, sizes, owners[number], n_bytes))

    @torch.no_grad()
    def update(
        self,
        take: Callable[[int], Tensor],
        compute: Callable[[int, Tensor], Tensor],
        give: Callable[[int, Tensor], None],
    ) -> None:
        """Compute an update of every matrix on its owner.

        `take` returns this rank's shard of parameter `number`, `compute` maps the whole matrix (or, of a stack of
        experts, this rank's experts) to its update of the same shape, and `give` takes this rank's shard of it. All
        have to be called from the same program on every rank.
        """

        def exchange(bucket: list[Matrix]) -> Exchange:
            shards = [take(each.number) for each in bucket]
            updates = yield from _exchange(bucket[0].axes, bucket, shards, 0, compute)
            for matrix, shard in zip(bucket, updates, strict=True):
                give(matrix.number, shard)
            return []

        _interleave(exchange(bucket) for bucket in self._buckets())

    def _buckets(self) -> Iterator[list[Matrix]]:
        """In an order that is the same on every rank."""
        together: dict[tuple[object, ...], list[Matrix]] = {}
        for matrix in self.matrices:
            together.setdefault(matrix.key, []).append(matrix)
        for matrices in together.values():
            yield from in_groups(matrices, lambda matrix: matrix.n_bytes, BUCKET_BYTES)


def _axes_of(parameter: Tensor) -> tuple[tuple[Axis, ...], tuple[tuple[int, ...], ...]]:
    """The axes of the exchange of a parameter, first those with replicas, and the sizes along each."""
    if not isinstance(parameter, DTensor):
        return (), ()
    mesh, shape = parameter.device_mesh, list(parameter.shape)
    coordinates = mesh.get_coordinate()
    assert coordinates is not None
    replicas, shards = [], []
    # PyTorch shards along the axes from the first to the last, and strided ones after all others.
    places = list(enumerate(parameter.placements))
    for i, place in sorted(places, key=lambda each: isinstance(each[1], StridedShard)):
        group = mesh.get_group(i)
        if place.is_replicate():
            replicas.append((Axis(group, None), ()))
            continue
        dim: int = getattr(place, "dim")  # noqa: B009 (Shard and StridedShard have it, Placement has not)
        sizes = _chunks(shape[dim], group.size())
        shape[dim] = sizes[coordinates[i]]
        whole_experts = dim == 0 and parameter.dim() == 3
        if not whole_experts:
            shards.append((Axis(group, dim), sizes))
    used = [each for each in (*replicas, *reversed(shards)) if each[0].group.size() > 1]
    return tuple(axis for axis, _ in used), tuple(sizes for _, sizes in used)


def _chunks(size: int, n: int) -> tuple[int, ...]:
    """The sizes of n shards, as torch.chunk makes them; the last ones may be smaller, or empty."""
    most = -(-size // n)
    return tuple(max(0, min(most, size - place * most)) for place in range(n))


def _exchange(
    axes: Sequence[Axis],
    matrices: list[Matrix],
    shards: list[Tensor],
    depth: int,
    compute: Callable[[int, Tensor], Tensor],
) -> Exchange:
    """The updates of `shards` of matrices with these axes, from axis number `depth` on."""
    if depth == len(axes):
        return [compute(matrix.number, shard) for matrix, shard in zip(matrices, shards, strict=True)]
    axis = axes[depth]
    if not matrices:  # so does every rank along this axis, since all have the same place along those before
        yield from [None] * (1 if axis.dim is None else 2)
        return (yield from _exchange(axes, [], [], depth + 1, compute))
    n, here = axis.group.size(), axis.group.rank()
    held = [[i for i, matrix in enumerate(matrices) if matrix.owner[depth] == place] for place in range(n)]
    mine = [matrices[i] for i in held[here]]
    own = [shards[i] for i in held[here]]
    if axis.dim is None:
        whole = own
    else:
        sent = [[shards[i] for i in there] for there in held]
        shapes = [[_shape_at(*each, depth, place) for each in zip(mine, own, strict=True)] for place in range(n)]
        received = yield from _all_to_all(sent, shapes, shards[0], axis.group)
        whole = [torch.cat(parts, axis.dim) for parts in zip(*received, strict=True)]
    updates = yield from _exchange(axes, mine, whole, depth + 1, compute)
    if axis.dim is None:
        returned = [updates] * n
    else:
        split = [update.split(matrix.sizes[depth], axis.dim) for matrix, update in zip(mine, updates, strict=True)]
        returned = [[parts[place] for parts in split] for place in range(n)]
    shapes = [[shards[i].shape for i in there] for there in held]
    received = yield from _all_to_all(returned, shapes, shards[0], axis.group)
    found: dict[int, Tensor] = {}
    for there, arrived in zip(held, received, strict=True):
        found |= dict(zip(there, arrived, strict=True))
    return [found[i] for i in range(len(matrices))]


def _shape_at(matrix: Matrix, shard: Tensor, depth: int, place: int) -> torch.Size:
    """The shape of the shard at a place along an axis."""
    dim = matrix.axes[depth].dim
    assert dim is not None
    shape = list(shard.shape)
    shape[dim] = matrix.sizes[depth][place]
    return torch.Size(shape)


def _all_to_all(
    sent: list[list[Tensor]], shapes: list[list[torch.Size]], like: Tensor, group: dist.ProcessGroup
) -> Generator[Any, None, list[list[Tensor]]]:
    """Send `sent[place]` to each rank of a group; returns the tensors of `shapes[place]` from each."""
    flat = [tensor.reshape(-1) for tensors in sent for tensor in tensors]
    counts = [sum(tensor.numel() for tensor in tensors) for tensors in sent]
    arriving = [sum(shape.numel() for shape in expected) for expected in shapes]
    out = like.new_empty(sum(arriving))
    into = torch.cat(flat) if flat else like.new_empty(0)
    yield dist.all_to_all_single(out, into, arriving, counts, group=group, async_op=True)
    parts = iter(out.split([shape.numel() for expected in shapes for shape in expected]))
    return [[next(parts).view(shape) for shape in expected] for expected in shapes]


def _interleave(runs: Iterable[Exchange]) -> None:
    """Run generators of started collectives, at most IN_FLIGHT at a time, in an order that is the same on all ranks."""
    waiting = iter(runs)
    active: deque[tuple[Exchange, Any]] = deque()
    while True:
        while len(active) < IN_FLIGHT and (run := next(waiting, None)) is not None:
            _go_on(run, active)
        if not active:
            return
        run, work = active.popleft()
        if work is not None:
            work.wait()
        _go_on(run, active)


def _go_on(run: Exchange, active: deque[tuple[Exchange, Any]]) -> None:
    with suppress(StopIteration):
        active.append((run, next(run)))
