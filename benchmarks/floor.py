"""The floor of a step: its matmuls, its attention and its collectives alone, as `overhead.py` shows it beside the step.

One step of a real run is recorded: which of these operations it calls, with tensors of which shapes, strides and types.
They are then called again, in the same order on all ranks, on other tensors, with nothing between them: no norms, no
element-wise operations, no loss, no autograd, no optimizer. A layout cannot take less than that with these kernels and
with gloo. Its tensors are used again in each call, so that caches are at least as warm as in the step.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwright.system.torch_private import TorchDispatchMode, tree_map

COUNTED = ("mm", "addmm", "addmm_", "bmm", "baddbmm", "_grouped_mm", "grouped_matmul", "grouped_weight_gradient")


def is_counted(operation: Any) -> bool:
    """Whether it is a matmul, attention or a collective."""
    name = operation.overloadpacket.__name__
    return name in COUNTED or "dot_product" in name or operation.namespace == "c10d"


class Recorder(TorchDispatchMode):
    """Records the counted operations that are called within it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., Any], Any, Any]] = []
        self._tensors: dict[tuple[Any, ...], Tensor] = {}

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_counted(operation):
            taken: dict[tuple[Any, ...], int] = {}
            self.calls.append((operation, *(tree_map(lambda x: self._like(x, taken), x) for x in (args, kwargs or {}))))
        return operation(*args, **(kwargs or {}))

    def _like(self, x: Any, taken: dict[tuple[Any, ...], int]) -> Any:
        """A tensor of the same layout, another one for each argument of a call; numbers of rows keep their values."""
        if not isinstance(x, Tensor):
            return x
        if not x.is_floating_point():
            return x.clone()
        key = (x.shape, x.stride(), x.dtype)
        taken[key] = taken.get(key, 0) + 1
        if (*key, taken[key]) not in self._tensors:
            self._tensors[*key, taken[key]] = torch.empty_strided(*key[:2], dtype=x.dtype).fill_(0.01)
        return self._tensors[*key, taken[key]]

    @torch.no_grad()
    def replay(self) -> tuple[float, float]:
        """(wall, CPU) seconds of all calls, one after another."""
        wall, cpu = time.perf_counter(), time.process_time()
        messages = []
        for operation, args, kwargs in self.calls:
            result = operation(*args, **kwargs)
            if operation.overloadpacket.__name__ in ("send", "recv_"):
                messages.append(result)  # of which the other rank may post its part later
            elif operation.namespace == "c10d":
                (result[-1] if isinstance(result, tuple) else result).wait()
        for message in messages:
            message.wait()
        return time.perf_counter() - wall, time.process_time() - cpu
