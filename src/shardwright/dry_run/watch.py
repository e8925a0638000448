"""Report the start and end of actions, and the kinds of tensors, to a recorder without changing the step.

Record FSDP2's copies between host and device with `layout.offload_parameters`: parameter shards before they are
gathered, and gradient shards after they are reduced.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright.dry_run.record import READ, TO_DEVICE, TO_HOST, WRITE
from shardwright.dry_run.recorder import OperationRecorder
from shardwright.parallel.data import DataEngine, MasterWeights, Replicated, Sharded
from shardwright.parallel.microbatch_runner import PassObserver, SequentialRunner
from shardwright.parallel.offload import ActivationsOnHost
from shardwright.parallel.pipeline.messages import Need, PipelineMessages
from shardwright.parallel.pipeline.runner import Pipeline
from shardwright.schedule.actions import Action
from shardwright.schedule.messages import PairExchange
from shardwright.system.ranks_at import Phase
from shardwright.system.torch_private import (
    GATHER_PARAMETERS,
    REDUCE_GRADIENTS,
    SHARDS_TO_GATHER,
    WAIT_FOR_PARAMETERS,
    FSDPParam,
    FSDPParamGroup,
    ShardedState,
    parameter_groups,
    pending_gather,
    replaced,
    secondary_shard_of,
    set_shard,
    shard_of,
    whole_parameter,
)
from shardwright.training.offload.on_disk import OptimizerOnDisk
from shardwright.training.offload.on_host import OptimizerOnHost
from shardwright.training.offload.states import Chunk
from shardwright.training.step import Trainer

REDUCE, UPDATE, AFTER = "gradients", "optimizer", "after the step"
"""Actions after the last micro-batch: sums of the gradients of replicas and tied parameters; norm, clipping and update;
nothing."""


class _PassRecorder(PassObserver):
    """Starts the recorder's actions. Without a pipeline, sums of gradients are an action of their own."""

    def __init__(self, recorder: OperationRecorder, engines: Sequence[DataEngine], piped: bool) -> None:
        self.recorder, self.engines, self.piped = recorder, engines, piped

    def begin(self, action: Action) -> None:
        self.recorder.begin(str(action))

    def end(self, action: Action) -> None:
        if action.op != "F":
            _mark_accumulated(self.engines, self.recorder)
        if action.op in ("F", "I"):
            self.recorder.keep()

    def end_step(self) -> None:
        if not self.piped:
            self.recorder.begin(REDUCE)


class _DryRunMessages(PipelineMessages):
    """The messages of a pipeline. A message counts as sent when the rank starts its next exchange, as in the plan. A
    fake process group never reports a completed send, and a real group does so at a time that depends on other
    ranks."""

    def __init__(self, messages: PipelineMessages, recorder: OperationRecorder, in_world: Sequence[int]) -> None:
        super().__init__(messages.rank, messages.groups, messages.codec)
        self.recorder, self.in_world = recorder, in_world
        self._from: dict[Need, tuple[int, int]] = {}
        """The sender of each message, in the world, and the number of the message among the sender's messages."""
        self._received: Counter[int] = Counter()

    def start(self, exchange: PairExchange, results: dict[Need, Tensor], empty: Callable[[], Tensor]) -> None:
        for stage, op, microbatch, sender, _ in exchange.messages:
            need: Need = (stage, op, microbatch)
            if sender != self.rank:
                source = self.in_world[sender]
                self._from[need] = source, self._received[source]
                self._received[source] += 1
            elif op == "B":
                self.recorder.mark(results[need], "communication")
        while self._sending:
            self._sending.popleft().wait()
        super().start(exchange, results, empty)

    def receive(self, need: Need) -> Tensor:
        stage, op, microbatch = need
        self.recorder.wait(f"{stage}{op}{microbatch}", *self._from.pop(need))
        tensor = super().receive(need)
        self.recorder.mark(tensor, "activations" if op == "F" else "communication")
        return tensor


