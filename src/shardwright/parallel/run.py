"""How the microbatches of a step are run: one after another, or through a pipeline (`pipeline/runner.py`)."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from shardwright.parallel.data import DataEngine


class Microbatch(NamedTuple):
    """What a rank has of a microbatch, on its device. Shapes: B sequences, T tokens."""

    tokens_BT: Tensor
    targets_BT: Tensor
    positions_T: Tensor
    dropout_keys_B: Tensor | None


Loss = Callable[[Tensor, Tensor], Tensor]
"""(logits, targets_BT) -> a scalar to be added up over microbatches."""


class Runner(Protocol):
    """Runs the microbatches of a step, all of one shape."""

    keeps_gradients: bool
    """Gradients live in buckets that are sent: between steps they are zeroed, and not let go."""

    def train(self, microbatches: Sequence[Microbatch], loss: Loss) -> Tensor:
        """Forward and backward, adding to the parameters' `.grad`; the losses' sum on this rank in
        float64, 0 where another rank has the head."""

    def evaluate(self, microbatches: Sequence[Microbatch], loss: Loss) -> Tensor:
        """Forward alone, to be called without gradients; the sum as in `train`."""

    def release(self) -> None:
        """To be called after evaluation, so that only the shares are held again."""


class OneByOne:
    """The whole model on this rank: forward and backward of each microbatch before the next."""

    def __init__(self, model: nn.Module, engine: DataEngine) -> None:
        self.model, self.engine = model, engine
        self.keeps_gradients = engine.keeps_gradients

    def train(self, microbatches: Sequence[Microbatch], loss: Loss) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=microbatches[0].tokens_BT.device)
        for microbatch in microbatches:
            last = microbatch is microbatches[-1]
            part = loss(self._logits(microbatch), microbatch.targets_BT)
            self.engine.before_backward(split=False, last=last)
            part.backward()
            self.engine.after_gradients(split=False, last=last)
            total = total + part.detach()
        self.engine.end_step()
        return total

    def evaluate(self, microbatches: Sequence[Microbatch], loss: Loss) -> Tensor:
        return torch.stack([loss(self._logits(each), each.targets_BT).double() for each in microbatches]).sum()

    def release(self) -> None:
        self.engine.release()

    def _logits(self, microbatch: Microbatch) -> Tensor:
        logits_BTV: Tensor = self.model(
            microbatch.tokens_BT, microbatch.positions_T, dropout_keys_B=microbatch.dropout_keys_B
        )
        return logits_BTV
