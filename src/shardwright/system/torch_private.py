"""Every private name of PyTorch that this package uses, and every difference between the versions it supports.

A name is private if a part of its path starts with one underscore: `torch._foreach_norm`, `Tensor._version`,
`torch.ops.aten._flash_attention_forward`, and every import from `torch._subclasses`. PyTorch changes such names without
notice. No other module of the package may use a private name, or an attribute of FSDP2's private classes; it imports
the function, class or operator from here. `tests/test_torch_private.py` checks this, and reports each name that the
installed PyTorch lacks.

| PyTorch | difference                                                              | here                        |
| ------- | ----------------------------------------------------------------------- | --------------------------- |
| 2.11    | an FSDP2 module has one parameter group or None, not a list             | `parameter_groups`          |
| 2.11    | FSDP2 cannot reduce zeros for parameters without a gradient             | `reduce_unused_parameters`  |
| 2.11    | `varlen_attn` accepts fewer kv heads than heads without a flag          | `varlen_attention`          |
| 2.12    | and before: FSDP2 cannot shard parameters of integers (issue 185239)    | `shards_bytes`              |
| 2.13    | `step` of a pipeline schedule takes a batch, not micro-batches          | `take_micro_batches`        |
| 2.13    | new names of two collectives, and warnings about the old names          | `all_gather_single` and ... |
"""

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import _functional_collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

__all__ = [
    "DTensorSpec",
    "FSDPParam",
    "FSDPParamGroup",
    "FakeTensor",
    "FakeTensorMode",
    "StridedShard",
    "TensorMeta",
    "TorchDispatchMode",
    "tree_leaves",
    "tree_map",
]

# Memory of GPUs

record_memory_history = torch.cuda.memory._record_memory_history
dump_memory_snapshot = torch.cuda.memory._dump_snapshot

# Operators

foreach_add_, foreach_copy_, foreach_mul_, foreach_sign_, foreach_zero_ = (
    torch._foreach_add_,
    torch._foreach_copy_,
    torch._foreach_mul_,
    torch._foreach_sign_,
    torch._foreach_zero_,
)
foreach_lerp, foreach_lerp_, foreach_norm = torch._foreach_lerp, torch._foreach_lerp_, torch._foreach_norm
grouped_mm, fp8_mm = torch._grouped_mm, torch._scaled_mm
fused_attention_choice = torch._fused_sdp_choice

_aten = torch.ops.aten
flash_attention_cpu = _aten._scaled_dot_product_flash_attention_for_cpu
flash_attention_cpu_backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
flash_attention_cuda = _aten._scaled_dot_product_flash_attention
flash_attention_cuda_backward = _aten._scaled_dot_product_flash_attention_backward
flash_attention_pieces = _aten._flash_attention_forward
flash_attention_pieces_backward = _aten._flash_attention_backward

all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_NEWER = hasattr(_functional_collectives, "all_gather_single_autograd")
all_gather_with_gradients: Callable[..., Tensor] = getattr(
    _functional_collectives, "all_gather_single_autograd" if _NEWER else "all_gather_tensor_autograd"
)


def varlen_attention(q_NHC: Tensor, k_NKC: Tensor, v_NKC: Tensor, ends: Tensor, longest: int) -> Tensor:
    """Return causal attention within each document by PyTorch's variable-length attention, (N, H, C). `ends`: 0 and the
    end positions of the documents.

    The flash kernel itself accepts fewer kv heads than heads. PyTorch 2.11 passes them through; newer versions reject
    them without `enable_gqa`, which has no other effect.
    """
    from torch.nn.attention.varlen import varlen_attn  # queries the device on import

    grouped = q_NHC.shape[1] != k_NKC.shape[1]
    has_flag = "enable_gqa" in inspect.signature(varlen_attn).parameters
    flags: dict[str, Any] = {"enable_gqa": grouped} if has_flag else {}
    o_NHC = varlen_attn(q_NHC, k_NKC, v_NKC, ends, ends, longest, longest, window_size=(-1, 0), **flags)
    assert isinstance(o_NHC, Tensor)
    return o_NHC


# Tensors and modules


def bytes_in_dcp_file(file: str, begin: int, n_bytes: int) -> Any:
    """Return the entry of a `.metadata` for bytes of a file of a distributed checkpoint (DCP)."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # slow to import

    return _StorageInfo(file, begin, n_bytes)


def storage_id(storage: torch.UntypedStorage) -> int:
    """Return a number that identifies a storage, also a fake one, among the storages that exist at the same time."""
    return storage._cdata


def tensor_version(tensor: Tensor) -> int:
    """Return how often a tensor was modified in place."""
    return tensor._version


def recomputed_module(module: nn.Module) -> nn.Module | None:
    """Return the module that PyTorch's wrapper for activation checkpointing recomputes; None for another module."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper  # slow to import

    return module._checkpoint_wrapped_module if isinstance(module, CheckpointWrapper) else None


