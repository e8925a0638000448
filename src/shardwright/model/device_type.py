"""The kind of device that a tensor is on, for the few places where the program differs between a CPU and a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_assumed: str | None = None


def device_type(x: Tensor) -> str:
    """`cpu` or `cuda`: that of the tensor, or within `assumed` that one."""
    return x.device.type if _assumed is None else _assumed


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to a device without waiting for it.

    A GPU copies memory that is not pinned by way of a buffer, and the host may have to wait for everything that the
    device has to do before; so memory that is not pinned is copied to memory that is. PyTorch uses that again only
    after the device has read it.
    """
    if device.type == "cuda" and x.device.type == "cpu" and not x.is_pinned():
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


@contextmanager
def assumed(kind: str) -> Iterator[None]:
    """Context in which the program takes the path of this kind of device, for a dry run: its tensors have no values,
    and a build of PyTorch for CPUs has no tensors on a GPU."""
    global _assumed
    before, _assumed = _assumed, kind
    try:
        yield
    finally:
        _assumed = before
