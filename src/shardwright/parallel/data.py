"""Data parallelism: how ranks that hold different tokens end up with one gradient (ZeRO 0, 1, 2, 3, hybrid).

Ranks of cp have other tokens of the same samples; to a gradient they are data ranks like others. State is shared out
over dp_shard x cp.

P, G are the bytes of all parameters and gradients. A step has A microbatches; parameters are gathered and reduced
in K groups, each block one and the rest one.

| zero | engine | held between microbatches     | all-gathers     | reduce-scatters | all-reduces of gradients |
| ---- | ------ | ----------------------------- | --------------- | --------------- | ------------------------ |
| 0    | DDP    | P, G whole                    | -               | -               | 1 a bucket, last only    |
| 1    | FSDP2  | P and G whole, P share        | K               | K, last only    | K, last only, if hybrid  |
| 2    | FSDP2  | P whole, P and G share        | K               | A x K           | K, last only, if hybrid  |
| 3    | FSDP2  | P and G share                 | A x (2 K - 1)   | A x K           | K, last only, if hybrid  |

Where weights are computed with in another type than they are held in (bf16), FSDP2 carries zero 0 too, on shards of
one rank: it makes the copies in that type, and accumulates and reduces gradients in the other.

The optimizer state is whole under 0 and a share under 1, 2 and 3. Under 3 every block is gathered for the forward
pass, freed, and gathered again for the backward pass, the next one always while the present one computes; the
group with embedding and head is gathered once a microbatch, since the head ends the one pass and begins the other.

Gradients are summed, never averaged: the loss is already divided by the target tokens of the whole global batch.
"""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from shardwright.layout import Layout
from shardwright.model.moe import MoE


class DataEngine(Protocol):
    """What the training step asks of data parallelism, whatever the stage."""

    keeps_gradients: bool
    """Gradients live in buckets that are sent: between steps they are zeroed, and not let go."""

    def __call__(self, *inputs: Any, **named: Any) -> Tensor:
        """The forward pass."""

    def begin_microbatch(self, last: bool) -> None:
        """To be called before the forward pass of each microbatch; `last` ends the accumulation."""

    def release(self) -> None:
        """To be called after forward passes without a backward, so that only the shares are held again."""


class Single:
    """One data rank: the model itself."""

    keeps_gradients = False

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, *inputs: Any, **named: Any) -> Tensor:
        return self.model(*inputs, **named)

    def begin_microbatch(self, last: bool) -> None:
        pass

    def release(self) -> None:
        pass


class Replicas:
    """ZeRO-0: every rank holds everything; buckets of gradients are summed while the backward pass runs."""

    # Were they let go, the next step would accumulate in new tensors and copy them into the buckets: P more.
    keeps_gradients = True

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        # Initial values are already equal on all ranks (model/init.py), so nothing is broadcast.
        self.ddp = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True, init_sync=False)
        self.ddp.register_comm_hook(group, _sum_bucket)

    def __call__(self, *inputs: Any, **named: Any) -> Tensor:
        return self.ddp(*inputs, **named)

    def begin_microbatch(self, last: bool) -> None:
        self.ddp.require_backward_grad_sync = last

    def release(self) -> None:
        pass


def _sum_bucket(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The line that sends ZeRO-0's bytes: one all-reduce a bucket, summed (DDP itself would average)."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


class Sharded:
    """ZeRO-1, -2 and -3 over dp_shard x cp, replicated over dp_replicate: FSDP2, with its knobs set a microbatch."""

    keeps_gradients = False

    def __init__(self, model: nn.Module, groups: list[FSDPModule], zero: int) -> None:
        """`groups` are the modules that are gathered and reduced as one, the outermost first."""
        self.model = model
        self.groups = groups
        self.zero = zero

    def __call__(self, *inputs: Any, **named: Any) -> Tensor:
        return self.model(*inputs, **named)

    def begin_microbatch(self, last: bool) -> None:
        root = self.groups[0]  # these three reach the groups below it
        # Unless the last backward reshards, the next forward runs on parameters from before the update.
        root.set_reshard_after_backward(last or self.zero == 3)
        root.set_requires_gradient_sync(last or self.zero >= 2)
        root.set_requires_all_reduce(last)

    def release(self) -> None:
        for group in self.groups:
            group.reshard()


def shard(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    layout: Layout,
    mesh: DeviceMesh,
    expert_mesh: DeviceMesh | None,
    compute_dtype: torch.dtype,
    param_dtype: torch.dtype,
) -> Sharded:
    """Make the parameters DTensors sharded over dp_shard x cp (in place), a group of them for each block and the rest.

    Parameters are held in `param_dtype`, computed with in `compute_dtype`; gradients are reduced and accumulated in
    `param_dtype`. Experts are a group of their own where they lie on a mesh of their own. What is not trained stays
    whole, and in the type it is held in. Called on a model on the meta device, before it has values.
    """
    # Inputs are not cast: the model makes its tables, and its activations, in the type of its weights.
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=param_dtype, cast_forward_inputs=False)
    untrained = {parameter for parameter in model.parameters() if not parameter.requires_grad}

    def group_of(module: nn.Module, along: DeviceMesh, prefix: str, reshard: bool, dim: int = 0) -> FSDPModule:
        replicas = f"{prefix}replicas"
        share = f"{prefix}share"
        replicated = replicas in (along.mesh_dim_names or ())
        return fully_shard(
            module,
            mesh=along[replicas, share] if replicated else along[share],
            mp_policy=policy,
            reshard_after_forward=reshard,
            shard_placement_fn=(lambda _: Shard(dim)) if dim else None,
            ignored_params=untrained,
        )

    ordered = []
    for block in blocks:
        inner = []
        for layer in block.modules():
            if isinstance(layer, MoE) and expert_mesh is not None:
                experts = layer.experts
                few = layout.zero > 0 and next(experts.parameters()).shape[0] % (layout.expert_dp_shard * layout.ep)
                inner.append(group_of(experts, expert_mesh, "expert_", layout.regathers, dim=1 if few else 0))
        ordered += [group_of(block, mesh, "", layout.regathers), *inner]
    root = group_of(model, mesh, "", False)
    for group in (root, *ordered):  # neither setting reaches the groups below
        group.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
        group.set_gradient_divide_factor(1.0)
    if layout.zero == 3:
        for group, following in pairwise((root, *ordered)):
            group.set_modules_to_forward_prefetch([following])
        for group, following in pairwise(ordered):
            following.set_modules_to_backward_prefetch([group])
    return Sharded(model, [root, *ordered], layout.zero)


def needs_sharding(layout: Layout, compute_dtype: torch.dtype, param_dtype: torch.dtype) -> bool:
    """Whether FSDP2 carries this run: for ZeRO 1 to 3, and wherever weights are computed with in another type."""
    return (layout.zero > 0 and layout.dp_shard * layout.cp > 1) or compute_dtype != param_dtype