def compile_counters() -> Mapping[str, Mapping[str, int]]:
    """Return what `torch.compile` counts in this process: "frames", "graph_break", ..."""
    from torch._dynamo.utils import counters  # slow to import

    return counters


def map_tensors(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Replace each parameter and buffer of a module and its submodules, as `Module.to` does."""
    module._apply(change)


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return a mesh with one axis `name` that has the ranks of all axes of `mesh`."""
    return mesh._flatten(name)


def keep_compiled_side_effects_once() -> None:
    """Make recomputed compiled blocks in the backward pass change module attributes only in the forward pass."""
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True


# FSDP2


def parameter_groups(module: FSDPModule) -> list[FSDPParamGroup]:
    """Return the parameter groups of one FSDP2 module without its submodules': none or one with `fully_shard`."""
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # PyTorch 2.11


def fsdp_parameters(module: FSDPModule) -> list[FSDPParam]:
    """Return FSDP2's objects for the parameters of one module without its submodules'."""
    return [parameter for group in parameter_groups(module) for parameter in group.fsdp_params]


def shards_bytes() -> bool:
    """Return whether FSDP2 shards parameters of integers, which never have a gradient."""
    return tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)


def reduce_unused_parameters(module: FSDPModule) -> None:
    """Make FSDP2 reduce zeros for parameters of the module that have no gradient."""
    if hasattr(module, "set_reduce_scatter_unused_params"):
        module.set_reduce_scatter_unused_params(True, recurse=False)
        return
    for group in parameter_groups(module):  # PyTorch 2.11
        group.post_backward = partial(_post_backward_with_zeros, group, group.post_backward)  # type: ignore[method-assign]


def _post_backward_with_zeros(group: FSDPParamGroup, post_backward: Callable[..., None], *unused: Any) -> None:
    for parameter in group.fsdp_params if group.reduce_grads else ():
        whole = whole_parameter(parameter)
        if whole is not None and whole.requires_grad and parameter.unsharded_accumulated_grad is None:
            whole.grad = torch.zeros_like(whole) if whole.grad is None else whole.grad
    post_backward(*unused)


def reduce_gradients(modules: Sequence[FSDPModule], *, missing_as_zeros: bool) -> None:
    """Run what FSDP2's hooks run after a backward pass, for gradients that were computed after the hooks had run.
    `modules`: in the order of the forward pass, the root first. Gradients from before are already in the reduction
    type, later ones are not. `missing_as_zeros`: add zeros for a parameter without a gradient."""
    for group in (group for module in reversed(modules) for group in parameter_groups(module)):
        for parameter in group.fsdp_params:
            whole = parameter.unsharded_param
            none = parameter.unsharded_accumulated_grad is None and whole.grad is None
            if none and missing_as_zeros and whole.requires_grad:
                whole.grad = torch.zeros_like(whole)
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()
        group.post_backward()
    state: Any = modules[0]._get_fsdp_state()
    state._root_post_backward_final_callback()


def sharded_parameter(parameter: FSDPParam) -> nn.Parameter:
    """Return the parameter that the module has between steps, with this rank's shard and its gradient."""
    return parameter.sharded_param


def set_gradient_shard(parameter: FSDPParam, local: Tensor) -> None:
    """Replace the gradient of `sharded_parameter`."""
    parameter.sharded_param.grad = parameter.to_sharded_dtensor(local)


def padded_shard_shape(parameter: FSDPParam) -> torch.Size:
    """Return the shape of a rank's shard with the padding with which FSDP2 sends it."""
    return parameter.padded_sharded_param_size


def is_offloaded(parameter: FSDPParam) -> bool:
    """Return whether the shard and its gradient are on the host."""
    return parameter.offload_to_cpu


def gathers_offloaded(parameter: FSDPParam) -> bool:
    """Return whether the next gather starts with a copy of the shard from the host."""
    return parameter.offload_to_cpu and parameter.sharded_state == ShardedState.SHARDED


def gathered_tensors(parameter: FSDPParam) -> list[Tensor]:
    """Return the flat tensors into which the ranks' shards are gathered; they stay when their memory is freed."""
    return parameter.all_gather_outputs


def unreduced_gradient(parameter: FSDPParam) -> Tensor | None:
    """Return the sum of the whole gradients of micro-batches that are not reduced yet."""
    return parameter.unsharded_accumulated_grad


def whole_parameter(parameter: FSDPParam) -> nn.Parameter | None:
    """Return the unsharded parameter, or None before the first all-gather."""
    return getattr(parameter, "_unsharded_param", None)


def shard_of(parameter: FSDPParam) -> Tensor:
    """Return this rank's shard of a parameter, flat and padded, as FSDP2 stores it between steps."""
    return parameter._sharded_param_data


