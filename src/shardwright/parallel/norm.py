"""The gradient norm of the whole model, in which each element counts once for every layout."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import repeat

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from shardwright.system.torch_private import DTensorSpec, TensorMeta, foreach_mul_, foreach_norm

LocalNorms = list[tuple[list[int], Tensor]]
"""Norms of this rank's gradient shards: several tensors of norms, each with the positions of its parameters."""


def gradient_norm(
    parameters: Iterable[Tensor],
    holders: Iterable[int] | None = None,
    stages: dist.ProcessGroup | None = None,
    local_norms: LocalNorms | None = None,
) -> Tensor:
    """Return the Euclidean norm over all gradients, a scalar on their device, equal on every rank.

    Squares are summed over the mesh axes along which a gradient is sharded, not over the axes along which it is
    replicated; gradients on different meshes are added after the sum over each mesh. `stages` is the process group of
    pp, over which the squares are summed last. `holders`: for each parameter, the number of ranks of pp that hold it;
    each of them adds that fraction of its square. `local_norms` is filled with this rank's norms. A stage whose layers
    have no adapter has no gradients; its norm is zero.
    """
    parameters = list(parameters)
    groups: dict[tuple[DeviceMesh | None, tuple[int, ...], int], dict[int, Tensor]] = defaultdict(dict)
    for position, (parameter, shared_by) in enumerate(zip(parameters, holders or repeat(1), strict=False)):
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            sharded = tuple(i for i, place in enumerate(gradient.placements) if not place.is_replicate())
            groups[gradient.device_mesh, sharded, shared_by][position] = gradient.to_local()
        elif gradient is not None:
            groups[None, (), shared_by][position] = gradient
    squares = []
    for (mesh, sharded, shared_by), by_position in groups.items():
        gradients = list(by_position.values())
        norms = torch.stack(foreach_norm(gradients))
        if local_norms is not None:
            local_norms.append((list(by_position), norms))
        square = norms.square().sum() / shared_by
        if mesh is not None:
            for axis in sharded:
                dist.all_reduce(square, group=mesh.get_group(axis))
        squares.append(square)
    total = torch.stack(squares).sum() if squares else _no_square(parameters)
    if stages is not None:
        dist.all_reduce(total, group=stages)
    return total.sqrt()


def _no_square(parameters: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of no gradients, in the type and on the device of other stages' sums: frozen parameters
    are in the type of matmuls, gradients in float32 or a wider type."""
    frozen = local_part(parameters[0])
    dtype = reduce(torch.promote_types, (parameter.dtype for parameter in parameters), torch.float32)
    return torch.zeros((), dtype=dtype, device=frozen.device)


def clip_gradients(parameters: Iterable[Tensor], norm: Tensor, max_norm: float, loss_scale: float = 1.0) -> None:
    """Divide gradients by `loss_scale` and scale them by min(1, max_norm / norm), in place.

    `norm`: the result of `gradient_norm`, divided by `loss_scale`. If it is NaN the gradients stay as they are,
    so that their source can still be found."""
    gradients = [local_part(p.grad) for p in parameters if p.grad is not None]
    if gradients:  # a stage may have no adapter
        foreach_mul_(gradients, ((max_norm / (norm + 1e-6)).clamp(max=1.0) / loss_scale).nan_to_num(nan=1.0))


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor as a plain tensor that shares its memory; differentiable."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def as_part(local: Tensor, whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Return a DTensor of the size of `whole`, possibly unevenly sharded, from this rank's shard `local`."""
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def as_part_on_host(local: Tensor, whole: DTensor) -> DTensor:
    """Return a DTensor of the size and sharding of `whole` from this rank's shard `local` in host memory.

    `DTensor.from_local` would copy it to the device of the mesh."""
    meta = TensorMeta(whole.shape, whole.stride(), local.dtype)
    return DTensor(local, DTensorSpec(whole.device_mesh, whole.placements, tensor_meta=meta), requires_grad=False)
