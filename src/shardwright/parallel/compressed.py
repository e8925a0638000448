"""FSDP2 with collectives that send fewer bytes (`layout.compress_gradients`, `layout.compress_weights`).

FSDP2 allows its reduce-scatter and its all-gather to be replaced, but not the all-reduce over replicas that follows the
reduce-scatter with hybrid sharding. So with compressed gradients FSDP2 shards over `shards` alone, and this module sums
the gradient shards over `replicas`, once a step, after the last backward pass.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardwright.layout.layout import Layout
from shardwright.parallel.compression import BufferPart, Codec, Floats, Integers, RoundedCodec, reduce_scatter, sum_over
from shardwright.parallel.mesh import lines_of
from shardwright.parallel.reductions import sum_together
from shardwright.parallel.topk import TopK
from shardwright.split.compression import REPLICA_BUCKET_BYTES
from shardwright.system.torch_private import (
    all_gather_single,
    fsdp_parameters,
    padded_shard_shape,
    reduce_unused_parameters,
    sharded_parameter,
)
from shardwright.system.units import in_groups


def codec_of(kind: str) -> Codec | None:
    """Return the codec for a value of one of the layout's keys `compress_...`; None: not compressed by a codec."""
    codecs: dict[str, Codec] = {
        "bf16": RoundedCodec(torch.bfloat16),
        "int8": Integers(8),
        "int4": Integers(4),
        "fp8": Floats(),
    }
    return codecs.get(kind)


@dataclass(frozen=True)
class Compression:
    """The codecs of gradients and weights (None: not compressed), and for dense parameters ("") and experts ("expert_")
    the groups of the hops of a reduce-scatter and, if there is one, the group of replicas."""

    gradients: Codec | None
    weights: Codec | None
    hops: dict[str, tuple[dist.ProcessGroup, ...]]
    replicas: dict[str, dist.ProcessGroup]

    @staticmethod
    def from_layout(layout: Layout, mesh: DeviceMesh, expert_mesh: DeviceMesh | None) -> "Compression":
        """Return a layout's compression. Every rank of the world has to call this, after the meshes are built."""
        hops, replicas = {}, {}
        in_node = {"": layout.node_ranks, "expert_": max(1, layout.node_ranks * layout.tp // layout.ep)}
        for prefix, along in (("", mesh), ("expert_", expert_mesh)):
            if along is not None:
                hops[prefix] = _hops(along, f"{prefix}shards", in_node[prefix])
                if f"{prefix}replicas" in (along.mesh_dim_names or ()):
                    replicas[prefix] = along[f"{prefix}replicas"].get_group()
        return Compression(codec_of(layout.compress_gradients), codec_of(layout.compress_weights), hops, replicas)

    def apply(self, module: FSDPModule, prefix: str) -> None:
        """Replace the collectives of an FSDP2 parameter group."""
        # A middle stage of a pipeline has no parameters outside its blocks, so `groups` may be empty.
        parameters = fsdp_parameters(module)
        parts = [BufferPart.from_shape(padded_shard_shape(parameter)) for parameter in parameters]
        collective: Any
        if self.gradients is not None:
            trained = [sharded_parameter(parameter).requires_grad for parameter in parameters]
            collective = _ReduceScatter(self.gradients, self.hops[prefix], [*compress(parts, trained)])
            module.set_custom_reduce_scatter(collective)
            # Missing gradients become zeros, so that every reduction has all of these parts.
            reduce_unused_parameters(module)
        if self.weights is not None:
            collective = _AllGather(self.weights, parts)
            module.set_custom_all_gather(collective)


def _hops(mesh: DeviceMesh, axis: str, node_ranks: int) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups of the hops of a reduce-scatter along an axis: one, unless some of its ranks share a node."""
    lines = lines_of(mesh, axis, node_ranks)
    if lines is None:
        return (mesh[axis].get_group(),)
    inside, _ = dist.new_subgroups_by_enumeration(lines.flatten(0, 1).tolist())
    across, _ = dist.new_subgroups_by_enumeration(lines.transpose(1, 2).flatten(0, 1).tolist())
    return inside, across


class _Buffers:
    """FSDP2's interface of a collective: the allocation."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _ReduceScatter(_Buffers):
    def __init__(self, codec: Codec, hops: tuple[dist.ProcessGroup, ...], parts: list[BufferPart]) -> None:
        self.codec, self.hops, self.parts = codec, hops, parts

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: object, async_op: bool = False
    ) -> None:
        """Sum n parts, one for each rank, into this rank's part; `op` is always the sum."""
        reduce_scatter(output_tensor, input_tensor.view(group.size(), -1), self.hops, self.codec, self.parts)


class _AllGather(_Buffers):
    def __init__(self, codec: Codec, parts: list[BufferPart]) -> None:
        self.codec, self.parts = codec, parts

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Gather the shards of all ranks; each rank decodes its own shard too, as the others receive it. Secondary
        shards are parts of decoded parameters, so they are sent unchanged."""
        if input_tensor.numel() != sum(part.n_elements for part in self.parts):
            all_gather_single(output_tensor, input_tensor, group=group)
            return
        sent = self.codec.encode(input_tensor.view(1, -1), self.parts)
        received = sent.new_empty(group.size(), sent.shape[1])
        all_gather_single(received, sent, group=group)
        output_tensor.copy_(self.codec.decode(received, self.parts, output_tensor.dtype).view(-1))


class OverReplicas:
    """Sums gradient shards over the ranks that hold replicas of them; dense parameters and experts apart."""

    def __init__(self, compression: Compression, feedback: TopK | None = None) -> None:
        """`feedback` sums the gradients of its own parameters."""
        self.compression, self.feedback = compression, feedback
        self._apart = set() if feedback is None else set(map(id, feedback.parameters))

    def sum(self, modules: Iterable[FSDPModule]) -> None:
        """Sum the gradients of FSDP2's parameter groups, in place."""
        codec, replicas = self.compression.gradients, self.compression.replicas
        by_mesh: dict[str, list[Tensor]] = defaultdict(list)
        for parameter in map(sharded_parameter, chain.from_iterable(map(fsdp_parameters, modules))):
            gradient = parameter.grad
            if isinstance(gradient, DTensor) and id(parameter) not in self._apart:
                names = gradient.device_mesh.mesh_dim_names or ()
                by_mesh["expert_" if "expert_shards" in names else ""].append(gradient.to_local())
        for prefix, gradients in by_mesh.items():
            if prefix in replicas:
                for bucket in in_groups(gradients, lambda gradient: gradient.nbytes, REPLICA_BUCKET_BYTES):
                    if codec is None:
                        sum_together(bucket, replicas[prefix])
                    else:
                        sum_over(bucket, replicas[prefix], codec)
        if self.feedback is not None:
            self.feedback.sum()