def secondary_shard_of(parameter: FSDPParam) -> Tensor | None:
    """Return this rank's part of a gathered parameter that is kept for the backward pass (secondary shard),
    or None. Only parameters of `gather_again_among` have such a shard."""
    return parameter._sharded_post_forward_param_data if "to_sharded_post_forward" in vars(parameter) else None


def set_secondary_shard(parameter: FSDPParam, shard: Tensor | None) -> None:
    """Replace the tensor that `secondary_shard_of` returns."""
    parameter._sharded_post_forward_param_data = shard


def gather_again_among(module: FSDPModule, ranks: DeviceMesh, part_of: Callable[[Tensor], Tensor]) -> None:
    """Make backward passes gather the parameters of one module, sharded along dim 0, among `ranks`, from
    `part_of(whole)`, which a rank keeps of each gathered flat tensor with FSDP2's padding after a forward pass.

    PyTorch 2.13 has no public way for parameters that tp shards (`reshard_after_forward=n` is refused), so this
    function replaces a method of each parameter."""
    mesh_info = FSDPMeshInfo(ranks, shard_mesh_dim=0)
    for group in parameter_groups(module):
        group.post_forward_mesh_info = mesh_info
        for parameter in group.fsdp_params:
            kept: Any = parameter
            kept.to_sharded_post_forward = partial(_keep_part, parameter, part_of)
            set_secondary_shard(parameter, None)


def _keep_part(parameter: FSDPParam, part_of: Callable[[Tensor], Tensor]) -> None:
    """Keep a part of a gathered parameter and free the rest. The module has its shard, as between steps."""
    (whole,) = parameter.all_gather_outputs
    set_secondary_shard(parameter, part_of(whole))
    parameter._setattr_on_modules(parameter.sharded_param)
    parameter.free_unsharded_param()
    parameter.sharded_state = ShardedState.SHARDED_POST_FORWARD


def pending_gather(group: FSDPParamGroup) -> Any:
    """Return the all-gather of a group that was started and not yet waited for, or None."""
    return group._all_gather_result


# Running operation


def node_number() -> int | None:
    """Return the number of the autograd node whose backward runs, or None outside of a backward pass."""
    node: Any = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


def next_node_number() -> int:
    """Return the number that the next autograd node gets."""
    return torch.autograd._get_sequence_nr()


def script_type(value: torch.ScriptObject) -> str:
    """Return the C++ class name of a value that PyTorch passes to operators."""
    return str(value._type())


def operator_results(operator: Any) -> list[str]:
    """Return the types of the results of an operator of `torch.ops`, such as `["Tensor"]`."""
    return [str(result.type) for result in operator._schema.returns]


def operator_arguments(operator: Any) -> set[str]:
    """Return the names of the arguments of an operator of `torch.ops`."""
    return {argument.name for argument in operator._schema.arguments}


