"""Optimizer steps computed on the host, which stores the optimizer states (ZeRO-Offload, arXiv 2101.06840).

For each parameter the host stores the states and a copy of this rank's shard of the weights. A step processes the
parameters in buckets: while the host updates one bucket, the gradients of the next bucket are copied from the device,
and the weights of the previous bucket are copied back.

A step copies the gradients to the host and the weights to the device in their own types: 4 + 4 bytes a parameter of the
shard in fp32. ZeRO-Offload copies 2 + 2 bytes, since its device stores both in 16 bits. Here gradients are summed and
sharded weights stored in fp32, even with matmuls in bf16, so they are not rounded.

`HostLink` copies between a device and the memory of its host.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwright.parallel.norm import as_part_on_host, local_part
from shardwright.parallel.observer import NO_OBSERVER, HostUpdate, Observer, TensorCopy
from shardwright.parallel.offload import pins
from shardwright.system.torch_private import foreach_copy_, storage_id, tensor_version
from shardwright.system.units import in_groups, round_up
from shardwright.training.offload.states import Host, OffloadedParameter
from shardwright.training.on_shards import OptimizerOnShards

BUFFERS = 2
_ALIGNED = 64


class _HostParameter:
    """A parameter's data on the host. `weights`: the parameter of the host's optimizer."""

    def __init__(self, member: OffloadedParameter) -> None:
        self.member = member
        shard = self.shard
        self.weights = nn.Parameter(torch.empty_like(shard, device="cpu", pin_memory=pins(shard.device)))
        self._seen: tuple[int, int] | None = None

    @property
    def shard(self) -> Tensor:
        """Return this rank's shard of the parameter on the device."""
        # The shard of a detached DTensor has its own version counter, so changes of the parameter would not be seen.
        return local_part(self.member.parameter).detach()

    @property
    def changed(self) -> bool:
        """Return whether the shard may have changed since `sent`, for example because a checkpoint was loaded."""
        return self._seen != _version(self.shard)

    def sent(self) -> None:
        """Record that the shard has the values of `weights`."""
        self._seen = _version(self.shard)


class OptimizerOnHost(Optimizer):
    """An optimizer whose `step` is computed on the host. The update of each element must depend only on that element.

    `state[parameter]` has the counters and states, in host memory, sharded like the parameter.
    """

    def __init__(
        self, optimizer: Optimizer, members: Sequence[OffloadedParameter], host: Host, observer: Observer = NO_OBSERVER
    ) -> None:
        """`members`: all parameters of `optimizer`, which are on one device, with counters on the host."""
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.on_host, self.observer = OptimizerOnShards(optimizer), observer
        self.buckets: list[list[_HostParameter]] = []
        for group in self.param_groups:
            of_group = [_HostParameter(member) for member in members if member.group is group]
            self.buckets += in_groups(of_group, lambda parameter: parameter.weights.nbytes, host.bucket_bytes)
        n_held = sum(map(len, self.buckets))
        assert n_held == len(members), "`OptimizerKind.make` has to keep the groups that it is given"
        device = next((member.parameter.device for member in members), torch.device("cpu"))
        self.link = HostLink(device, observer)
        largest = max((sum(_room(parameter.weights) for parameter in bucket) for bucket in self.buckets), default=0)
        n_buffers = min(BUFFERS, len(self.buckets))
        self.buffers = [torch.empty(largest, dtype=torch.uint8, pin_memory=pins(device)) for _ in range(n_buffers)]
        """One buffer for the gradients of a bucket each."""
        for parameter in (parameter for bucket in self.buckets for parameter in bucket):
            self._make_states(parameter)

    @property
    def bytes_on_host(self) -> int:
        """Return the bytes of states, weights and gradients in host memory."""
        return sum(tensor.nbytes for tensor in self.tensors_on_host())

    def tensors_on_host(self) -> Iterator[Tensor]:
        """Yield every tensor in host memory: states and weights of this rank's shards, and gradient buffers."""
        for weights, states in self.on_host.state.items():
            yield weights
            yield from states.values()
        yield from self.buffers

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        self.link.start()
        arrived = self._fetch(0)
        for number, bucket in enumerate(self.buckets):
            following = self._fetch(number + 1)
            arrived()
            self._update(bucket)
            self.link.send([parameter.shard for parameter in bucket], [parameter.weights for parameter in bucket])
            for parameter in bucket:
                parameter.sent()
            arrived = following
        self.link.join()

    def _fetch(self, number: int) -> Callable[[], None]:
        """Copy a bucket's gradients, and weights that changed since the last step, to the host. The previous bucket in
        the same buffer must have been updated."""
        into: list[Tensor] = []
        sources: list[Tensor] = []
        at = 0
        for parameter in self.buckets[number] if number < len(self.buckets) else ():
            gradient, weights = parameter.member.parameter.grad, parameter.weights
            weights.grad = None
            if gradient is not None:
                room = self.buffers[number % BUFFERS][at : at + weights.nbytes]
                weights.grad = room.view(weights.dtype).view(weights.shape)
                into.append(weights.grad)
                sources.append(local_part(gradient))
                at += _room(weights)
            if parameter.changed:
                into.append(weights)
                sources.append(parameter.shard)
        return self.link.fetch(into, sources)

    def _update(self, bucket: Sequence[_HostParameter]) -> None:
        group, weights = bucket[0].member.group, [parameter.weights for parameter in bucket]
        self.on_host.param_groups = [{**group, "params": weights}]
        before = [dict(self.on_host.state[weight]) for weight in weights]
        with self.observer.during(HostUpdate()):
            self.on_host.step()
        for weight, states in zip(weights, before, strict=True):
            for name, value in self.on_host.state[weight].items():
                if value is not states[name]:
                    states[name].copy_(value)
            self.on_host.state[weight] = states
        self.on_host.param_groups = []

    def _make_states(self, offloaded: _HostParameter) -> None:
        _, parameter, dtypes, counters = offloaded.member
        pinned = pins(parameter.device)
        states = {
            name: torch.zeros(offloaded.weights.shape, dtype=dtype, pin_memory=pinned) for name, dtype in dtypes.items()
        }
        self.on_host.state[offloaded.weights] = {**counters, **states}
        self.state[parameter] = {**counters, **{name: _as_of(value, parameter) for name, value in states.items()}}


