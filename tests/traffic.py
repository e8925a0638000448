"""Counting what a rank sends: the collectives that PyTorch dispatches, their number and bytes."""

from collections import Counter

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Traffic(TorchDispatchMode):
    """Counts collectives by name, and the bytes of their larger side; tensors of under 64 bytes apart."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.namespace == "c10d":
            tensors = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            largest = max((t.numel() * t.element_size() for t in tensors), default=0)
            name = func._schema.name.removeprefix("c10d::").strip("_")
            self.calls[name if largest >= 64 else "small"] += 1
            self.bytes[name if largest >= 64 else "small"] += largest
        return func(*args, **(kwargs or {}))
