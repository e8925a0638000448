"""What a rank of a run does differently on the mock; a run file names this file under `extensions`.

- Ranks of ep exchange equally many rows: the counts that kernels would have computed are not there.
- Once a step of the same kind has warmed up, steps may neither wait for the device nor copy from or to memory of the
  host that is not pinned. `MOCK_MAY_WAIT=1` is for runs that are documented to read a value back in each step.
"""

import ctypes
import os
from typing import Any

import torch
from torch import Tensor

from shardwright.parallel import expert
from shardwright.training.step import Trainer

WARM_UP = 2
"""Steps that may wait: the allocators, the compiler and the optimizer prepare what later steps use."""


def equal_counts(rows_2n: Tensor, n_rows: int) -> list[list[int]]:
    """In the place of `expert.read_counts`: as many rows to and from each rank, and the rest dropped."""
    n = rows_2n.shape[1]
    return [[n_rows // n] * n, [n_rows // n] * n]


# The ranks' functions hold on to `read_counts` itself, so what it does is replaced and not the name.
expert.read_counts.__code__ = equal_counts.__code__

_step = Trainer.step


def step_without_waiting(self: Trainer, *args: Any, **kwargs: Any) -> Any:
    """A step that raises where it waits for the device."""
    mock = ctypes.CDLL(None)
    done = self.__dict__["mock_steps"] = self.__dict__.get("mock_steps", 0) + 1
    if done <= WARM_UP or os.environ.get("MOCK_MAY_WAIT"):
        return _step(self, *args, **kwargs)
    before = mock.mock_pageable_copies()
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = _step(self, *args, **kwargs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    copies = mock.mock_pageable_copies() - before
    if copies:
        raise RuntimeError(f"step {done} copied {copies} times from or to memory of the host that is not pinned")
    return result


Trainer.step = step_without_waiting  # type: ignore[method-assign]
