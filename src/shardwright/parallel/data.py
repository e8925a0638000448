"""Data parallelism: how ranks that hold different tokens end up with one gradient (ZeRO 0, 1, 2, 3, hybrid).

Ranks of cp hold other tokens of the same samples, so to a gradient they are data ranks like others. State is sharded
over dp_shard x cp. An engine serves one part of the model: all of it, or under pp one stage.

P, G are the bytes of the part's parameters and gradients. A step has A micro-batches. Parameters are gathered and
reduced in K groups: each of the L blocks is one, and the rest (embedding, norm, head) one more; stages between the
first and the last have no rest.

| zero | engine       | held between micro-batches   | all-gathers     | reduce-scatters | all-reduces of gradients |
| ---- | ------------ | ---------------------------- | --------------- | --------------- | ------------------------ |
| 0    | `Replicated` | P, G whole                   | -               | -               | 1 a bucket, last only    |
| 1    | `Sharded`    | P and G whole, P sharded     | K               | K, last only    | K, last only, if hybrid  |
| 2    | `Sharded`    | P whole, P and G sharded     | K               | A x K           | K, last only, if hybrid  |
| 3    | `Sharded`    | P and G sharded              | A x (K + L)     | A x K           | K, last only, if hybrid  |

Under pp that row of zero 3 is `layout.zero_pp_gather = "microbatch"`; with "step" a stage gathers each parameter once
and holds it until its last backward pass, as in the row of zero 1.

Where weights are computed with in another type than they are held in (bf16), FSDP2 carries zero 0 too, on shards of
one rank: it makes the copies in that type, and accumulates and reduces gradients in the other.

Optimizer states are whole under 0 and sharded under 1, 2 and 3. Where every block is gathered for the forward pass,
freed, and gathered again for the backward pass, the next one travels while the present one computes; the group with
embedding and head is gathered once a micro-batch, since the head ends the one pass and begins the other.

Gradients are summed, never averaged: the loss is already divided by the target tokens of the whole global batch.
"""

from collections.abc import Iterable
from functools import partial
from itertools import pairwise
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from shardwright.layout import Layout
from shardwright.model.moe import MoE

BUCKET_BYTES = 25 * 2**20
"""The most that ZeRO-0 sums in one all-reduce, unless one parameter is larger: enough for full bandwidth, and little
enough that the first are sent while the backward pass computes the others. As in PyTorch's DDP (Li et al.,
arXiv 2006.15704)."""


class DataEngine(Protocol):
    """What a runner asks of data parallelism. In a pipeline the forward passes of several micro-batches come before the
    first backward pass, and a backward pass may be split: the gradients of inputs (I), and later those of weights (W).
    """

    keeps_gradients: bool
    """Gradients live in buckets that are sent: between steps they are zeroed, and not let go."""

    def before_backward(self, split: bool, last: bool) -> None:
        """Before a backward pass. `split`: gradients of weights come later. `last`: its micro-batch is the last of the
        step whose gradients are completed."""

    def after_gradients(self, split: bool, last: bool) -> None:
        """When all gradients of a micro-batch have been added."""

    def end_step(self) -> None:
        """After the last backward pass of the step: wait for the reduced gradients."""

    def release(self) -> None:
        """After forward passes without a backward, so that only shards are held again."""