class DispatchMode(TorchDispatchMode):
    """A dispatch mode without Dynamo's guard, which would take 10 % of the time. Nothing is compiled in it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


# Functions of PyTorch that a dry run replaces, as PyTorch 2.13 has no public hook at these places


@contextmanager
def _replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace an attribute of a module or class by `make(old value)` during the block."""
    before = inspect.getattr_static(owner, name)
    setattr(owner, name, make(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


def _observed(
    owner: Any, name: str, before: Callable[..., None] = lambda *_: None, after: Callable[..., None] = lambda *_: None
) -> AbstractContextManager[None]:
    """During the block, call `before` and `after` with the positional arguments of each call of a function."""

    def observing(function: Callable[..., Any]) -> Callable[..., Any]:
        def report_and_call(*args: Any, **kwargs: Any) -> Any:
            before(*args)
            try:
                return function(*args, **kwargs)
            finally:
                after(*args)

        return report_and_call

    return _replaced(owner, name, observing)


def few_empty_shards() -> AbstractContextManager[None]:
    """During the block, FSDP2 uses the same empty tensor for all ranks that have no rows of a parameter. It otherwise
    creates one for each; with 16,384 ranks this takes most of the time of a dry run (PyTorch 2.13)."""
    return _replaced(_fsdp_param, "_chunk_with_empty", lambda _: _chunks)


def _chunks(tensor: Tensor, num_chunks: int, dim: int) -> list[Tensor]:
    chunks = list(torch.chunk(tensor, num_chunks, dim=dim))
    missing = num_chunks - len(chunks)
    return chunks + [chunks[0].new_empty(0)] * missing if missing else chunks


def replaced_rms_norm(rms_norm: Callable[..., Tensor]) -> AbstractContextManager[None]:
    """During the block, `F.rms_norm` and `nn.RMSNorm` call another function with the same arguments. A
    `TorchFunctionMode` is not active in the backward pass, where recomputed blocks run again."""
    return _replaced(torch.nn.functional, "rms_norm", lambda _: rms_norm)


def observed_resizes(resized: Callable[[torch.UntypedStorage], None]) -> AbstractContextManager[None]:
    """During the block, call `resized(storage)` after a storage has changed its size; no operator is dispatched."""
    return _observed(torch.UntypedStorage, "resize_", after=lambda storage, _: resized(storage))


def observed_shape_queries(querying: Callable[[bool], None]) -> AbstractContextManager[None]:
    """During the block, call `querying(True)` before DTensor runs an operation on fake tensors of the unsharded sizes
    to infer the shape of its result, and `querying(False)` after it."""
    place = ShardingPropagator, "_propagate_tensor_meta_non_cached"
    return _observed(*place, before=lambda *_: querying(True), after=lambda *_: querying(False))


@contextmanager
def observed_shards(
    gather: Callable[[list[FSDPParam]], None],
    shard_to_gather: Callable[[FSDPParam], Tensor],
    reduced: Callable[[list[FSDPParam]], None],
) -> Iterator[None]:
    """During the block, call `gather(parameters)` before FSDP2 gathers shards, gather `shard_to_gather(parameter)`
    instead of the shard, and call `reduced(parameters)` after the gradient shards are complete.

    Hooks of modules run before prefetched groups are gathered, and `set_custom_all_gather` and
    `set_custom_reduce_scatter` are not called for groups of one rank.
    """

    def before_wait(group: FSDPParamGroup) -> None:
        result = pending_gather(group)
        if result is not None and not result.all_gather_input_split_sizes:  # one rank: the copy is made only now
            gather(group.fsdp_params)

    def inputs(own: Any) -> Any:
        def inputs_of(parameter: FSDPParam) -> Any:
            shard = parameter._sharded_param_data
            parameter._sharded_param_data = shard_to_gather(parameter)
            try:
                return own.fget(parameter)
            finally:
                parameter._sharded_param_data = shard

        return property(inputs_of)

    def reducing(reduce: Callable[..., Any]) -> Callable[..., Any]:
        def reduce_and_report(parameters: list[FSDPParam], *args: Any, **kwargs: Any) -> Any:
            result = reduce(parameters, *args, **kwargs)
            if result[-1] is None:  # otherwise the reduced gradient waits on the device for the sum over replicas
                reduced(parameters)
            return result

        return reduce_and_report

    with ExitStack() as stack:
        before_start = _observed(_fsdp_param_group, "foreach_all_gather", before=lambda first, *_: gather(first))
        stack.enter_context(before_start)
        stack.enter_context(_replaced(_fsdp_param_group, "foreach_reduce", reducing))
        stack.enter_context(_observed(FSDPParamGroup, "wait_for_unshard", before=before_wait))
        stack.enter_context(_replaced(FSDPParam, "all_gather_inputs", inputs))
        yield


def start_fake_world(rank: int, world_size: int) -> None:
    """Join a process group of nonexistent ranks, in which collectives on fake tensors do nothing."""
    # These imports register operators and a backend, so only a dry run imports them.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


# Process groups


def group_names() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and ranks of each process group of this rank."""
    world = dist.distributed_c10d._world
    for group, name in world.pg_names.items():
        yield name, tuple(sorted(world.pg_group_ranks[group]))


def flight_record() -> list[dict[str, Any]]:
    """Return the collectives in the Flight Recorders, oldest first; empty if this build of PyTorch has no recorder.

    NCCL has a recorder of its own, which has messages too: each has the number of the last collective before it, and
    one in a group of messages never counts as completed.
    """
    entries: list[dict[str, Any]] = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        if dump := getattr(torch._C._distributed_c10d, name, None):
            entries += json.loads(dump(includeCollectives=True, onlyActive=False)).get("entries", [])
    collectives = (e for e in entries if not e["is_p2p"] and not e["profiling_name"].endswith(":coalesced"))
    return sorted(collectives, key=lambda e: e["time_created_ns"])


# Pipelines


def take_micro_batches(schedule: Any) -> None:
    """Let `step` of a schedule of `torch.distributed.pipelining` take lists of micro-batches, as it does in versions
    after PyTorch 2.13; there it takes a batch and splits it.

    From then on `schedule.step(arg_mbs, kwarg_mbs, target_mbs, losses, ...)` takes lists with an entry for each
    micro-batch: positional arguments, named arguments, targets.
    """
    if "arg_mbs" in inspect.signature(schedule.step).parameters:
        return

    def step(
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Tensor] | None = None,
        **options: Any,
    ) -> None:
        for stage in getattr(schedule, "_stages", None) or [schedule._stage]:
            stage.has_backward = schedule._has_backward
            stage.clear_runtime_states()
        schedule._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, losses, **options)

    schedule.step = step
