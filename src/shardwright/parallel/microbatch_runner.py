"""Runners of the micro-batches of a step: the interface, and the runner without a pipeline (gradient accumulation).

With pp above 1, `pipeline/runner.py` runs them.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardwright.model.batch_invariant import batch_invariant
from shardwright.parallel.data import DataEngine
from shardwright.parallel.microbatch import Loss, Microbatch
from shardwright.parallel.observer import NO_OBSERVER, Observer, StepPasses
from shardwright.schedule.actions import Action


class Runner(Protocol):
    """Runs the micro-batches of a step, all of one shape."""

    keeps_gradients: bool
    """Whether gradients are views of all-reduce buckets, which are zeroed between steps, not freed."""

    def train(self, microbatches: Sequence[Microbatch], loss: Loss) -> Tensor:
        """Run forward and backward passes, accumulate into the parameters' `.grad`, and return the sum of the losses on
        this rank in float64: a scalar 0 if another rank has the head."""

    def evaluate(self, microbatches: Sequence[Microbatch], loss: Loss) -> Tensor:
        """Run forward passes only, under `no_grad`, and return the sum as `train` does."""

    def release(self) -> None:
        """Free the gathered parameters after evaluation, so that only shards remain."""


class BatchInvariantRunner:
    """Another runner, whose results do not depend on the other sequences of a pass (`model/batch_invariant.py`)."""

    def __init__(self, runner: Runner) -> None:
        self.runner, self.keeps_gradients = runner, runner.keeps_gradients

    def train(self, microbatches: Sequence[Microbatch], loss: Loss) -> Tensor:
        with batch_invariant():
            return self.runner.train(microbatches, loss)

    def evaluate(self, microbatches: Sequence[Microbatch], loss: Loss) -> Tensor:
        with batch_invariant():
            return self.runner.evaluate(microbatches, loss)

    def release(self) -> None:
        self.runner.release()


class SequentialRunner:
    """Runs the whole model on this rank: forward and backward of one micro-batch after another."""

    def __init__(
        self, model: nn.Module, engine: DataEngine, graphs: bool = False, observer: Observer = NO_OBSERVER
    ) -> None:
        """`graphs`: blocks are replayed as CUDA graphs, which overwrite the outputs of the previous micro-batch."""
        self.model, self.engine, self.graphs, self.observer = model, engine, graphs, observer
        self.keeps_gradients = engine.keeps_gradients

    def train(self, microbatches: Sequence[Microbatch], loss: Loss) -> Tensor:
        with self.observer.during(StepPasses(microbatches)):
            total = torch.zeros((), dtype=torch.float64, device=microbatches[0].tokens_BT.device)
            for number, microbatch in enumerate(microbatches):
                last = microbatch is microbatches[-1]
                with self.observer.during(Action(0, "F", number)):
                    part = loss(self._outputs(microbatch), *microbatch.read_by_loss)
                with self.observer.during(Action(0, "B", number)):
                    self.engine.before_backward(split=False, last=last)
                    part.sum().backward()
                    self.engine.after_gradients(split=False, last=last)
                total = total + part.detach().double()
            self.engine.end_step()
        return total

    def evaluate(self, microbatches: Sequence[Microbatch], loss: Loss) -> Tensor:
        losses = []
        for number, microbatch in enumerate(microbatches):
            with self.observer.during(Action(0, "F", number)):
                losses.append(loss(self._outputs(microbatch), *microbatch.read_by_loss).double())
        return torch.stack(losses).sum(0)

    def release(self) -> None:
        self.engine.release()

    def _outputs(self, microbatch: Microbatch) -> Any:
        if self.graphs:
            torch.compiler.cudagraph_mark_step_begin()
        return self.model(microbatch.tokens_BT, *microbatch.read_by_model)