class RecordedPhases:
    """The phases of the recorded step as its last actions."""

    def __init__(self) -> None:
        self._recorder: OperationRecorder | None = None
        self._parameters: list[Tensor] = []

    def record(self, recorder: OperationRecorder, parameters: Iterable[Tensor]) -> None:
        """Report phases to the recorder from now on. `parameters`: trained parameters, whose gradients are marked."""
        self._recorder, self._parameters = recorder, list(parameters)

    def begin(self, phase: Phase, step: int) -> None:
        """Do nothing: the previous phase has ended, or the actions of a pass start by themselves."""

    def end(self, phase: Phase) -> None:
        """Start the action that follows a phase."""
        if self._recorder is None:
            return
        if phase == "forward_backward":
            for parameter in self._parameters:
                self._recorder.mark(parameter.grad, "gradients")
        self._recorder.begin(UPDATE if phase == "forward_backward" else AFTER)


def watch(trainer: Trainer, recorder: OperationRecorder) -> None:
    """Record the next step of a trainer with `RecordedPhases`. The trainer must have taken a step before, in which FSDP
    allocates the unsharded parameters."""
    model, runner = trainer.model, trainer.model.runner
    assert isinstance(trainer.phases, RecordedPhases)
    trainer.phases.record(recorder, model.named_parameters.values())
    engines: list[DataEngine] = []
    if isinstance(runner, Pipeline):
        engines = [stage.engine for stage in runner.stages.values()]
        assert model.groups.pp is not None
        in_world = torch.distributed.get_process_group_ranks(model.groups.pp)
        runner.messages = _DryRunMessages(runner.messages, recorder, in_world)
    else:
        assert isinstance(runner, SequentialRunner)
        engines = [runner.engine]
    runner.observers.append(_PassRecorder(recorder, engines, isinstance(runner, Pipeline)))
    for store in model.on_host:
        _activations_on_host(store, recorder)
    own = [*(model.named_parameters | model.plain_parameters).values(), *model.tied.duplicates]
    if model.layout.offload_parameters != "none":
        for parameter in model.named_parameters.values():
            if parameter.requires_grad:
                recorder.put_on_host(parameter.detach(), "parameters")
                recorder.put_on_host(parameter.grad, "gradients")
    for tensor in model.compression_state.values():
        recorder.mark(tensor, "gradients")
    for tensor in own:
        recorder.mark(tensor.detach(), "parameters")
        recorder.mark(tensor.grad, "gradients")
    for engine in engines:
        if isinstance(engine, Sharded):
            own += _gathered(engine, recorder)
        elif isinstance(engine, MasterWeights):
            own += engine.copies
            for copy in engine.copies:
                recorder.mark(copy.detach(), "parameters")
        elif isinstance(engine, Replicated):
            for bucket in engine._buckets:
                recorder.mark(bucket, "gradients")
    for tensor in own:
        if tensor.requires_grad and not isinstance(tensor, DTensor):
            tensor.register_hook(lambda gradient: recorder.mark(gradient, "gradients"))
    if trainer.average is not None:
        on_host = trainer.average.section.device == "cpu" or model.layout.offload_parameters != "none"
        _states({"average": trainer.average.tensors}, recorder, on_host)
    if isinstance(trainer.optimizer, OptimizerOnHost):
        _on_host(trainer.optimizer, recorder)
    elif isinstance(trainer.optimizer, OptimizerOnDisk):
        _on_disk(trainer.optimizer, recorder, beside_parameters=model.layout.offload_parameters != "none")
    else:
        _states(trainer.optimizer.state, recorder, on_host=model.layout.offload_parameters != "none")


def _gathered(engine: Sharded, recorder: OperationRecorder) -> list[Any]:
    """Mark the tensors that FSDP gathers into; return the unsharded parameters."""
    unsharded = []
    for group in engine.groups:
        for parameters in parameter_groups(group):
            for parameter in parameters.fsdp_params:
                for gathered in parameter.all_gather_outputs:
                    recorder.mark(gathered, "gathered")
                theirs: Any = parameter
                theirs.to_sharded_post_forward = partial(
                    _keep_part, parameter.to_sharded_post_forward, parameter, recorder
                )
                unsharded.append(whole_parameter(parameter))
    return unsharded


def _keep_part(keep: Callable[[], None], parameter: Any, recorder: OperationRecorder) -> None:
    """Mark the part of a gathered parameter that a rank keeps for the backward pass."""
    keep()
    recorder.mark(secondary_shard_of(parameter), "gathered")


