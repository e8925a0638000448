"""Record FSDP2's copies between host and device with `layout.offload_parameters`: parameter shards before they are
gathered, and gradient shards after they are reduced."""

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
    """Record each gather and reduction of a parameter group with its copies during the block. When the recorder counts
    as on a GPU, this function makes the copies, since without one host and device are the same and nothing is
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
            if result is not None and not result.all_gather_input_split_sizes:  # one rank: the copy is made only now
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
            if result[-1] is None:  # otherwise the reduced gradient waits on the device for the sum over replicas
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
    """Return whether a gather starts with a copy of this parameter's shard from the host."""
    return parameter.offload_to_cpu and parameter.sharded_state == ShardedState.SHARDED


def _put_gradient(parameter: FSDPParam, recorder: OperationRecorder) -> int:
    """Put the first gradient sum of a step into host memory, where later sums are added to it, and return its bytes."""
    gradient: Any = parameter.sharded_param.grad
    local = gradient.to_local()
    if recorder.gpu and not recorder.is_on_host(local):
        with recorder.on_host():
            local = torch.empty_like(local)
        recorder.put_on_host(local, "gradients")
        parameter.sharded_param.grad = parameter.to_sharded_dtensor(local)
    return int(local.nbytes)
