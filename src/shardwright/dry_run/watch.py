"""The observer of a dry run: passes the events of a step, and the kinds of its tensors, to the recorder.

Record FSDP2's copies between host and device with `layout.offload_parameters`: parameter shards before they are
gathered, and gradient shards after they are reduced.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright.dry_run.record import READ, TO_DEVICE, TO_HOST, WRITE
from shardwright.dry_run.recorder import OperationRecorder
from shardwright.parallel.microbatch import Microbatch
from shardwright.parallel.microbatch_runner import SequentialRunner
from shardwright.parallel.observer import (
    DiskUpdate,
    HostUpdate,
    MessageWait,
    Need,
    Observer,
    PostedMessage,
    ReceivedMessage,
    Running,
    StepPasses,
    StepPhase,
    TensorCopy,
    Transfer,
)
from shardwright.parallel.pipeline.runner import Pipeline
from shardwright.schedule.actions import Action
from shardwright.system.torch_private import (
    FSDPParam,
    gathers_offloaded,
    is_offloaded,
    observed_shards,
    set_gradient_shard,
    shard_of,
    sharded_parameter,
)
from shardwright.training.offload.on_disk import OptimizerOnDisk
from shardwright.training.offload.on_host import OptimizerOnHost
from shardwright.training.step import Trainer

REDUCE, UPDATE, AFTER = "gradients", "optimizer", "after the step"
"""Actions after the last micro-batch. REDUCE: gradients of replicas and tied parameters are summed; with a pipeline
this is a part of the last action. UPDATE: norm, clipping and update. AFTER: the rest of the step."""


class DryRunObserver(Observer):
    """Starts the recorder's actions, and records waits for messages, copies, and updates outside of the device.

    A message counts as sent when the rank starts its next exchange, as in the plan. A fake process group never reports
    a completed send, and a real group does so at a time that depends on other ranks.
    """

    def __init__(
        self, trainer: Trainer, recorder: OperationRecorder, on_passes: Callable[[Sequence[Microbatch]], None]
    ) -> None:
        """`on_passes`: called with the micro-batches of the step."""
        self.trainer, self.recorder, self.on_passes = trainer, recorder, on_passes
        self.beside_parameters = trainer.model.layout.offload_parameters != "none"
        """Whether states that are not on the device are updated where the parameters are, on the host."""
        runner = trainer.model.runner
        self.pipeline = runner if isinstance(runner, Pipeline) else None
        if self.pipeline is not None:
            self.engines = [stage.engine for stage in self.pipeline.stages.values()]
        else:
            assert isinstance(runner, SequentialRunner)
            self.engines = [runner.engine]
        self._from: dict[Need, tuple[int, int]] = {}
        """The sender of each message, in the world, and the number of the message among the sender's messages."""
        self._received: Counter[int] = Counter()
        self.update = ExitStack()
        """The contexts of the running update of a host or disk."""

    def begin(self, running: Running) -> None:
        match running:
            case Action():
                self.recorder.begin(str(running))
            case StepPasses(microbatches):
                self.on_passes(microbatches)
            case MessageWait():
                self.recorder.wait(str(Action(*running.need)), *self._from.pop(running.need))
            case HostUpdate():
                self.update.enter_context(self.recorder.on_host())
            case DiskUpdate(n_bytes, used_bytes):
                over_link = 0 if self.beside_parameters else used_bytes
                self.recorder.copied(READ, n_bytes)
                self.recorder.copied(TO_DEVICE, over_link)
                self.update.enter_context(self.recorder.extra_memory(over_link, "states"))

    def end(self, running: Running) -> None:
        match running:
            case Action(_, op, _):
                self.mark_buffers()
                if op in ("F", "I"):
                    self.recorder.keep()
            case StepPasses() if self.pipeline is None:
                self.recorder.begin(REDUCE)
            case StepPhase("forward_backward"):
                for parameter in self.trainer.model.named_parameters.values():
                    self.recorder.mark(parameter.grad, "gradients")
                self.recorder.begin(UPDATE)
            case StepPhase():
                self.recorder.begin(AFTER)
            case HostUpdate():
                self.update.close()
            case DiskUpdate(n_bytes, used_bytes):
                self.update.close()
                self.recorder.copied(TO_HOST, 0 if self.beside_parameters else used_bytes)
                self.recorder.copied(WRITE, n_bytes)

    def transfer(self, transfer: Transfer) -> None:
        match transfer:
            case TensorCopy(to_host, n_bytes, activations):
                self.recorder.copied(TO_HOST if to_host else TO_DEVICE, n_bytes)
                (self.recorder.put_on_host if to_host else self.recorder.mark)(activations, "activations")
            case PostedMessage(need, sender, tensor):
                self._post(need, sender, tensor)
            case ReceivedMessage((_, op, _), tensor):
                self.recorder.mark(tensor, "activations" if op == "F" else "communication")

    def mark_buffers(self) -> None:
        """Mark the tensors that the engines of data parallelism have now."""
        for engine in self.engines:
            for kind, tensor in engine.buffers():
                self.recorder.mark(tensor, kind)

    def _post(self, need: Need, sender: int, tensor: Tensor | None) -> None:
        assert self.pipeline is not None
        self.pipeline.messages.wait_until_sent()
        if tensor is None:
            assert self.trainer.model.groups.pp is not None
            source = torch.distributed.get_process_group_ranks(self.trainer.model.groups.pp)[sender]
            self._from[need] = source, self._received[source]
            self._received[source] += 1
        elif need[1] == "B":
            self.recorder.mark(tensor, "communication")


