"""The kind of device that a tensor is on, for the few places where the program differs between a CPU and a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

_assumed: str | None = None


def device_type(x: Tensor) -> str:
    """`cpu` or `cuda`: that of the tensor, or within `assumed` that one."""
    return x.device.type if _assumed is None else _assumed


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
