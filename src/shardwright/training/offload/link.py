"""Copies between a device and the memory of its host."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardwright.parallel.offload import pins
from shardwright.system.torch_private import foreach_copy_


class HostLink:
    """Copies between a device and its host. On a GPU each direction has its own stream, and host memory must be pinned.
    On other devices a copy is complete when the call returns."""

    def __init__(self, device: torch.device) -> None:
        self._down, self._up = (torch.cuda.Stream(device) if pins(device) else None for _ in range(2))

    def start(self) -> None:
        """Make later copies wait for all previous computations on the device."""
        for stream in (self._down, self._up):
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream(stream.device))

    def fetch(self, on_host: Sequence[Tensor], on_device: Sequence[Tensor]) -> Callable[[], None]:
        """Copy to the host. Return a function that waits until the copies are complete."""
        if self._down is None:
            _copy(on_host, on_device)
            return lambda: None
        with torch.cuda.stream(self._down):
            _copy(on_host, on_device)
            return self._down.record_event().synchronize

    def send(self, on_device: Sequence[Tensor], on_host: Sequence[Tensor]) -> None:
        """Copy to the device. Call `join` before the next computation that uses the copies."""
        if self._up is None:
            _copy(on_device, on_host)
            return
        with torch.cuda.stream(self._up):
            _copy(on_device, on_host)

    def join(self) -> None:
        """Make later computations on the device wait for the copies of `send`."""
        if self._up is not None:
            torch.cuda.current_stream(self._up.device).wait_stream(self._up)


def _copy(into: Sequence[Tensor], of: Sequence[Tensor]) -> None:
    if into:
        foreach_copy_(list(into), list(of), non_blocking=True)
