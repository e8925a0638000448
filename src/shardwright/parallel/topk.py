"""Top-k: a rank sends the largest elements of its gradients with their places, and the rest later (error feedback).

For each block of at most 128 elements of a row, rank w has the gradient G_w of its sequences and the error E_w that it
has not sent yet. A step computes

    M_w = G_w + E_w
    S_w = the k elements of M_w with the largest absolute values, zeros elsewhere
    G   = sum_w S_w                                    the gradient that the optimizer sees
    E_w = M_w - S_w

Ranks all-gather the elements and their places and add them in the order of the ranks, so every rank has the same bits.
k is `layout.compress_gradients` "topk-k". A block is part of a row of the rank's shard, cut as for integers
(`parallel.compression`), so a place is one byte and the blocks depend on the row and on tp alone.

Sources: Stich et al., arXiv 1809.07599 (memory of the rest); Lin et al., Deep Gradient Compression, arXiv 1712.01887.
These choose among all elements of a tensor; a choice in each block keeps the bound |M - S|^2 <= (1 - k/n) |M|^2, n
elements of a block, that the convergence of error feedback needs. Momentum correction is left out.

| message      | sent by a rank of n, of b blocks       |
| ------------ | -------------------------------------- |
| all-gather   | (n-1) k b elements and (n-1) k b bytes |

Shapes: B blocks, E elements of a block, K elements that are sent of a block, n ranks.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shardwright.layout.layout import Layout
from shardwright.model.modules import row_of
from shardwright.model.spec import ModelSpec
from shardwright.parallel.compression import BufferPart, in_blocks, out_of_blocks, shape_in_blocks
from shardwright.parallel.norm import as_part, local_part
from shardwright.split.compression import PLACE_BYTES, REPLICA_BUCKET_BYTES, sparsified
from shardwright.system.torch_private import all_gather_single
from shardwright.system.units import in_groups


class _SparseParameter(NamedTuple):
    """A parameter of this rank, the error of its gradient in the same shape, and the error as a part of a tensor of all
    ranks' errors."""

    parameter: nn.Parameter
    error: Tensor
    of_all: DTensor


class TopK:
    """Sums the largest elements of the gradients of matrices over the ranks that hold replicas of them."""

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        plain: Mapping[str, nn.Parameter],
        spec: ModelSpec,
        k: int,
        layout: Layout,
        mesh: DeviceMesh,
    ) -> None:
        """`named`: parameters by global name; `plain`: the plain tensors that replace DTensors over tp. `sparsified`
        parameters are compressed. `mesh`: the mesh of the layout."""
        self.k, self.group = k, mesh["replicas"].get_group()
        self._members: dict[str, _SparseParameter] = {}
        for name, whole in named.items():
            row = row_of(spec, name)
            if sparsified(row, k, layout.tp, layout.ep, spec.n_kv_heads):
                parameter = plain.get(name, whole)
                error = torch.zeros_like(local_part(parameter)).detach()
                of_all = _errors_of_all(error, whole, row.split_dim, mesh)
                self._members[name] = _SparseParameter(parameter, error, of_all)

    def __contains__(self, name: str) -> bool:
        """Return whether the gradient of a parameter is compressed."""
        return name in self._members

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters whose gradients are compressed."""
        return [member.parameter for member in self._members.values()]

    @property
    def state(self) -> dict[str, Tensor]:
        """The state for checkpoints: `error/NAME`, (ranks, *shape), all ranks' errors sharded over the ranks."""
        return {f"error/{name}": member.of_all for name, member in self._members.items()}

    @torch.no_grad()
    def sum(self) -> None:
        """Replace every gradient by the sum of the elements that the ranks send."""
        n = self.group.size()
        for members in in_groups(
            self._members.values(), lambda member: n * self._sent_bytes(member), REPLICA_BUCKET_BYTES
        ):
            chosen = [self._take_largest(member) for member in members]
            counts = [values_BK.numel() for values_BK, _ in chosen]
            values = torch.cat([values_BK.flatten() for values_BK, _ in chosen])
            places = torch.cat([places_BK.flatten() for _, places_BK in chosen])
            sent = torch.cat([values.view(torch.uint8), places])[None]
            received = sent.new_empty(n, sent.shape[1])
            all_gather_single(received, sent, group=self.group)
            of_values, of_places = received.split([values.nbytes, places.nbytes], 1)
            values_n = of_values.contiguous().view(values.dtype).split(counts, 1)
            for member, value_nX, place_nX in zip(members, values_n, of_places.split(counts, 1), strict=True):
                self._set_gradient(member.parameter, value_nX, place_nX)

    def _take_largest(self, member: _SparseParameter) -> tuple[Tensor, Tensor]:
        """Return the elements that this rank sends and their places in their blocks, (B, K), and keep the rest."""
        gradient = member.parameter.grad
        if gradient is not None:  # it is None if no token of the step reaches the parameter
            member.error.add_(local_part(gradient))
        part = BufferPart.from_shape(member.error.shape)
        blocks_BE = in_blocks(member.error.view(1, -1), part.columns)[0]
        places_BK = blocks_BE.abs().topk(self.k, sorted=False).indices
        values_BK = blocks_BE.gather(1, places_BK)
        # Not a difference: a sent element that is infinite or not a number would leave a NaN. A block with more than k
        # such elements keeps the rest for later steps, so faults.spike='skip' is refused.
        rest_BE = blocks_BE.scatter(1, places_BK, 0.0)
        member.error.copy_(out_of_blocks(rest_BE[None], part).view_as(member.error))
        return values_BK, places_BK.to(torch.uint8)

    def _set_gradient(self, parameter: nn.Parameter, value_nX: Tensor, place_nX: Tensor) -> None:
        local = local_part(parameter)
        part = BufferPart.from_shape(local.shape)
        sum_BE = value_nX.new_zeros(shape_in_blocks(part))
        # One rank after another: additions to one element in any order would give each rank other bits on a GPU.
        for value_X, place_X in zip(value_nX, place_nX, strict=True):
            sum_BE.scatter_add_(1, place_X.view(-1, self.k).long(), value_X.view(-1, self.k))
        gradient = out_of_blocks(sum_BE[None], part).view_as(local)
        if parameter.grad is not None:
            local_part(parameter.grad).copy_(gradient)
        elif isinstance(parameter, DTensor):
            parameter.grad = as_part(gradient, parameter, parameter.device_mesh, parameter.placements)
        else:
            parameter.grad = gradient

    def _sent_bytes(self, member: _SparseParameter) -> int:
        n_blocks, _ = shape_in_blocks(BufferPart.from_shape(member.error.shape))
        return n_blocks * self.k * (member.error.element_size() + PLACE_BYTES)


def _errors_of_all(error: Tensor, whole: Tensor, split_dim: int | None, mesh: DeviceMesh) -> DTensor:
    """Return the errors of all ranks, (ranks, *shape of the whole parameter), from this rank's."""
    axes = [axis for axis in mesh.mesh_dim_names or () if axis in ("tp", "tp_kv", "tp_replicas")]
    placements = [Shard(0)]
    if axes:
        assert split_dim is not None
        placements += [Shard(1 + split_dim) for _ in axes]
    shape = torch.Size((mesh["replicas"].size(), *whole.shape))
    stride = torch.empty(shape, device="meta").stride()
    along = mesh[("replicas", *axes)]
    return DTensor.from_local(error[None], along, placements, run_check=False, shape=shape, stride=stride)
