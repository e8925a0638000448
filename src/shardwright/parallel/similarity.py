"""The similarity of the experts of a layer: the largest cosine of two rows of the router, or of two experts' weights.

A cosine of all weights would need all experts of a layer on every rank. The cosine is therefore of at most `SAMPLED`
elements of each matrix, evenly spaced and the same for all experts. Equal experts have exactly 1; for others the cosine
of n elements differs from the cosine of all by about 1 / sqrt(n), 0.005 with three matrices.

| what    | gathered by each rank                       | FLOPs                          | when            |
| ------- | ------------------------------------------- | ------------------------------ | --------------- |
| routers | E D elements of a layer                     | 2 E^2 D                        | at each record  |
| weights | up to `SAMPLED` E elements of each matrix   | 2 E^2 `SAMPLED` of each matrix | at evaluations  |

Shapes: E experts, D model, L layers and multi-token prediction modules, S elements of an expert.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Shard

from shardwright.model.modules import layer_of, row_of
from shardwright.parallel.boxes import gather_whole
from shardwright.parallel.model import ParallelModel
from shardwright.parallel.norm import as_part, local_part

SAMPLED = 2**14
"""Most elements of a matrix of an expert that are compared."""


@torch.no_grad()
def similar_routers(model: ParallelModel) -> Tensor | None:
    """Return for each layer the largest cosine of two experts' rows of the router, and the two experts, (L, 3); -1 for
    dense layers. At 1 the logits of both are proportional, except for their biases. Every rank calls this; None without
    experts, or if parameters are in host memory."""
    if model.spec.moe is None or model.layout.offload_parameters != "none":
        return None
    names = [name for name in model.named_parameters if name.endswith(".router.weight")]
    return _most_similar(model, ((layer_of(name), [gather_whole(model.named_parameters[name])]) for name in names))


@torch.no_grad()
def similar_experts(model: ParallelModel) -> Tensor | None:
    """Return `similar_routers` of the weights of experts instead of routers. Adapters are not compared. None also
    with a base in int8 or nf4."""
    lora = model.spec.lora
    if model.spec.moe is None or model.layout.offload_parameters != "none" or (lora and lora.base != "compute"):
        return None
    by_layer: dict[int, list[Tensor]] = {}
    for name, parameter in model.named_parameters.items():
        row = row_of(model.spec, name)
        if row.kind == "expert" and not row.adapter:
            by_layer.setdefault(layer_of(name), []).append(parameter)
    sampled = ((layer, [*map(_sampled, parameters)]) for layer, parameters in by_layer.items())
    most_L3 = _most_similar(model, sampled)
    orders = {} if model.places is None else model.places.orders
    for layer, order in orders.items():
        expert_E = torch.tensor(order, device=most_L3.device, dtype=most_L3.dtype)
        if most_L3[layer, 0] >= 0:
            most_L3[layer, 1:] = expert_E[most_L3[layer, 1:].long()].sort().values
    return most_L3


def _most_similar(model: ParallelModel, layers: Iterable[tuple[int, list[Tensor]]]) -> Tensor:
    """Return (L, 3) as `similar_routers` from the tensors, (E, S), of each of this rank's layers."""
    most_L3 = torch.full((model.spec.n_blocks, 3), -1.0, dtype=torch.float64, device=model.mesh.device_type)
    for layer, tensors in layers:
        rows_ES = F.normalize(torch.cat([tensor.float() for tensor in tensors], 1), dim=-1)
        cosines_EE = (rows_ES @ rows_ES.T).fill_diagonal_(-1.0)
        largest, place = cosines_EE.flatten().max(0)  # no index into a tensor, which would wait for the device
        pair = torch.stack([place // len(rows_ES), place % len(rows_ES)]).sort().values
        most_L3[layer] = torch.cat([largest[None].double(), pair.double()])
    if model.groups.pp is not None:
        dist.all_reduce(most_L3, dist.ReduceOp.MAX, group=model.groups.pp)
    return most_L3


def _sampled(parameter: Tensor) -> Tensor:
    """Return elements of the matrices of all experts, (E, S), on every rank."""
    flat_eS = local_part(parameter).flatten(1)
    if not isinstance(parameter, DTensor):
        return flat_eS[:, :: _step(flat_eS.shape[1], SAMPLED)]
    shards = 1
    placements: list[Placement] = []
    for axis, place in enumerate(parameter.placements):
        apart = getattr(place, "dim", 0) > 0
        shards *= parameter.device_mesh.size(axis) if apart else 1
        placements.append(Shard(1) if apart else place)
    own_eS = flat_eS[:, :: _step(flat_eS.shape[1], max(1, SAMPLED // shards))].contiguous()
    whole_ES = torch.empty(parameter.shape[0], shards * own_eS.shape[1], device="meta")
    return gather_whole(as_part(own_eS, whole_ES, parameter.device_mesh, placements))


def _step(n: int, most: int) -> int:
    return -(-n // most)
