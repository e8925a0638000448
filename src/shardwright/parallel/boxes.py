"""The box of a rank's shard in the whole tensor, computed by our own arithmetic.

FSDP2 shards tensors that tp has sharded: of 61 rows tp=2 makes shards of 31 and 30, and dp_shard=3 cuts these into 11,
11, 9 and 10, 10, 10. PyTorch writes this as [_StridedShard(0), Shard(0)] and computes offsets and shapes as if rows
were cut into 2 x 3 equal parts; both are wrong if they are not equal. So neither PyTorch's offsets nor its
`full_tensor` are used for parameters.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from shardwright.split.tensor import chunk_sizes
from shardwright.system.torch_private import StridedShard

Offsets = tuple[int, ...]
"""The index in the whole tensor at which a shard starts."""
Indices = tuple[slice, ...]


class DimSharding(NamedTuple):
    """One sharding of a tensor: `dim` of the tensor, along axis number `axis` of its mesh, into shards of `sizes`."""

    axis: int
    dim: int
    sizes: tuple[int, ...]


class TensorShard(NamedTuple):
    """A rank's part of a parameter or of a gradient, if it is not a DTensor: `tensor` starts at index `offsets` of the
    whole tensor, which has the shape `shape`."""

    tensor: Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


def box_of(
    shape: Sequence[int], degrees: Sequence[int], coordinates: Sequence[int], placements: Sequence[Placement]
) -> tuple[Offsets, tuple[int, ...], list[DimSharding]]:
    """Return the offsets and shape of the shard at `coordinates` of a mesh of `degrees`, and the cuts that made it, in
    the order of the axes, strided cuts last."""
    offsets, local, cuts = [0] * len(shape), list(shape), []
    for axis, place in sorted(enumerate(placements), key=lambda item: isinstance(item[1], StridedShard)):
        assert not place.is_partial(), "a partial sum is no shard"
        if place.is_replicate():
            continue
        dim: int = getattr(place, "dim")  # noqa: B009 (Shard and StridedShard have it, Placement has not)
        cuts.append(DimSharding(axis, dim, chunk_sizes(local[dim], degrees[axis])))
        offsets[dim] += sum(cuts[-1].sizes[: coordinates[axis]])
        local[dim] = cuts[-1].sizes[coordinates[axis]]
    return tuple(offsets), tuple(local), cuts


def shard_of(tensor: Tensor) -> tuple[Offsets, tuple[int, ...], list[DimSharding]]:
    """Return `box_of` this rank's shard. Reads no values, so that a dry run can call it."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim(), tuple(tensor.shape), []
    mesh = tensor.device_mesh
    coordinates = mesh.get_coordinate()
    assert coordinates is not None
    return box_of(tensor.shape, mesh.shape, coordinates, tensor.placements)


def local_box(tensor: Tensor | TensorShard) -> tuple[Tensor, Offsets]:
    """Return this rank's shard of a tensor, and the index in the whole tensor where the shard starts."""
    if isinstance(tensor, TensorShard):
        return tensor.tensor.detach(), tensor.offsets
    offsets, shape, _ = shard_of(tensor)
    local = tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()
    assert local.shape == shape, f"a shard of {tuple(local.shape)}; by the placements it has {shape}"
    return local, offsets


def overlap(
    begin: Sequence[int], shape: Sequence[int], other: Sequence[int], other_shape: Sequence[int]
) -> tuple[Indices, Indices] | None:
    """Return the elements that two boxes share, as indices into the first and into the second, or None."""
    spans = [(max(a, b), min(a + n, b + m)) for a, n, b, m in zip(begin, shape, other, other_shape, strict=True)]
    if any(low >= high for low, high in spans):
        return None
    first, second = (
        tuple(slice(low - at, high - at) for (low, high), at in zip(spans, corner, strict=True))
        for corner in (begin, other)
    )
    return first, second


@torch.no_grad()
def gather_whole(tensor: Tensor) -> Tensor:
    """Return a copy of the whole tensor on every rank; a collective of the ranks of its mesh."""
    local, _ = local_box(tensor)
    if not isinstance(tensor, DTensor):
        return local.clone()
    for cut in reversed(shard_of(tensor)[2]):
        local = torch.cat(list(_gathered(local, cut, tensor.device_mesh.get_group(cut.axis))), cut.dim)
    return local.clone()


def _gathered(local: Tensor, cut: DimSharding, group: dist.ProcessGroup) -> Iterator[Tensor]:
    """Yield the shards of a cut; each is sent padded to the size of the first, the largest."""
    shape = list(local.shape)
    shape[cut.dim] = cut.sizes[0]
    padded = local.new_zeros(shape)
    padded.narrow(cut.dim, 0, local.shape[cut.dim]).copy_(local)
    arrived = [torch.empty_like(padded) for _ in cut.sizes]
    dist.all_gather(arrived, padded, group=group)
    for size, shard in zip(cut.sizes, arrived, strict=True):
        yield shard.narrow(cut.dim, 0, size)
