"""Proves that an optimizer that steps over shards as plain tensors does what it does to the whole tensors."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardwright.training.on_shards import OptimizerOnShards
from tests.distributed import run_ranks

MAKERS = {
    "state made in the first step": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "state replaced in a step": lambda parameters: Replacing(parameters, {}),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
}
SHAPES = ((5, 3), (4,), (1, 2))
"""Of 2 ranks one has nothing of the last tensor, and less of the first."""


class Replacing(torch.optim.Optimizer):
    """Sums gradients in a state that each step replaces."""

    def step(self, closure=None) -> None:
        with torch.no_grad():
            for parameter in (p for group in self.param_groups for p in group["params"]):
                state = self.state[parameter]
                state["sum"] = state.get("sum", torch.zeros_like(parameter)) + parameter.grad
                parameter -= 0.1 * state["sum"]


def trained(name: str, sharded: bool) -> list[Tensor]:
    """Parameters and states after three steps, whole."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(1)

    def drawn(shape: tuple[int, ...], placement: Shard | Replicate) -> Tensor:
        whole = torch.randn(shape, generator=generator, dtype=torch.float64)
        return distribute_tensor(whole, mesh, [placement]) if sharded else whole

    placements = [Shard(0), Replicate(), Shard(0)]
    parameters = [nn.Parameter(drawn(shape, place)) for shape, place in zip(SHAPES, placements, strict=True)]
    optimizer = MAKERS[name](parameters)
    optimizer = OptimizerOnShards(optimizer) if sharded else optimizer
    for _ in range(3):
        for parameter, place in zip(parameters, placements, strict=True):
            parameter.grad = drawn(parameter.shape, place)
        optimizer.step()
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in parameters]
    assert optimizer.state.keys() == set(parameters)
    states = [tensor for p in parameters for _, tensor in sorted(optimizer.state[p].items()) if tensor.ndim]
    if sharded:
        assert all(isinstance(state, DTensor) for state in states)
    return [t.full_tensor() if isinstance(t, DTensor) else t for t in [*(p.detach() for p in parameters), *states]]


def both(name: str) -> list[tuple[Tensor, Tensor]]:
    return list(zip(trained(name, False), trained(name, True), strict=True))


@pytest.mark.parametrize("name", MAKERS)
def test_shards_are_updated_as_the_whole(name: str):
    for pairs in run_ranks(both, 2, name):
        assert len(pairs) > len(SHAPES)
        for whole, gathered in pairs:
            assert torch.equal(whole, gathered)