def _as_of(value: Tensor, parameter: nn.Parameter) -> Tensor:
    """Return a shard on the host as a tensor sharded like `parameter`."""
    return as_part_on_host(value, parameter) if isinstance(parameter, DTensor) else value


def _version(shard: Tensor) -> tuple[int, int]:
    """Return a value that differs after a tensor was modified or moved to another address."""
    storage: Any = shard.untyped_storage()
    return storage_id(storage), tensor_version(shard)


def _room(weights: Tensor) -> int:
    return round_up(weights.nbytes, _ALIGNED)


class HostLink:
    """Copies between a device and its host. On a GPU each direction has its own stream, and host memory must be pinned.
    On other devices a copy is complete when the call returns."""

    def __init__(self, device: torch.device, observer: Observer = NO_OBSERVER) -> None:
        self.observer = observer
        self._down, self._up = (torch.cuda.Stream(device) if pins(device) else None for _ in range(2))

    def start(self) -> None:
        """Make later copies wait for all previous computations on the device."""
        for stream in (self._down, self._up):
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream(stream.device))

    def fetch(self, on_host: Sequence[Tensor], on_device: Sequence[Tensor]) -> Callable[[], None]:
        """Copy to the host. Return a function that waits until the copies are complete."""
        self.observer.transfer(TensorCopy(to_host=True, n_bytes=sum(x.nbytes for x in on_device)))
        if self._down is None:
            _copy(on_host, on_device)
            return lambda: None
        with torch.cuda.stream(self._down):
            _copy(on_host, on_device)
            return self._down.record_event().synchronize

    def send(self, on_device: Sequence[Tensor], on_host: Sequence[Tensor]) -> None:
        """Copy to the device. Call `join` before the next computation that uses the copies."""
        self.observer.transfer(TensorCopy(to_host=False, n_bytes=sum(x.nbytes for x in on_host)))
        if self._up is None:
            _copy(on_device, on_host)
            return
        with torch.cuda.stream(self._up):
            _copy(on_device, on_host)

    def join(self) -> None:
        """Make later computations on the device wait for the copies of `send`."""
        if self._up is not None:
            torch.cuda.current_stream(self._up.device).wait_stream(self._up)


def _copy(into: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    if into:
        foreach_copy_(list(into), list(sources), non_blocking=True)
