"""The copy of a rank's shards in host memory from which a background thread writes.

A thread makes the copy while the next forward and backward passes read the weights. Training waits for the copy before
it changes any weight (DataStates-LLM, Maurya et al., HPDC '24: lazy asynchronous multi-level checkpointing). The state
of compressed gradients changes in a backward pass, so it is copied at once.
"""

import threading
import time
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from shardwright.training.checkpoint.plan import CheckpointPlan, TensorPiece
from shardwright.training.checkpoint.state import COMPRESSION


class Snapshot:
    """A copy of a rank's pieces in host memory, which is reused for each checkpoint."""

    def __init__(self, plan: CheckpointPlan, device: torch.device) -> None:
        self._plan, self._device = plan, device
        self._host = {piece: _room(piece, pinned=device.type == "cuda") for piece in plan.pieces}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._made = threading.Event()
        self._made.set()
        self._later: dict[TensorPiece, Tensor] = {}
        self._ready: Any = None
        self.waited_s = 0.0
        """Time that training has waited for `make` since `begin`, in seconds."""

    def begin(self, tensors: dict[str, Tensor]) -> None:
        """Register the tensors at their current values. Another thread must call `make` next, unconditionally."""
        views = {piece: piece.view(tensors) for piece in self._plan.pieces}
        self._later = {piece: view for piece, view in views.items() if not piece.name.startswith(COMPRESSION)}
        for piece in views.keys() - self._later.keys():
            self._host[piece].copy_(views[piece])
        if self._stream is not None:
            self._ready = torch.cuda.Event()
            self._ready.record(torch.cuda.current_stream(self._device))
        self.waited_s = 0.0
        self._made.clear()

    def make(self) -> Mapping[TensorPiece, Tensor]:
        """Copy the remaining tensors. Return the values at the time of `begin`."""
        try:
            with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                if self._stream is not None:
                    self._stream.wait_event(self._ready)
                for piece, view in self._later.items():
                    self._host[piece].copy_(view, non_blocking=True)
                if self._stream is not None:
                    self._stream.synchronize()
            return self._host
        finally:
            self._later = {}
            self._made.set()

    def wait(self) -> None:
        """Wait until a pending `make` is done. Called before any tensor changes."""
        if not self._made.is_set():
            began_s = time.monotonic()
            self._made.wait()
            self.waited_s += time.monotonic() - began_s


def _room(piece: TensorPiece, pinned: bool) -> Tensor:
    return torch.zeros(piece.entry.shape, dtype=getattr(torch, piece.entry.dtype), pin_memory=pinned)
