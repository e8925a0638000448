"""Every private name of PyTorch that this package uses, and every difference between the versions it supports.

A name is private if a part of its path begins with one underscore: `torch._foreach_norm`, `Tensor._version`,
`torch.ops.aten._flash_attention_forward`, and all that is imported from `torch._subclasses`. PyTorch changes such names
without notice. No other module of the package may use one: it takes the function, class or operator from here.
`tests/test_torch_private.py` checks that no other module does, and reports each name that the installed PyTorch lacks.

| PyTorch | what differs                                                            | here                        |
| ------- | ----------------------------------------------------------------------- | --------------------------- |
| 2.11    | a module of FSDP2 has one group of parameters or None, not a list       | `parameter_groups`          |
| 2.11    | FSDP2 cannot reduce zeros for parameters without a gradient             | `reduce_unused_parameters`  |
| 2.11    | `varlen_attn` takes fewer kv heads than heads without being told so     | `varlen_attention`          |
| 2.13    | new names of two collectives, and warnings about the old ones           | `all_gather_single` and ... |
"""

import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
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
    "FSDPMeshInfo",
    "FSDPParam",
    "FSDPParamGroup",
    "FakeTensor",
    "FakeTensorMode",
    "ShardedState",
    "StridedShard",
    "TensorMeta",
    "TorchDispatchMode",
    "tree_leaves",
    "tree_map",
]

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


def varlen_attention(q_NHC: Tensor, k_NKC: Tensor, v_NKC: Tensor, ends: Tensor, longest: int) -> Tensor:
    """Causal attention within each document by PyTorch's variable-length attention; (N, H, C). `ends`: 0 and the ends
    of the documents.

    The flash kernel itself reads fewer kv heads. PyTorch 2.11 passes them on; newer versions refuse them without
    `enable_gqa`, which changes nothing else.
    """
    from torch.nn.attention.varlen import varlen_attn  # asks for the device when it is imported

    grouped = q_NHC.shape[1] != k_NKC.shape[1]
    has_flag = "enable_gqa" in inspect.signature(varlen_attn).parameters
    flags: dict[str, Any] = {"enable_gqa": grouped} if has_flag else {}
    o_NHC = varlen_attn(q_NHC, k_NKC, v_NKC, ends, ends, longest, longest, window_size=(-1, 0), **flags)
    assert isinstance(o_NHC, Tensor)
    return o_NHC


# Tensors and modules


def storage_id(storage: torch.UntypedStorage) -> int:
    """A number that a storage has while it exists, and no other storage at the same time; fake ones have it too."""
    return storage._cdata


def tensor_version(tensor: Tensor) -> int:
    """How many times a tensor was changed in place."""
    return tensor._version


def map_tensors(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Replace each parameter and buffer of a module and of those in it, as `Module.to` does."""
    module._apply(change)


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """The mesh of one axis, `name`, with the ranks of all axes of `mesh`."""
    return mesh._flatten(name)


def keep_compiled_side_effects_once() -> None:
    """Have compiled blocks that run again in the backward pass change attributes of modules in the forward pass
    alone."""
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True


# FSDP2


def parameter_groups(module: FSDPModule) -> list[FSDPParamGroup]:
    """The groups of parameters of one module of FSDP2, without those of modules in it: none or one with
    `fully_shard`."""
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # PyTorch 2.11


def reduce_unused_parameters(module: FSDPModule) -> None:
    """Have FSDP2 reduce zeros where a parameter of the module has no gradient."""
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


def end_backward(root: FSDPModule) -> None:
    """What FSDP2 does at the end of a backward pass, for all modules below the outermost one."""
    root._get_fsdp_state()._root_post_backward_final_callback()


def whole_parameter(parameter: FSDPParam) -> nn.Parameter | None:
    """The tensor that a parameter is gathered into; None before it was gathered first."""
    return getattr(parameter, "_unsharded_param", None)


def shard_of(parameter: FSDPParam) -> Tensor:
    """This rank's shard of a parameter, flat and padded, where FSDP2 keeps it between steps."""
    return parameter._sharded_param_data


def set_shard(parameter: FSDPParam, shard: Tensor) -> None:
    """Replace what `shard_of` returns."""
    parameter._sharded_param_data = shard


def secondary_shard_of(parameter: FSDPParam) -> Tensor | None:
    """What this rank keeps of a gathered parameter for the backward pass."""
    return parameter._sharded_post_forward_param_data


def set_secondary_shard(parameter: FSDPParam, shard: Tensor | None) -> None:
    """Replace what `secondary_shard_of` returns."""
    parameter._sharded_post_forward_param_data = shard


def register_shard(parameter: FSDPParam) -> None:
    """Make the shard the parameter of its module, as between steps."""
    parameter._setattr_on_modules(parameter.sharded_param)


def pending_gather(group: FSDPParamGroup) -> Any:
    """The all-gather of a group that was started and not waited for, or None."""
    return group._all_gather_result


# Which operation runs


def node_number() -> int | None:
    """The number of the node of the graph whose backward pass runs; None outside of backward passes."""
    node: Any = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


def next_node_number() -> int:
    """The number that the next node of the graph gets."""
    return torch.autograd._get_sequence_nr()


def script_type(value: torch.ScriptObject) -> str:
    """The name of the class in C++ of a value that PyTorch passes to operators."""
    return str(value._type())


class DispatchMode(TorchDispatchMode):
    """A mode in which nothing is compiled. A guard against that around every operation costs a tenth of the time."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


# Functions of PyTorch that a dry run replaces


class TorchAttribute(NamedTuple):
    """An attribute of a module or class of PyTorch."""

    owner: Any
    name: str


CHUNKS_OF_PARAMETER = TorchAttribute(_fsdp_param, "_chunk_with_empty")
"""(tensor, number of chunks, dim) -> the part of a parameter for each rank."""
GATHER_PARAMETERS = TorchAttribute(_fsdp_param_group, "foreach_all_gather")
REDUCE_GRADIENTS = TorchAttribute(_fsdp_param_group, "foreach_reduce")
WAIT_FOR_PARAMETERS = TorchAttribute(FSDPParamGroup, "wait_for_unshard")
SHARDS_TO_GATHER = TorchAttribute(FSDPParam, "all_gather_inputs")
"""A property: the tensors of a parameter that this rank sends."""
SHAPE_OF_WHOLE = TorchAttribute(ShardingPropagator, "_propagate_tensor_meta_non_cached")
"""DTensor runs an operation on fake tensors of the size of the whole ones here, to know the shape of its result."""


@contextmanager
def replaced(place: TorchAttribute, make: Callable[[Any], Any]) -> Iterator[None]:
    """In the block an attribute is `make(what it was)`."""
    before = inspect.getattr_static(place.owner, place.name)
    setattr(place.owner, place.name, make(before))
    try:
        yield
    finally:
        setattr(place.owner, place.name, before)


def start_fake_world(rank: int, world_size: int) -> None:
    """Join a process group of ranks that are not there, in which collectives on fake tensors do nothing."""
    # These two register operators and a backend: imported where a dry run starts, and nowhere else.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


# Process groups


def group_names() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and ranks of each process group of this rank."""
    world = dist.distributed_c10d._world
    for group, name in world.pg_names.items():
        yield name, tuple(sorted(world.pg_group_ranks[group]))


def flight_record() -> list[dict[str, Any]]:
    """The collectives in the Flight Recorder; none where this build of PyTorch has no recorder."""
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    return json.loads(dump(includeCollectives=True, onlyActive=False)).get("entries", []) if dump else []
