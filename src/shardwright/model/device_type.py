"""The device type of a tensor, for the few places where a CPU and a GPU take different paths."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_assumed: str | None = None


def device_type(x: Tensor) -> str:
    """Return `cpu` or `cuda`: the type assumed within `assumed`, otherwise the tensor's."""
    return x.device.type if _assumed is None else _assumed


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from the host to a device without waiting for the copy.

    A GPU copies unpinned memory through a buffer, and the host may have to wait for all earlier work of the device. So
    unpinned memory is first copied to pinned memory, which PyTorch reuses only after the device has read it.
    """
    if device.type == "cuda" and x.device.type == "cpu" and not x.is_pinned():
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


@contextmanager
def assumed(kind: str) -> Iterator[None]:
    """Assume a device type in a context, for a dry run: its tensors have no values, and a CPU build of PyTorch has no
    tensors on a GPU."""
    global _assumed
    before, _assumed = _assumed, kind
    try:
        yield
    finally:
        _assumed = before