class Replicated:
    """ZeRO-0: every rank holds everything. Gradients live in buckets; in the last backward pass each is summed over the
    ranks as soon as it is complete."""

    def __init__(self, parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None) -> None:
        """`parameters` are plain tensors that have storage. Without a group nothing is sent."""
        self.group = group
        # Were they let go, the next step would accumulate in new tensors and copy them into the buckets: P more.
        self.keeps_gradients = group is not None
        self._buckets: list[Tensor] = []
        self._views: list[tuple[nn.Parameter, Tensor]] = []
        """Of each parameter, the part of a bucket that is its gradient."""
        self._sizes: list[int] = []
        """Of each bucket, its number of parameters."""
        self._missing: list[int] = []
        """Of each bucket, the gradients that the last backward pass has still to add; empty before it."""
        self._works: list[dist.Work | None] = []
        """Of the buckets that have been sent. They go in one order, so that all ranks send the same ones together."""
        if group is not None:
            for bucket in _buckets([each for each in parameters if each.requires_grad]):
                self._add(bucket)

    def before_backward(self, split: bool, last: bool) -> None:
        # A loop of a user's own may have let gradients go, as `Optimizer.zero_grad` does.
        for parameter, view in self._views:
            if parameter.grad is None:
                parameter.grad = view.zero_()
        if last and not split:
            self._missing = self._sizes.copy()

    def after_gradients(self, split: bool, last: bool) -> None:
        if last:
            self._missing = [0] * len(self._sizes)  # those of a split pass, and of parameters that were not used
            self._send()

    def end_step(self) -> None:
        for work in self._works:
            assert work is not None
            work.wait()
        self._works.clear()
        self._missing = []

    def release(self) -> None:
        pass

    def _add(self, bucket: list[nn.Parameter]) -> None:
        flat = torch.zeros(sum(each.numel() for each in bucket), dtype=bucket[0].dtype, device=bucket[0].device)
        for parameter, part in zip(bucket, flat.split([each.numel() for each in bucket]), strict=True):
            parameter.grad = part.view_as(parameter)
            self._views.append((parameter, parameter.grad))
            parameter.register_post_accumulate_grad_hook(partial(self._added, len(self._buckets)))
        self._buckets.append(flat)
        self._sizes.append(len(bucket))

    def _added(self, bucket: int, _: Tensor) -> None:
        if self._missing:
            self._missing[bucket] -= 1
            self._send()

    def _send(self) -> None:
        """The line that sends ZeRO-0's bytes: one all-reduce for each bucket that is complete."""
        while len(self._works) < len(self._buckets) and not self._missing[len(self._works)]:
            bucket = self._buckets[len(self._works)]
            self._works.append(dist.all_reduce(bucket, group=self.group, async_op=True))


def _buckets(parameters: list[nn.Parameter]) -> Iterable[list[nn.Parameter]]:
    """Parameters that are sent together, the last first: about in the order in which their gradients come."""
    bucket: list[nn.Parameter] = []
    for parameter in reversed(parameters):
        if bucket and sum(each.nbytes for each in bucket) + parameter.nbytes > BUCKET_BYTES:
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket


class Sharded:
    """ZeRO-1, -2 and -3 over dp_shard x cp, replicated over dp_replicate: FSDP2, whose settings change with the
    micro-batch."""

    keeps_gradients = False

    def __init__(self, groups: list[FSDPModule], layout: Layout) -> None:
        """`groups` are the modules that are gathered and reduced as one, the outermost first."""
        self.groups = groups
        self.regathers = layout.regathers
        self.each_microbatch = layout.zero == 2 or layout.regathers
        self.partial_sums = self.each_microbatch and layout.dp_replicate > 1

    def before_backward(self, split: bool, last: bool) -> None:
        self._set(reduce=not split and (last or self.each_microbatch), last=not split and last)

    def after_gradients(self, split: bool, last: bool) -> None:
        if not split:
            return  # FSDP2's hooks have reduced them
        # They ran in the first half, so what they do is done again, now that gradients of weights are there.
        self._set(reduce=last or self.each_microbatch, last=last)
        states = [group._get_fsdp_state() for group in self.groups]
        for state in reversed(states):
            for parameters in state._fsdp_param_groups:
                # What came in the first half has been widened to the type of reduction; what came now has not.
                for parameter in parameters.fsdp_params:
                    none = parameter.unsharded_accumulated_grad is None and parameter.unsharded_param.grad is None
                    if none and self.partial_sums:
                        # Until the last microbatch FSDP2 adds up one flat tensor, which has to be of all parameters.
                        parameter.unsharded_param.grad = torch.zeros_like(parameter.unsharded_param)
                    parameter.accumulate_unsharded_grad_if_needed()
                    parameter.to_accumulated_grad_if_needed()
                parameters.post_backward()
        states[0]._root_post_backward_final_callback()

    def end_step(self) -> None:
        pass

    def release(self) -> None:
        for group in self.groups:
            group.reshard()

    def _set(self, reduce: bool, last: bool) -> None:
        root = self.groups[0]  # these three reach the groups below it
        # Unless the last backward reshards, the next forward runs on parameters from before the update.
        root.set_reshard_after_backward(last or self.regathers)
        root.set_requires_gradient_sync(reduce)
        root.set_requires_all_reduce(last)


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
    return Sharded([root, *ordered], layout)


def needs_sharding(layout: Layout, compute_dtype: torch.dtype, param_dtype: torch.dtype) -> bool:
    """Whether FSDP2 carries this run: for ZeRO 1 to 3, and wherever weights are computed with in another type."""
    return (layout.zero > 0 and layout.dp_shard * layout.cp > 1) or compute_dtype != param_dtype