def _mark_accumulated(engines: Iterable[DataEngine], recorder: OperationRecorder) -> None:
    """Mark the gradients of unsharded parameters that FSDP holds until the last micro-batch."""
    for engine in engines:
        for group in engine.groups if isinstance(engine, Sharded) else ():
            for parameters in parameter_groups(group):
                for parameter in parameters.fsdp_params:
                    recorder.mark(parameter.unsharded_accumulated_grad, "gradients")


def _states(states: Mapping[Any, Mapping[str, Any]], recorder: OperationRecorder, on_host: bool) -> None:
    for of_parameter in states.values():
        for value in of_parameter.values():
            if isinstance(value, Tensor):
                (recorder.put_on_host if on_host else recorder.mark)(value, "states")


def _on_disk(optimizer: OptimizerOnDisk, recorder: OperationRecorder, beside_parameters: bool) -> None:
    """Mark the memory of states on a disk, and record requests and copies of chunks. `beside_parameters`: chunks are
    updated on the host, where the parameters are."""
    for counter in optimizer.counters:
        (recorder.put_on_host if beside_parameters else recorder.mark)(counter, "states")
    recorder.hold_on_host(optimizer.states_on_disk.buffer_bytes, "states")
    update = optimizer._update

    def recorded(chunk: Chunk, data: Tensor) -> None:
        over_link = 0 if beside_parameters else chunk.used
        recorder.copied(READ, chunk.n_bytes)
        recorder.copied(TO_DEVICE, over_link)
        with recorder.extra_memory(over_link, "states"):
            update(chunk, data)
        recorder.copied(TO_HOST, over_link)
        recorder.copied(WRITE, chunk.n_bytes)

    optimizer._update = recorded  # type: ignore[method-assign]


def _activations_on_host(store: ActivationsOnHost, recorder: OperationRecorder) -> None:
    """Record the copies of activations."""
    copy_out, copy_in = store.copy_out, store.copy_in

    def out(on_device: Tensor) -> Tensor:
        recorder.copied(TO_HOST, on_device.nbytes)
        on_host = copy_out(on_device)
        recorder.put_on_host(on_host, "activations")
        return on_host

    def back(on_host: Tensor) -> Tensor:
        recorder.copied(TO_DEVICE, on_host.nbytes)
        on_device = copy_in(on_host)
        recorder.mark(on_device, "activations")
        return on_device

    store.copy_out, store.copy_in = out, back  # type: ignore[method-assign]


def _on_host(optimizer: OptimizerOnHost, recorder: OperationRecorder) -> None:
    """Mark the host's tensors, and record copies and the update that the host computes."""
    for tensor in optimizer.tensors_on_host():
        recorder.put_on_host(tensor, "states")
    link, update = optimizer.link, optimizer.on_host.step
    fetch, send = link.fetch, link.send

    def fetched(on_host: Sequence[Tensor], on_device: Sequence[Tensor]) -> Callable[[], None]:
        recorder.copied(TO_HOST, sum(x.nbytes for x in on_device))
        return fetch(on_host, on_device)

    def sent(on_device: Sequence[Tensor], on_host: Sequence[Tensor]) -> None:
        recorder.copied(TO_DEVICE, sum(x.nbytes for x in on_host))
        send(on_device, on_host)

    link.fetch, link.send = fetched, sent  # type: ignore[method-assign]

    def on_host() -> None:
        with recorder.on_host():
            update()

    optimizer.on_host.step = on_host  # type: ignore[method-assign,assignment]


@contextmanager
def copies_of_shards(recorder: OperationRecorder) -> Iterator[None]:
    """Record each gather and reduction of a parameter group with its copies during the block. When the recorder counts
    as on a GPU, this function makes the copies, since without one host and device are the same and nothing is
    copied."""

    def come(parameters: list[FSDPParam]) -> None:
        recorder.copied(TO_DEVICE, sum(shard_of(parameter).nbytes for parameter in parameters if _comes(parameter)))

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
                offloaded = [parameter for parameter in parameters if parameter.offload_to_cpu]
                recorder.copied(TO_HOST, sum(_put_gradient(parameter, recorder) for parameter in offloaded))
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
