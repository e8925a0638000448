"""Runners of the micro-batches of a step: the interface, and the runner without a pipeline (gradient accumulation).

With pp above 1, `pipeline/runner.py` runs them.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from shardwright.model.balance import RealTokens
from shardwright.model.batch_invariant import batch_invariant
from shardwright.model.documents import Documents
from shardwright.parallel.data import DataEngine
from shardwright.parallel.observer import NO_OBSERVER, Observer, StepPasses
from shardwright.schedule.actions import Action


class PairTargets(NamedTuple):
    """The documents of a micro-batch that are answers: document 2p is the chosen answer of pair p, document 2p + 1 the
    rejected one. D = 2 P documents."""

    documents_BT: Tensor
    """The document of each of this rank's tokens, int64; D for padding."""
    counts_D: Tensor
    """The targets of each whole document, float64."""
    reference_D: Tensor
    """The log-probability of each document under the reference, float64; zeros without a reference."""


class Microbatch(NamedTuple):
    """This rank's part of a micro-batch, on its device. Shapes: B sequences, T tokens, K multi-token prediction (MTP)
    modules."""

    tokens_BT: Tensor
    targets_BT: Tensor
    """(B, T); with MTP modules (1 + K, B, T), first the model's targets, then each module's."""
    positions_T: Tensor
    """Positions in the sequence; (B, T) if ranks of cp hold different tokens of each sequence."""
    random_keys_B: Tensor | None
    documents: Documents | None = None
    """The documents within which attention stays; None: attention covers whole sequences."""
    ahead_KBT: Tensor | None = None
    """The tokens that MTP modules read (`Transformer.forward`)."""
    real: RealTokens | None = None
    """The tokens that experts compute, if sequences have padding."""

    pairs: PairTargets | None = None
    """The pairs of answers of preference training."""
    weights_BT: Tensor | None = None
    """The factors of the targets' losses."""

    @property
    def read_by_loss(self) -> tuple[Any, ...]:
        """The arguments of a loss after the output of the model."""
        more = (tensor for tensor in (self.pairs, self.weights_BT) if tensor is not None)
        return (self.targets_BT, *more)

    @property
    def read_by_model(self) -> tuple[Any, ...]:
        """The arguments of a model, or of a pipeline stage, after its input."""
        return self.positions_T, self.random_keys_B, self.documents, self.ahead_KBT, self.real


Loss = Callable[..., Tensor]
"""(output of the model, *`read_by_loss` of a micro-batch) -> a scalar, or several losses (P,); each is summed over
micro-batches, and the gradient is of the sum of all."""


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
        return torch.stack(
            [loss(self._outputs(microbatch), *microbatch.read_by_loss).double() for microbatch in microbatches]
        ).sum(0)

    def release(self) -> None:
        self.engine.release()

    def _outputs(self, microbatch: Microbatch) -> Any:
        if self.graphs:
            torch.compiler.cudagraph_mark_step_begin()
        return self.model(microbatch.tokens_BT, *microbatch.read_by_model)
