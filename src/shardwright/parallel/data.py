"""Data parallelism: reduces gradients over the ranks that hold different tokens (ZeRO 0, 1, 2, 3, hybrid).

Ranks of cp hold other tokens of the same samples, so gradients are reduced over them as over data ranks. Parameters,
gradients and optimizer states are sharded over dp_shard x cp. There is one engine for the whole model, or with pp one
for each stage of the rank.

P, G are the bytes of the model's or the stage's parameters and gradients. A step has A micro-batches. Parameters are
gathered and gradients reduced in K groups: one for each of the L blocks, and one for embedding, norm and head; stages
between the first and the last have only the blocks.

| zero | engine       | kept between micro-batches   | all-gathers     | reduce-scatters | all-reduces of gradients |
| ---- | ------------ | ---------------------------- | --------------- | --------------- | ------------------------ |
| 0    | `Replicated` | P, G whole                   | -               | -               | 1 a bucket, last only    |
| 1    | `Sharded`    | P and G whole, P sharded     | K               | K, last only    | K, last only, if hybrid  |
| 2    | `Sharded`    | P whole, P and G sharded     | K               | A x K           | K, last only, if hybrid  |
| 3    | `Sharded`    | P and G sharded              | A x (K + L)     | A x K           | K, last only, if hybrid  |

With pp the row of zero 3 applies for `layout.zero_pp_gather = "microbatch"`; with "step" a stage gathers each parameter
once and keeps it until its last backward pass, as in the row of zero 1. With `layout.zero_secondary_ranks` A x L of the
all-gathers of zero 3 are over the secondary ranks alone.

If the compute type differs from the parameter type (bf16 and fp32), FSDP2 runs zero 0 too, with a shard group of one
rank: it casts the parameters to the compute type, and accumulates and reduces gradients in the parameter type. A single
rank does the same without FSDP2, with a copy of the parameters in the compute type (`MasterWeights`). With zero 3,
which frees such a copy layer by layer, it uses FSDP2.

Optimizer states are replicated with zero 0 and sharded with 1, 2 and 3. With zero 3 each block is gathered for the
forward pass, freed, and gathered again for the backward pass; the all-gather of the next block overlaps with the
computation of the current one. The group with embedding and head is gathered once a micro-batch, since the head is last
in the forward pass and first in the backward pass.

Gradients are summed, never averaged: the loss is already divided by the number of target tokens of the global batch.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard

from shardwright.layout.layout import Layout
from shardwright.model.modules import row_of
from shardwright.model.moe import MoE
from shardwright.model.transformer import Transformer
from shardwright.parallel import collectives
from shardwright.parallel.collectives import StartedCollective
from shardwright.parallel.compressed import Compression, OverReplicas
from shardwright.parallel.compression import Codec, start_sum_of_vector
from shardwright.parallel.offload import pins
from shardwright.parallel.secondary import drop_secondary_shards, keep_secondary_shards
from shardwright.split.compression import BUCKET_BYTES, CONVERTED_BYTES
from shardwright.system.torch_private import (
    FSDPParam,
    foreach_copy_,
    fsdp_parameters,
    gathered_tensors,
    reduce_gradients,
    secondary_shard_of,
    unreduced_gradient,
    whole_parameter,
)
from shardwright.system.units import in_groups


class DataEngine(Protocol):
    """The hooks that a runner of micro-batches calls for data parallelism. In a pipeline the forward passes of several
    micro-batches precede the first backward pass, and a backward pass may be split: gradients of inputs first (I),
    gradients of weights later (W).
    """

    keeps_gradients: bool
    """Whether gradients are views of all-reduce buckets, which are zeroed between steps, not freed."""

    def before_backward(self, split: bool, last: bool) -> None:
        """Prepare a backward pass. `split`: gradients of weights are computed later. `last`: this micro-batch is
        the last of the step whose gradients are completed."""

    def after_gradients(self, split: bool, last: bool) -> None:
        """Reduce or convert the gradients of a micro-batch after all have been accumulated."""

    def end_step(self) -> None:
        """Wait for the reduced gradients after the last backward pass of the step."""

    def release(self) -> None:
        """Free the gathered parameters after forward passes without a backward pass, so that only shards remain."""

    def parameters_in_use(self) -> Iterable[Tensor]:
        """Return the tensors with which modules compute instead of the model's parameters."""

    def buffers(self) -> Iterator[tuple[str, Tensor | None]]:
        """Yield ("parameters", "gathered" or "gradients", tensor) for the current tensors that are not the model's:
        copies and gathered parameters, buckets and unsharded gradients."""


