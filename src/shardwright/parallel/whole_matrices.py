"""Gathers each sharded matrix on one rank, for an update that needs whole matrices, and scatters the results.

A matrix has one owner among the ranks that hold shards or replicas of it. The exchange goes along one axis of its mesh
after the other, in the reverse order of the sharding:

    axis with shards    all-to-all: every rank sends its shard to the owner's place; the owner there concatenates them
    axis with replicas  nothing is sent: the rank at the owner's place continues, the others wait for the result
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

from shardwright.parallel.boxes import shard_of
from shardwright.system.units import in_groups

BUCKET_BYTES = 64 * 2**20
"""Bytes of a rank's shards that are exchanged at once, unless one matrix has more."""
IN_FLIGHT = 2

Exchange = Generator[Any, None, list[Tensor]]
"""Yields started collectives, or None, and continues when they have ended. All ranks of a bucket yield equally often,
so that all start the collectives of several buckets in one order."""


class MatrixAxis(NamedTuple):
    """An axis of a mesh; the matrix is sharded along `dim`, or, if None, the ranks of the axis hold replicas."""

    group: dist.ProcessGroup
    dim: int | None


@dataclass(frozen=True)
class ExchangedMatrix:
    """A parameter with the axes of its exchange, in order.

    `sizes`: for each axis with shards the size of `dim` on every rank along it; for replicas empty. `owner`: the
    owner's place along each axis.
    """

    number: int
    axes: tuple[MatrixAxis, ...]
    sizes: tuple[tuple[int, ...], ...]
    owner: tuple[int, ...]
    n_bytes: int

    @property
    def key(self) -> tuple[object, ...]:
        """A key that is equal for matrices that can be exchanged together."""
        return tuple((id(axis.group), axis.dim) for axis in self.axes)


class WholeMatrices:
    """The exchange for parameters that may be DTensors on different meshes. Every rank that holds one of them makes it
    with the same parameters in the same order."""

    def __init__(self, parameters: Sequence[Tensor], costs: Sequence[float]) -> None:
        """`costs`: the cost of each parameter's update, in any unit."""
        self.matrices: list[ExchangedMatrix] = []
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
            self.matrices.append(ExchangedMatrix(number, axes, sizes, owners[number], n_bytes))

    @torch.no_grad()
    def update(
        self,
        take: Callable[[int], Tensor],
        compute: Callable[[int, Tensor], Tensor],
        give: Callable[[int, Tensor], None],
    ) -> None:
        """Compute an update of every matrix on its owner.

        `take` returns this rank's shard of parameter `number`, `compute` maps the whole matrix (for a stack of experts,
        this rank's experts) to its update of the same shape, and `give` takes this rank's shard of the update. Every
        rank has to call this at the same point of the program.
        """

        def exchange(bucket: list[ExchangedMatrix]) -> Exchange:
            shards = [take(matrix.number) for matrix in bucket]
            updates = yield from _exchange(bucket[0].axes, bucket, shards, 0, compute)
            for matrix, shard in zip(bucket, updates, strict=True):
                give(matrix.number, shard)
            return []

        _interleave(exchange(bucket) for bucket in self._buckets())

    def _buckets(self) -> Iterator[list[ExchangedMatrix]]:
        """Yield the buckets in an order that is the same on every rank."""
        together: dict[tuple[object, ...], list[ExchangedMatrix]] = {}
        for matrix in self.matrices:
            together.setdefault(matrix.key, []).append(matrix)
        for matrices in together.values():
            yield from in_groups(matrices, lambda matrix: matrix.n_bytes, BUCKET_BYTES)


def _axes_of(parameter: Tensor) -> tuple[tuple[MatrixAxis, ...], tuple[tuple[int, ...], ...]]:
    """Return the axes of a parameter's exchange, axes with replicas first, and the sizes along each."""
    if not isinstance(parameter, DTensor):
        return (), ()
    mesh, cuts = parameter.device_mesh, shard_of(parameter)[2]
    along = {cut.axis for cut in cuts}
    replicas = [(MatrixAxis(mesh.get_group(i), None), ()) for i in range(mesh.ndim) if i not in along]
    shards = [
        (MatrixAxis(mesh.get_group(cut.axis), cut.dim), cut.sizes)
        for cut in cuts
        if not (cut.dim == 0 and parameter.dim() == 3)  # whole experts
    ]
    used = [axis for axis in (*replicas, *reversed(shards)) if axis[0].group.size() > 1]
    return tuple(axis for axis, _ in used), tuple(sizes for _, sizes in used)


def _exchange(
    axes: Sequence[MatrixAxis],
    matrices: list[ExchangedMatrix],
    shards: list[Tensor],
    depth: int,
    compute: Callable[[int, Tensor], Tensor],
) -> Exchange:
    """Return the updates of `shards` of matrices with these axes, from axis number `depth` on."""
    if depth == len(axes):
        return [compute(matrix.number, shard) for matrix, shard in zip(matrices, shards, strict=True)]
    axis = axes[depth]
    if not matrices:  # all ranks along this axis have the same place along earlier axes, so all return here
        yield from [None] * (1 if axis.dim is None else 2)
        return (yield from _exchange(axes, [], [], depth + 1, compute))
    n, rank = axis.group.size(), axis.group.rank()
    owned = [[i for i, matrix in enumerate(matrices) if matrix.owner[depth] == place] for place in range(n)]
    local = [matrices[i] for i in owned[rank]]
    own = [shards[i] for i in owned[rank]]
    if axis.dim is None:
        whole = own
    else:
        sent = [[shards[i] for i in indices] for indices in owned]
        shapes = [[_shape_at(*pair, depth, place) for pair in zip(local, own, strict=True)] for place in range(n)]
        received = yield from _all_to_all(sent, shapes, shards[0], axis.group)
        whole = [torch.cat(parts, axis.dim) for parts in zip(*received, strict=True)]
    updates = yield from _exchange(axes, local, whole, depth + 1, compute)
    if axis.dim is None:
        returned = [updates] * n
    else:
        split = [update.split(matrix.sizes[depth], axis.dim) for matrix, update in zip(local, updates, strict=True)]
        returned = [[parts[place] for parts in split] for place in range(n)]
    shapes = [[shards[i].shape for i in indices] for indices in owned]
    received = yield from _all_to_all(returned, shapes, shards[0], axis.group)
    results: dict[int, Tensor] = {}
    for indices, arrived in zip(owned, received, strict=True):
        results |= dict(zip(indices, arrived, strict=True))
    return [results[i] for i in range(len(matrices))]


def _shape_at(matrix: ExchangedMatrix, shard: Tensor, depth: int, place: int) -> torch.Size:
    """Return the shape of the shard at a place along an axis."""
    dim = matrix.axes[depth].dim
    assert dim is not None
    shape = list(shard.shape)
    shape[dim] = matrix.sizes[depth][place]
    return torch.Size(shape)


def _all_to_all(
    sent: list[list[Tensor]], shapes: list[list[torch.Size]], like: Tensor, group: dist.ProcessGroup
) -> Generator[Any, None, list[list[Tensor]]]:
    """Send `sent[place]` to each rank of a group; return the tensors of `shapes[place]` from each."""
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
