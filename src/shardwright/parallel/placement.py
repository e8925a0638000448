"""Moves experts between the ranks of ep, with everything that a run keeps of them, between two steps.

A tensor of a layer's experts has a slice for each position, and the ranks of ep and of ZeRO divide the positions.
Another order of the experts (`split/placement.py`) moves slices between the owners of their positions. Routers, counts
and biases keep the numbers of the model: a mixture looks up the position of each picked expert before it sorts rows.
So no result depends on the order, except for the order in which the terms of the gradient norm are added.

| message                       | sent for each expert that changes its rank           |
| ----------------------------- | ---------------------------------------------------- |
| one from each rank to another | its slices of parameters, optimizer states, averages |
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwright.model.modules import Row, layer_of, parameter_of, row_of
from shardwright.model.moe import expert_layers
from shardwright.model.spec import ModelSpec
from shardwright.parallel import point_to_point
from shardwright.parallel.boxes import box_of, shard_of
from shardwright.parallel.expert import ExchangingMoE
from shardwright.parallel.norm import local_part
from shardwright.parallel.point_to_point import TensorMessage
from shardwright.split.placement import Order, home

Orders = Mapping[int, Order]
"""The order of the experts of each layer, by the number of the layer."""


class ExpertPlaces:
    """The positions of the experts of a model. Every rank knows the orders of all layers."""

    def __init__(self, parts: Sequence[nn.Module], spec: ModelSpec, device_type: str) -> None:
        assert spec.moe is not None
        self.spec, self.device = spec, torch.device(device_type)
        self._mixtures = [(int(layer), mixture) for part in parts for layer, mixture in expert_layers(part).items()]
        self.home: Orders = {
            layer: home(spec.moe.n_experts) for layer in range(spec.n_blocks) if spec.has_experts(layer)
        }
        self.orders: Orders = dict(self.home)

    def move(self, orders: Orders, tensors: Mapping[str, Tensor]) -> int:
        """Move experts to new positions and return the bytes that this rank sends. `tensors`: every tensor of the run
        with a slice for each expert, by a name that ends in `/` and the name of a parameter; others are left as they
        are. Every rank calls this with the same orders."""
        sent = self._carry(tensors, self.orders, orders)
        self._use(orders)
        return sent

    def expert_bytes(self, tensors: Mapping[str, Tensor]) -> float:
        """Return the bytes of an expert in all tensors, on average over this rank's layers; 0 if it has none."""
        n_experts = sum(len(self.orders[layer]) for layer in {layer for layer, _ in self._mixtures})
        n_bytes = [tensor.numel() * tensor.element_size() for name, tensor in tensors.items() if self._is_moved(name)]
        return sum(n_bytes) / n_experts if n_experts else 0.0

    def forget(self) -> None:
        """Set the orders to home after all tensors got values in that order, as a checkpoint has them."""
        self._use(self.home)

    def at_home(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of the tensors of experts with the experts in the home order, and the other tensors."""
        copies = {name: tensor.clone() if self._is_moved(name) else tensor for name, tensor in tensors.items()}
        self._carry(copies, self.orders, self.home)
        return copies

    def _use(self, orders: Orders) -> None:
        self.orders = dict(orders)
        for layer, mixture in self._mixtures:
            assert isinstance(mixture, ExchangingMoE)
            mixture.use_order(None if orders[layer] == self.home[layer] else orders[layer], self.device)

    def _is_moved(self, name: str) -> bool:
        return self._row(name).split == "experts"

    def _row(self, name: str) -> Row:
        return row_of(self.spec, parameter_of(name))

    @torch.no_grad()
    def _carry(self, tensors: Mapping[str, Tensor], before: Orders, after: Orders) -> int:
        by_layer: dict[int, list[str]] = defaultdict(list)
        for name in sorted(tensors):
            if tensors[name].dim() and self._is_moved(name):
                by_layer[layer_of(parameter_of(name))].append(name)
        assert dist.group.WORLD is not None
        point_to_point.connect(dist.group.WORLD)  # a stage of a pipeline may have no expert that moves
        sent = 0
        for layer, names in by_layer.items():
            position = {expert: at for at, expert in enumerate(before[layer])}
            moves = [(position[expert], at) for at, expert in enumerate(after[layer]) if before[layer][at] != expert]
            if moves:
                slices = [_Slices(tensors[name], self._row(name).shape) for name in names]
                sent += self._exchange(slices, moves)
        return sent

    def _exchange(self, tensors: Sequence["_Slices"], moves: Iterable[tuple[int, int]]) -> int:
        """Copy the slices of each tensor from the first to the second position of each move, all at once."""
        own_rank = dist.get_rank()
        leaving: dict[int, list[Tensor]] = defaultdict(list)
        arriving: dict[int, list[Tensor]] = defaultdict(list)
        staying: list[tuple[Tensor, Tensor]] = []
        for first, second in moves:
            for tensor in tensors:
                (source, start), (target, end) = tensor.owners[first], tensor.owners[second]
                if source == target == own_rank:
                    staying.append((tensor.slot(end), tensor.slot(start).clone()))
                elif source == own_rank:
                    leaving[target].append(tensor.slot(start))
                elif target == own_rank:
                    arriving[source].append(tensor.slot(end))
        outgoing = {rank: torch.cat([*map(self._as_bytes, slices)]) for rank, slices in leaving.items()}
        incoming = {
            rank: torch.empty(sum(part.nbytes for part in slices), dtype=torch.uint8, device=self.device)
            for rank, slices in arriving.items()
        }
        messages = [TensorMessage(True, sent, rank, "experts") for rank, sent in sorted(outgoing.items())]
        messages += [TensorMessage(False, into, rank, "experts") for rank, into in sorted(incoming.items())]
        assert dist.group.WORLD is not None
        for pending in point_to_point.start(messages, dist.group.WORLD, "ep"):
            pending.wait()
        for rank, slices in arriving.items():
            for part, values in zip(slices, incoming[rank].split([part.nbytes for part in slices]), strict=True):
                part.copy_(values.clone().view(part.dtype).view(part.shape))  # a clone is aligned to its type
        for part, values in staying:
            part.copy_(values)
        return sum(sent.nbytes for sent in outgoing.values())

    def _as_bytes(self, part: Tensor) -> Tensor:
        return part.to(self.device).contiguous().flatten().view(torch.uint8)


class _Slices:
    """A tensor of experts. `owners`: for each position the rank that has its slice, and the slice's index there."""

    def __init__(self, tensor: Tensor, shape: Sequence[int]) -> None:
        """`shape`: of the parameter; a tensor with more dimensions has the experts after those."""
        assert isinstance(tensor, DTensor)
        self.dim = tensor.dim() - len(shape)
        self.local = local_part(tensor).detach()  # in this order: a change has to raise the version of the parameter
        self.owners = dict(_owners(tensor, self.dim))

    def slot(self, index: int) -> Tensor:
        return self.local.select(self.dim, index)


def _owners(tensor: DTensor, dim: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield each index of `dim`, with the rank that has it and the index there, among the ranks that have the same part
    of the other dimensions, and the same replica, as this rank."""
    mesh = tensor.device_mesh
    own = mesh.get_coordinate()
    assert own is not None
    axes = [cut.axis for cut in shard_of(tensor)[2] if cut.dim == dim]
    for along in product(*(range(mesh.size(axis)) for axis in axes)):
        coordinates = list(own)
        for axis, at in zip(axes, along, strict=True):
            coordinates[axis] = at
        offsets, shape, _ = box_of(tensor.shape, mesh.shape, coordinates, tensor.placements)
        rank = int(mesh.mesh[tuple(coordinates)])
        for index in range(shape[dim]):
            yield offsets[dim] + index, (rank, index)