class ErrorFeedback(Protocol):
    """Sums compressed gradients of some parameters over the ranks that hold replicas of them. The part of a gradient
    that a rank has not sent is added to the rank's next gradient."""

    def __contains__(self, name: str) -> bool:
        """Return whether the gradient of a parameter is compressed."""

    @property
    def state(self) -> dict[str, Tensor]:
        """The tensors that are kept between steps, by `KIND/NAME`, for checkpoints."""

    def sum(self) -> None:
        """Replace every gradient by the compressed sum of all ranks."""


class Replicated:
    """ZeRO-0: every rank has all parameters, gradients and optimizer states. Gradients are views of buckets. In the
    last backward pass of a step each bucket is all-reduced as soon as it is complete."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        group: dist.ProcessGroup | None,
        codec: Codec | None = None,
        feedback: ErrorFeedback | None = None,
    ) -> None:
        """`parameters`: plain tensors that have storage. Without a `group` nothing is reduced. `codec`: the encoding of
        gradients, if they are compressed. `feedback` sums the gradients of other parameters, after the last backward
        pass."""
        self.group, self.feedback = group, feedback
        self.start_sum = collectives.start_sum if codec is None else partial(start_sum_of_vector, codec=codec)
        # Freed gradients would make the next step accumulate in new tensors and copy those into the buckets: P more.
        self.keeps_gradients = group is not None
        self._buckets: list[Tensor] = []
        self._views: list[tuple[nn.Parameter, Tensor]] = []
        """(parameter, its gradient: a view of a bucket)."""
        self._sizes: list[int] = []
        """Number of parameters of each bucket."""
        self._missing: list[int] = []
        """For each bucket, the number of gradients that the last backward pass has yet to add; empty before it."""
        self._works: list[StartedCollective] = []
        """All-reduces that have been started. Buckets are reduced in one fixed order, the same on all ranks."""
        if group is not None:
            # The last parameter first: roughly the order of the backward pass.
            trained = [parameter for parameter in parameters if parameter.requires_grad]
            for bucket in in_groups(reversed(trained), lambda parameter: parameter.nbytes, BUCKET_BYTES):
                self._add(bucket)

    def before_backward(self, split: bool, last: bool) -> None:
        # A user's own loop may have set gradients to None, as `Optimizer.zero_grad` does.
        for parameter, view in self._views:
            if parameter.grad is None:
                parameter.grad = view.zero_()
        if last and not split:
            self._missing = self._sizes.copy()

    def after_gradients(self, split: bool, last: bool) -> None:
        if last:
            self._missing = [0] * len(self._sizes)  # includes parameters of a split pass and unused parameters
            self._send()

    def end_step(self) -> None:
        for work in self._works:
            work.wait()
        self._works.clear()
        self._missing = []
        if self.feedback is not None:
            self.feedback.sum()

    def release(self) -> None:
        pass

    def parameters_in_use(self) -> Iterable[Tensor]:
        return ()

    def buffers(self) -> Iterator[tuple[str, Tensor | None]]:
        return (("gradients", bucket) for bucket in self._buckets)

    def _add(self, bucket: list[nn.Parameter]) -> None:
        flat = bucket[0].new_zeros(sum(parameter.numel() for parameter in bucket))
        for parameter, part in zip(bucket, flat.split([parameter.numel() for parameter in bucket]), strict=True):
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
        """Start one all-reduce for each bucket that is complete; the only communication of ZeRO-0."""
        while len(self._works) < len(self._buckets) and not self._missing[len(self._works)]:
            bucket = self._buckets[len(self._works)]
            assert self.group is not None
            self._works.append(self.start_sum(bucket, self.group))


class Sharded:
    """ZeRO-1, -2 and -3 over dp_shard x cp, replicated over dp_replicate: FSDP2, with settings that depend on the
    micro-batch."""

    keeps_gradients = False

    def __init__(self, groups: list[FSDPModule], layout: Layout, over_replicas: OverReplicas | None = None) -> None:
        """`groups`: modules whose parameters are gathered and reduced together, the outermost first. `over_replicas`
        sums gradient shards over dp_replicate, if FSDP2 does not."""
        self.groups, self.over_replicas = groups, over_replicas
        self.regathers = layout.regathers
        self.each_microbatch = layout.zero == 2 or layout.regathers
        self.partial_sums = self.each_microbatch and layout.dp_replicate > 1

    def before_backward(self, split: bool, last: bool) -> None:
        self._set(reduce=not split and (last or self.each_microbatch), last=not split and last)

    def after_gradients(self, split: bool, last: bool) -> None:
        if not split:
            return  # FSDP2's hooks have reduced the gradients
        # The hooks ran after I, before the gradients of weights existed, so their work is repeated here after W.
        self._set(reduce=last or self.each_microbatch, last=last)
        # Until the last micro-batch FSDP2 accumulates one flat tensor of partial sums, which needs all parameters.
        reduce_gradients(self.groups, missing_as_zeros=self.partial_sums)

    def end_step(self) -> None:
        if self.over_replicas is not None:
            self.over_replicas.sum(self.groups)

    def release(self) -> None:
        for group in self.groups:
            group.reshard()
            drop_secondary_shards(group)

    def parameters_in_use(self) -> Iterable[Tensor]:
        return (whole for parameter in self._fsdp_parameters() if (whole := whole_parameter(parameter)) is not None)

    def buffers(self) -> Iterator[tuple[str, Tensor | None]]:
        for parameter in self._fsdp_parameters():
            gathered = *gathered_tensors(parameter), secondary_shard_of(parameter)
            yield from (("gathered", tensor) for tensor in gathered)
            yield "gradients", unreduced_gradient(parameter)

    def _fsdp_parameters(self) -> Iterator[FSDPParam]:
        return chain.from_iterable(map(fsdp_parameters, self.groups))

    def _set(self, reduce: bool, last: bool) -> None:
        root = self.groups[0]  # these three settings apply to the nested groups too
        # Unless the last backward pass reshards, the next forward pass uses the parameters from before the update.
        root.set_reshard_after_backward(last or self.regathers)
        root.set_requires_gradient_sync(reduce)
        root.set_requires_all_reduce(last)


class MasterWeights:
    """The engine of a single rank whose modules compute with copies of the parameters in another type.

    The parameters themselves are the master weights: the optimizer updates them and checkpoints contain them. Gradients
    of the copies wait until they have `CONVERTED_BYTES` bytes, or until the micro-batch ends; then they are added to
    the gradients of the master weights, and freed.
    """

    keeps_gradients = False

    def __init__(self, model: nn.Module, compute_dtype: torch.dtype) -> None:
        """Replace the trained parameters of `model`, which have values, by copies in `compute_dtype`."""
        self.masters: list[nn.Parameter] = []
        self.copies: list[nn.Parameter] = []
        self._waiting: list[tuple[nn.Parameter, Tensor]] = []
        """Master weights, and the gradients of their copies."""
        for name, master in list(model.named_parameters()):
            if master.requires_grad:
                module, _, own = name.rpartition(".")
                copy = nn.Parameter(master.detach().to(compute_dtype))
                copy.register_post_accumulate_grad_hook(partial(self._take_gradient, master))
                setattr(model.get_submodule(module), own, copy)
                self.masters.append(master)
                self.copies.append(copy)

    def before_backward(self, split: bool, last: bool) -> None:
        pass

    def after_gradients(self, split: bool, last: bool) -> None:
        self._add_waiting()

    def end_step(self) -> None:
        pass

    def release(self) -> None:
        pass

    def parameters_in_use(self) -> Iterable[Tensor]:
        return self.copies

    def buffers(self) -> Iterator[tuple[str, Tensor | None]]:
        return (("parameters", copy) for copy in self.copies)

    @torch.no_grad()
    def update_copies(self) -> None:
        """Round the master weights into the copies."""
        foreach_copy_([*self.copies], [*self.masters])

    def _take_gradient(self, master: nn.Parameter, copy: Tensor) -> None:
        assert copy.grad is not None
        self._waiting.append((master, copy.grad))
        copy.grad = None
        if sum(gradient.nbytes for _, gradient in self._waiting) >= CONVERTED_BYTES:
            self._add_waiting()

    @torch.no_grad()
    def _add_waiting(self) -> None:
        """Add the waiting gradients to the gradients of the master weights. The first gradients of a step are converted
        together: on a GPU one kernel for many tensors took a third of the time of one kernel for each."""
        first = []
        for master, gradient in self._waiting:
            if master.grad is None:
                first.append((master, gradient))
            else:
                master.grad.add_(gradient)
        self._waiting.clear()
        converted = [torch.empty_like(gradient, dtype=master.dtype) for master, gradient in first]
        if first:
            foreach_copy_(converted, [gradient for _, gradient in first])
        for (master, _), gradient in zip(first, converted, strict=True):
            master.grad = gradient


def shard(
    model: Transformer,
    blocks: Iterable[nn.Module],
    layout: Layout,
    mesh: DeviceMesh,
    expert_mesh: DeviceMesh | None,
    compression: Compression,
    secondary: Mapping[str, dist.ProcessGroup],
    compute_dtype: torch.dtype,
    param_dtype: torch.dtype,
    replicas_apart: bool,
) -> list[FSDPModule]:
    """Apply FSDP2: make the parameters DTensors sharded over dp_shard x cp (in place), with one FSDP group for each
    block and one for the other modules. Return the groups, the outermost first.

    `replicas_apart`: FSDP2 does not sum gradients over replicas; `Sharded` gets an `OverReplicas` for that.

    Parameters are stored in `param_dtype` and used in `compute_dtype`; gradients are reduced and accumulated in
    `param_dtype`. With `layout.offload_parameters` shards of parameters and gradients are in host memory: parameters
    are copied to the device for each gather, and reduced gradients to the host. `secondary`: the groups from which
    layers are gathered in backward passes (parallel/secondary.py), instead of from all ranks. Experts form their own
    group if they have their own mesh. The balance of experts stays replicated, in its own type. Frozen parameters are
    stored in `compute_dtype` and have no gradient; only ZeRO-3 shards them, since with the other stages a rank has all
    of them anyway. `model` is on the meta device, without values.
    """
    # FSDP2 does not cast inputs: the model makes rotary tables and activations in the type of its weights.
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=param_dtype, cast_forward_inputs=False)
    on_host = layout.offload_parameters == "cpu"
    offload = CPUOffloadPolicy(pin_memory=pins(torch.device(mesh.device_type))) if on_host else OffloadPolicy()
    whole = {
        parameter
        for name, parameter in model.named_parameters()
        if (row := row_of(model.spec, name)).kind == "balance" or (row.frozen and layout.zero < 3 and not on_host)
    }

    def group_of(module: nn.Module, along: DeviceMesh, prefix: str, reshard: bool, dim: int = 0) -> FSDPModule:
        replicas = f"{prefix}replicas"
        shards = f"{prefix}shards"
        replicated = not replicas_apart and replicas in (along.mesh_dim_names or ())
        over = along[replicas, shards] if replicated else along[shards]
        group = fully_shard(
            module,
            mesh=over,
            mp_policy=policy,
            offload_policy=offload,
            reshard_after_forward=reshard,
            shard_placement_fn=(lambda _: Shard(dim)) if dim else None,
            ignored_params=whole,
        )
        group.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
        if over.size() > 1:  # a single rank has the sum already, and FSDP2 would divide it by 1 into a new tensor
            group.set_gradient_divide_factor(1.0)
        if along[shards].size() > 1:
            compression.apply(group, prefix)
        if reshard and not dim and prefix in secondary:
            keep_secondary_shards(group, secondary[prefix], mesh.device_type)
        return group

    units = []
    for block in blocks:
        inner = []
        for layer in block.modules():
            if isinstance(layer, MoE) and expert_mesh is not None:
                experts = layer.experts
                few = layout.zero > 0 and next(experts.parameters()).shape[0] % (layout.expert_dp_shard * layout.ep)
                inner.append(group_of(experts, expert_mesh, "expert_", layout.regathers, dim=1 if few else 0))
        units.append([group_of(block, mesh, "", layout.regathers), *inner])
    root = group_of(model, mesh, "", False)
    groups = [root, *chain(*units)]
    if layout.zero == 3:
        _gather_ahead(root, units)
    return groups


def _gather_ahead(root: FSDPModule, units: Sequence[Sequence[FSDPModule]]) -> None:
    """Gather each block while the block before it computes, in the forward and in the backward pass. `units`: the FSDP
    group of each block, followed by the groups of its experts.

    Only blocks gather ahead: experts that are recomputed in the backward pass would gather the next block.
    """
    for unit, following in pairwise([[root], *units, []]):
        unit[0].set_modules_to_forward_prefetch([*unit[1:], *following[:1]])
    for unit, following in pairwise(units):
        following[0].set_modules_to_backward_prefetch([*unit])


def needs_sharding(layout: Layout, compute_dtype: torch.dtype, param_dtype: torch.dtype) -> bool:
    """Return whether FSDP2 is used: for ZeRO 1 to 3, on several ranks whose compute type differs from the parameter
    type, and on one rank whose parameters are in host memory."""
    shards = layout.zero > 0 and layout.dp_shard * layout.cp > 1
    casts = compute_dtype != param_dtype and not needs_masters(layout, compute_dtype, param_dtype)
    return shards or casts or layout.offload_parameters != "none"


def needs_masters(layout: Layout, compute_dtype: torch.dtype, param_dtype: torch.dtype) -> bool:
    """Return whether a single rank computes with copies of its parameters."""
    alone = layout.world_size == 1 and layout.zero < 3 and layout.offload_parameters == "none"
    return alone and compute_dtype != param_dtype
