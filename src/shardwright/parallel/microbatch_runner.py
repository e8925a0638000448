"""Runners of the micro-batches of a step: the interface, and the runner without a pipeline (gradient accumulation).

With pp above 1, `pipeline/runner.py` runs them.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from shardwright.model.balance import RealTokens
from shardwright.model.documents import Documents
from shardwright.parallel.data import DataEngine


class Microbatch(NamedTuple):
    """This rank's part of a micro-batch, on its device. Shapes: B sequences, T tokens, K modules of multi-token
    prediction."""

    tokens_BT: Tensor
    targets_BT: Tensor
    """With modules of multi-token prediction (1 + K, B, T): those of the model and those of each module."""
    positions_T: Tensor
    """In the sequence; (B, T) where ranks of cp hold other tokens of each sequence."""
    random_keys_B: Tensor | None
    documents: Documents | None = None
    """Within which attention stays; None: it goes over whole sequences."""
    ahead_KBT: Tensor | None = None
    """The tokens that modules of multi-token prediction read (`Transformer.forward`)."""
    real: RealTokens | None = None
    """The tokens that experts compute, where sequences have padding."""

    @property
    def read_by_model(self) -> tuple[Any, ...]:
        """The arguments of a model, or of a pipeline stage, besides its input."""
        return self.positions_T, self.random_keys_B, self.documents, self.ahead_KBT, self.real


Loss = Callable[[Any, Tensor], Tensor]
"""(output of the model, targets of a micro-batch) -> a scalar, or several losses (P,), which are summed over
micro-batches; the gradient is that of their sum."""


class Runner(Protocol):
    """Runs the micro-batches of a step, all of one shape."""

    keeps_gradients: bool
    """Whether gradients are views of the buckets that are all-reduced: between steps they are zeroed, not freed."""

    def train(self, microbatches: Sequence[Microbatch], loss: Loss) -> Tensor:
        """Run forward and backward passes, accumulating into the parameters' `.grad`; returns the sum of the losses on
        this rank in float64, a scalar 0 where another rank has the head."""

    def evaluate(self, microbatches: Sequence[Microbatch], loss: Loss) -> Tensor:
        """Run forward passes only, called under `no_grad`; returns the sum as in `train`."""

    def release(self) -> None:
        """Call after evaluation: frees the gathered parameters, so that only shards remain."""


class SequentialRunner:
    """Runs the whole model on this rank: forward and backward of one micro-batch after another."""

    def __init__(self, model: nn.Module, engine: DataEngine, graphs: bool = False) -> None:
        """`graphs`: blocks are replayed as CUDA graphs, which overwrite what they gave for the micro-batch before."""
        self.model, self.engine, self.graphs = model, engine, graphs
        self.keeps_gradients = engine.keeps_gradients

    def train(self, microbatches: Sequence[Microbatch], loss: Loss) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=microbatches[0].tokens_BT.device)
        for microbatch in microbatches:
            last = microbatch is microbatches[-1]
            part = loss(self._outputs(microbatch), microbatch.targets_BT)
            self.engine.before_backward(split=False, last=last)
            part.sum().backward()
            self.engine.after_gradients(split=False, last=last)
            total = total + part.detach().double()
        self.engine.end_step()
        return total

    def evaluate(self, microbatches: Sequence[Microbatch], loss: Loss) -> Tensor:
        return torch.stack([loss(self._outputs(each), each.targets_BT).double() for each in microbatches]).sum(0)

    def release(self) -> None:
        self.engine.release()

    def _outputs(self, microbatch: Microbatch) -> Any:
        if self.graphs:
            torch.compiler.cudagraph_mark_step_begin()
        return self.model(microbatch.tokens_BT, *microbatch.read_by_model)