@contextmanager
def watched(
    trainer: Trainer, recorder: OperationRecorder, on_passes: Callable[[Sequence[Microbatch]], None]
) -> Iterator[None]:
    """Record the step that a trainer takes in the block. The trainer must have taken a step before, in which FSDP
    allocates the unsharded parameters. `on_passes`: as for `DryRunObserver`."""
    observer = DryRunObserver(trainer, recorder, on_passes)
    on_host = _copies_of_shards(recorder) if observer.beside_parameters else nullcontext()
    with ExitStack() as hooks, observer.update:
        _mark_before(trainer, recorder, observer, hooks)
        with trainer.model.observers.joined(observer), on_host:
            yield


def _mark_before(trainer: Trainer, recorder: OperationRecorder, observer: DryRunObserver, hooks: ExitStack) -> None:
    """Mark the tensors that exist before the step, and the gradients that it computes until `hooks` is closed."""
    model, optimizer = trainer.model, trainer.optimizer
    own = [*(model.named_parameters | model.plain_parameters).values(), *model.tied.duplicates]
    if observer.beside_parameters:
        for parameter in model.named_parameters.values():
            if parameter.requires_grad:
                recorder.put_on_host(parameter.detach(), "parameters")
                recorder.put_on_host(parameter.grad, "gradients")
    for tensor in model.compression_state.values():
        recorder.mark(tensor, "gradients")
    for tensor in own:
        recorder.mark(tensor.detach(), "parameters")
        recorder.mark(tensor.grad, "gradients")
    observer.mark_buffers()
    for tensor in (*own, *chain.from_iterable(engine.parameters_in_use() for engine in observer.engines)):
        if tensor.requires_grad and not isinstance(tensor, DTensor):
            hooks.callback(tensor.register_hook(lambda gradient: recorder.mark(gradient, "gradients")).remove)
    if trainer.average is not None:
        on_host = trainer.average.section.device == "cpu" or observer.beside_parameters
        _states({"average": trainer.average.tensors}, recorder, on_host)
    if isinstance(optimizer, OptimizerOnHost):
        for tensor in optimizer.tensors_on_host():
            recorder.put_on_host(tensor, "states")
    elif isinstance(optimizer, OptimizerOnDisk):
        _states({"counters": dict(enumerate(optimizer.counters))}, recorder, observer.beside_parameters)
        recorder.hold_on_host(optimizer.states_on_disk.buffer_bytes, "states")
    else:
        _states(optimizer.state, recorder, observer.beside_parameters)


def _states(states: Mapping[Any, Mapping[Any, Any]], recorder: OperationRecorder, on_host: bool) -> None:
    for of_parameter in states.values():
        for value in of_parameter.values():
            if isinstance(value, Tensor):
                (recorder.put_on_host if on_host else recorder.mark)(value, "states")


def _copies_of_shards(recorder: OperationRecorder) -> AbstractContextManager[None]:
    """Record each gather and reduction of a parameter group with its copies during a block. When the recorder counts as
    on a GPU, this function makes the copies, since without one host and device are the same and nothing is copied."""

    def gather(parameters: list[FSDPParam]) -> None:
        recorder.copied(TO_DEVICE, sum(shard_of(p).nbytes for p in filter(gathers_offloaded, parameters)))

    def shard_to_gather(parameter: FSDPParam) -> Tensor:
        shard = shard_of(parameter)
        on_device = recorder.gpu and gathers_offloaded(parameter)
        return torch.empty(shard.shape, dtype=shard.dtype, device=shard.device) if on_device else shard

    def reduced(parameters: list[FSDPParam]) -> None:
        offloaded = list(filter(is_offloaded, parameters))
        recorder.copied(TO_HOST, sum(_put_gradient(parameter, recorder) for parameter in offloaded))

    return observed_shards(gather, shard_to_gather, reduced)


def _put_gradient(parameter: FSDPParam, recorder: OperationRecorder) -> int:
    """Put the first gradient sum of a step into host memory, where later sums are added to it, and return its bytes."""
    gradient = sharded_parameter(parameter).grad
    assert isinstance(gradient, DTensor)
    local = gradient.to_local()
    if recorder.gpu and not recorder.is_on_host(local):
        with recorder.on_host():
            local = torch.empty_like(local)
        recorder.put_on_host(local, "gradients")
        set_gradient_shard(parameter, local)
    return int(local.nbytes)
