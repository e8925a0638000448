"""Records what FSDP2 copies between the host and the device with `layout.offload_parameters`: shards of parameters
before they are gathered, shards of gradients after they are reduced."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from shardwright.dry_run.record import TO_DEVICE, TO_HOST
from shardwright.dry_run.recorder import Recorder


@contextmanager
def copies_of_shards(recorder: Recorder) -> Iterator[None]:
    """In the block, each gather and each reduction of a group of parameters is recorded with its copies. Where the
    recorder counts as on a GPU, the copies are made, since without one device and host are the same and nothing is
    copied."""
    theirs: Any = _fsdp_param_group
    gather, reduce, inputs = theirs.foreach_all_gather, theirs.foreach_reduce, _inputs()
    wait = FSDPParamGroup.wait_for_unshard

    def come(parameters: list[FSDPParam]) -> None:
        recorder.copied(TO_DEVICE, sum(each._sharded_param_data.nbytes for each in parameters if _comes(each)))

    def gathered(parameters: list[FSDPParam], *args: Any, **kwargs: Any) -> Any:
        come(parameters)
        return gather(parameters, *args, **kwargs)

    def waited(group: FSDPParamGroup) -> None:
        result = group._all_gather_result
        if result is not None and not result.all_gather_input_split_sizes:  # of one rank, which copies only now
            come(group.fsdp_params)
        wait(group)

    def inputs_on_device(parameter: FSDPParam) -> Any:
        if not (recorder.gpu and _comes(parameter)):
            return inputs.fget(parameter)
        on_host = parameter._sharded_param_data
        parameter._sharded_param_data = torch.empty(on_host.shape, dtype=on_host.dtype, device=on_host.device)
        try:
            return inputs.fget(parameter)
        finally:
            parameter._sharded_param_data = on_host

    def reduced(parameters: list[FSDPParam], *args: Any, **kwargs: Any) -> Any:
        found = reduce(parameters, *args, **kwargs)
        if found[-1] is None:  # else what is reduced waits on the device for the sum over replicas
            offloaded = [each for each in parameters if each.offload_to_cpu]
            recorder.copied(TO_HOST, sum(_put_gradient(each, recorder) for each in offloaded))
        return found

    theirs.foreach_all_gather, theirs.foreach_reduce = gathered, reduced
    FSDPParamGroup.wait_for_unshard = waited  # type: ignore[method-assign, assignment]
    FSDPParam.all_gather_inputs = property(inputs_on_device)  # type: ignore[assignment]
    try:
        yield
    finally:
        theirs.foreach_all_gather, theirs.foreach_reduce = gather, reduce
        FSDPParamGroup.wait_for_unshard = wait  # type: ignore[method-assign]
        FSDPParam.all_gather_inputs = inputs  # type: ignore[method-assign]


def _inputs() -> Any:
    return FSDPParam.__dict__["all_gather_inputs"]


def _comes(parameter: FSDPParam) -> bool:
    """Whether a gather begins with a copy of its shard from the host."""
    return parameter.offload_to_cpu and parameter.sharded_state == ShardedState.SHARDED


def _put_gradient(parameter: FSDPParam, recorder: Recorder) -> int:
    """Have the first sum of a step in the memory of the host, to which later ones are added; returns the bytes that are
    copied there."""
    gradient: Any = parameter.sharded_param.grad
    local = gradient.to_local()
    if recorder.gpu and not recorder.is_on_host(local):
        with recorder.on_host():
            local = torch.empty_like(local)
        recorder.put_on_host(local, "gradients")
        parameter.sharded_param.grad = parameter.to_sharded_dtensor(local)
    return int(local.nbytes)
