"""Records what FSDP2 copies between the host and the device with `layout.offload_parameters`: shards of parameters
before they are gathered, shards of gradients after they are reduced."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from shardwright.dry_run.record import TO_DEVICE, TO_HOST
from shardwright.dry_run.recorder import OperationRecorder
from shardwright.system.torch_private import (
    GATHER_PARAMETERS,
    REDUCE_GRADIENTS,
    SHARDS_TO_GATHER,
    WAIT_FOR_PARAMETERS,
    FSDPParam,
    FSDPParamGroup,
    ShardedState,
    pending_gather,
    replaced,
    set_shard,
    shard_of,
)


@contextmanager
def copies_of_shards(recorder: OperationRecorder) -> Iterator[None]:
    """In the block, each gather and each reduction of a group of parameters is recorded with its copies. Where the
    recorder counts as on a GPU, the copies are made, since without one device and host are the same and nothing is
    copied."""

    def come(parameters: list[FSDPParam]) -> None:
        recorder.copied(TO_DEVICE, sum(shard_of(each).nbytes for each in parameters if _comes(each)))

    def gathered(gather: Callable[..., Any]) -> Callable[..., Any]:
        def gather_and_record(parameters: list[FSDPParam], *args: Any, **kwargs: Any) -> Any:
            come(parameters)
            return gather(parameters, *args, **kwargs)

        return gather_and_record

    def waited(wait: Callable[..., Any]) -> Callable[..., Any]:
        def record_and_wait(group: FSDPParamGroup) -> None:
            result = pending_gather(group)
            if result is not None and not result.all_gather_input_split_sizes:  # of one rank, which copies only now
                come(group.fsdp_params)
            wait(group)

        return record_and_wait

    def on_device(inputs: Any) -> Any:
        def inputs_on_device(parameter: FSDPParam) -> Any:
            if not (recorder.gpu and _comes(parameter)):
                return inputs.fget(parameter)
            on_host = shard_of(parameter)
            set_shard(parameter, torch.empty(on_host.shape, dtype=on_host.dtype, device=on_host.device))
            try:
                return inputs.fget(parameter)
            finally:
                set_shard(parameter, on_host)

        return property(inputs_on_device)

    def reduced(reduce: Callable[..., Any]) -> Callable[..., Any]:
        def reduce_and_record(parameters: list[FSDPParam], *args: Any, **kwargs: Any) -> Any:
            result = reduce(parameters, *args, **kwargs)
            if result[-1] is None:  # else what is reduced waits on the device for the sum over replicas
                offloaded = [each for each in parameters if each.offload_to_cpu]
                recorder.copied(TO_HOST, sum(_put_gradient(each, recorder) for each in offloaded))
            return result

        return reduce_and_record

    with ExitStack() as stack:
        stack.enter_context(replaced(GATHER_PARAMETERS, gathered))
        stack.enter_context(replaced(REDUCE_GRADIENTS, reduced))
        stack.enter_context(replaced(WAIT_FOR_PARAMETERS, waited))
        stack.enter_context(replaced(SHARDS_TO_GATHER, on_device))
        yield


def _comes(parameter: FSDPParam) -> bool:
    """Whether a gather begins with a copy of its shard from the host."""
    return parameter.offload_to_cpu and parameter.sharded_state == ShardedState.SHARDED


def _put_gradient(parameter: FSDPParam, recorder: OperationRecorder) -> int:
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
