"""Proves that what `parallel.apply` builds is what the layout says: mesh, initial values, norm, prefetching.

On gloo, worlds of 4 and 8.
"""

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardwright.layout.layout import Layout
from shardwright.model.init import initialise
from shardwright.model.transformer import Transformer
from shardwright.parallel.apply import apply
from shardwright.parallel.mesh import build_groups, build_mesh
from shardwright.parallel.norm import clip_gradients, gradient_norm
from shardwright.system.torch_private import parameter_groups, pending_gather
from tests.distributed import run_ranks
from tests.marks import rest_prove
from tests.training.worlds import SEED, SPEC, build, local_batch, whole

LAYOUTS = [
    Layout(dp_replicate=4),
    Layout(dp_shard=4, zero=1),
    Layout(dp_shard=4, zero=3),
    Layout(dp_replicate=2, dp_shard=2, zero=2),
]


def groups_of(layout: Layout, n_kv_heads: int) -> dict[str, tuple[int, ...]]:
    """Ranks of the calling rank's groups: those of the mesh by axis, and those that a step communicates over."""
    mesh = build_mesh(layout, "cpu", n_kv_heads)
    groups = build_groups(layout, mesh)
    found = {axis: mesh[axis].get_group() for axis in mesh.mesh_dim_names or ()}
    found |= {f"step {name}": group for name, group in vars(groups).items() if group is not None}
    return {name: tuple(dist.get_process_group_ranks(group)) for name, group in found.items()}


def test_the_groups_are_those_of_the_layout():
    layout = Layout(dp_shard=2, cp=2, tp=2, zero=1, sequence_parallel=False)
    for rank, groups in enumerate(run_ranks(groups_of, 8, layout, 4)):
        assert groups == {
            "shards": layout.group_of(rank, "dp_shard", "cp"),
            "tp": layout.group_of(rank, "tp"),
            "step tp": layout.group_of(rank, "tp"),
            "step cp_ring": layout.group_of(rank, "cp"),
            "step data": layout.group_of(rank, "dp_shard"),
            "step tokens": layout.group_of(rank, "dp_shard", "cp"),
        }


def test_with_fewer_kv_heads_than_ranks_neighbours_share_one():
    layout = Layout(cp=2, tp=4, sequence_parallel=False)
    for rank, groups in enumerate(run_ranks(groups_of, 8, layout, 2)):
        pair = rank // 2 * 2
        assert groups["step tp_replicas"] == groups["tp_replicas"] == (pair, pair + 1)
        assert groups["step tp"] == layout.group_of(rank, "tp")
        assert groups["replicas"] == layout.group_of(rank, "cp"), "under ZeRO-0 ranks of cp are copies"
        assert groups["shards"] == (rank,)


def initial_weights(layout: Layout) -> dict[str, Tensor]:
    model = apply(SPEC, layout, torch.device("cpu"), seed=SEED)
    return {name: whole(parameter) for name, parameter in model.named_parameters.items()}


@pytest.mark.parametrize("layout", rest_prove(LAYOUTS, *LAYOUTS[2:]))
def test_every_layout_starts_from_the_bits_that_one_device_starts_from(layout: Layout):
    alone = Transformer(SPEC)
    initialise(alone, SPEC, SEED)
    for weights in run_ranks(initial_weights, 4, layout):
        assert weights.keys() == dict(alone.named_parameters()).keys()
        assert all(torch.equal(weights[name], parameter) for name, parameter in alone.named_parameters())


def norms_on_two_meshes() -> tuple[float, float, float]:
    """Gradients sharded over two axes, over one and replicated on the other, on a mesh of their own, and whole."""
    mesh = build_mesh(Layout(dp_replicate=2, dp_shard=2, zero=1), "cpu", 1)
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(8, 6, generator=generator, dtype=torch.float64) for _ in range(4)]
    truth = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))
    both = mesh["replicas", "shards"]
    placed = [
        distribute_tensor(gradients[0], both, [Shard(0), Shard(1)]),
        distribute_tensor(gradients[1], both, [Replicate(), Shard(0)]),
        distribute_tensor(gradients[2], mesh["shards"], [Shard(0)]),
        gradients[3],
    ]
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in placed]
    for parameter, gradient in zip(parameters, placed, strict=True):
        parameter.grad = gradient
    norm = gradient_norm(parameters)
    clip_gradients(parameters, norm, 1.5)
    return float(norm), truth, float(gradient_norm(parameters))


def test_the_norm_counts_each_element_once_whatever_it_is_sharded_over():
    for norm, truth, clipped in run_ranks(norms_on_two_meshes, 4):
        assert norm == pytest.approx(truth, rel=1e-14)
        assert clipped == pytest.approx(1.5, rel=1e-6)


def order_of_events(layout: Layout) -> list[str]:
    """When blocks are gathered and when they compute, in the second microbatch of a step, on this rank."""
    trainer = build(layout, torch.float32)
    events: list[str] = []

    def watch(name: str, block: nn.Module) -> None:
        assert isinstance(block, FSDPModule)
        (group,) = parameter_groups(block)
        gather = group.unshard

        def told(*args: object, **named: object) -> None:
            if not group.is_unsharded and pending_gather(group) is None:
                events.append(f"gather {name}")
            gather(*args, **named)  # type: ignore[arg-type]

        group.unshard = told  # type: ignore[method-assign]
        attention = block.get_submodule("attention")
        attention.register_forward_hook(lambda *_: events.append(f"forward {name}"))
        attention.register_full_backward_hook(lambda *_: events.append(f"backward {name}"))

    for name, block in trainer.model.module.layers.items():
        watch(name, block)
    trainer.forward_backward(local_batch(0, layout.data_rank(dist.get_rank()), layout.data_ranks, 1), 0)
    return events


def test_zero_3_gathers_the_next_block_before_the_present_one_computes_in_both_passes():
    for events in run_ranks(order_of_events, 2, Layout(dp_shard=2, zero=3)):
        assert events == [
            "gather 0", "gather 1", "forward 0", "forward 1",
            "gather 1", "gather 0", "backward 1", "backward 0",
        ]  # fmt: skip


def local_shards_differ(layout: Layout) -> bool:
    model = apply(SPEC, layout, torch.device("cpu"), seed=SEED)
    parameter = model.named_parameters["layers.0.ffn.up.weight"]
    assert isinstance(parameter, DTensor)
    mine = parameter.to_local().detach().contiguous()
    others = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(others, mine)
    return all(not torch.equal(others[0], other) for other in others[1:])


def test_shards_of_different_ranks_start_from_different_values():
    assert all(run_ranks(local_shards_differ, 4, Layout(dp_shard=4, zero=1)))
