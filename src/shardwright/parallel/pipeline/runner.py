"""Runs the actions of this rank's list one after another, and starts the messages between them.

The shapes of messages follow from the shapes of the micro-batches. A rank keeps the input of a stage until its gradient
is computed, a received gradient until it is used, and an output until its backward pass.

Shapes: B batch, T tokens (or a token shard of them), D model.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from shardwright.parallel.data import DataEngine
from shardwright.parallel.microbatch import Loss, Microbatch
from shardwright.parallel.observer import MessageWait, Need, Observer, StepPasses
from shardwright.parallel.pipeline.messages import PipelineMessages
from shardwright.parallel.pipeline.stage import StageModel
from shardwright.schedule.actions import Action, Schedule
from shardwright.schedule.messages import PairExchange, with_messages


class PipelineStage(NamedTuple):
    """A stage on this rank, and the engine that reduces its gradients over data ranks."""

    model: StageModel
    engine: DataEngine


class Pipeline:
    """Runs the micro-batches of a step through the stages of all ranks of `pp`; a `microbatch_runner.Runner`."""

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        schedules: Callable[[bool, int], Schedule],
        messages: PipelineMessages,
        activation: Callable[[Tensor], Tensor],
        device: torch.device,
        observer: Observer,
    ) -> None:
        """`schedules`: (training, number of micro-batches) -> schedule. `activation`: token ids (B, T) -> an empty
        tensor of the shape that stages send to each other, (B, T, D)."""
        self.stages = {stage.model.number: stage for stage in stages}
        self.schedules, self.messages, self.activation = schedules, messages, activation
        self.device, self.observer = device, observer
        self.keeps_gradients = any(stage.engine.keeps_gradients for stage in stages)
        self._lists: dict[tuple[bool, int], list[Action | PairExchange]] = {}

    def train(self, microbatches: Sequence[Microbatch], loss: Loss) -> Tensor:
        with self.observer.during(StepPasses(microbatches)):
            total = self._run(_RankStep(self, microbatches, loss, training=True))
            for stage in self.stages.values():
                stage.engine.end_step()
        return total

    def evaluate(self, microbatches: Sequence[Microbatch], loss: Loss) -> Tensor:
        return self._run(_RankStep(self, microbatches, loss, training=False))

    def release(self) -> None:
        for stage in self.stages.values():
            stage.engine.release()

    def _run(self, step: "_RankStep") -> Tensor:
        key = step.training, len(step.microbatches)
        if key not in self._lists:
            self._lists[key] = with_messages(self.schedules(*key))[self.messages.rank]
        step.run(self._lists[key])
        self.messages.finish()
        return step.total


class _RankStep:
    """One training step or evaluation on this rank, with its tensors."""

    def __init__(self, pipeline: Pipeline, microbatches: Sequence[Microbatch], loss: Loss, training: bool) -> None:
        self.pipeline, self.microbatches, self.loss, self.training = pipeline, microbatches, loss, training
        self.observer = pipeline.observer
        self.total = torch.zeros((), dtype=torch.float64, device=pipeline.device)
        self.results: dict[Need, Tensor] = {}
        """Outputs and input gradients by the action that needs them, on this rank or on the rank that receives them."""
        self.kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        """(stage, micro-batch) -> input and output of the forward pass."""
        self.weights: dict[tuple[int, int], Callable[[], None]] = {}
        """(stage, micro-batch) -> a function that computes the weight gradients deferred from I to W."""

    def run(self, entries: Sequence[Action | PairExchange]) -> None:
        """Run all actions of this rank and start its messages."""
        completing = [entry for entry in entries if isinstance(entry, Action) and entry.op in ("B", "W")]
        last_of_stage = {action.stage: action for action in completing}
        for entry in entries:
            if isinstance(entry, PairExchange):
                self.pipeline.messages.start(entry, self.results, self._empty)
            elif entry.op == "F":
                self._forward(entry)
            elif entry.op == "W":
                self._weight_gradients(entry, last=last_of_stage[entry.stage] == entry)
            else:
                self._backward(entry, last=last_of_stage[entry.stage] == entry)

    def _forward(self, action: Action) -> None:
        stage, _, i = action
        model, microbatch = self.pipeline.stages[stage].model, self.microbatches[i]
        x = microbatch.tokens_BT if model.first else self._needed(action).requires_grad_(self.training)
        with self.observer.during(action), torch.profiler.record_function(str(action)):
            output: Tensor = model(x, *microbatch.read_by_model)
            if model.last:
                losses = self.loss(output, *microbatch.read_by_loss)
                self.total = self.total + losses.detach().double()
                output = losses.sum()
        if self.training:
            self.kept[stage, i] = x, output
        if not model.last:
            self.results[stage + 1, "F", i] = output.detach()

    def _backward(self, action: Action, last: bool) -> None:
        """Run B, or I, which defers the gradients of weights to W."""
        stage, op, i = action
        model, engine = self.pipeline.stages[stage]
        x, output = self.kept.pop((stage, i))
        gradient = None if model.last else self._needed(action)
        with self.observer.during(action), torch.profiler.record_function(str(action)):
            engine.before_backward(split=op == "I", last=last)
            with model.gradients.hold() if op == "I" else nullcontext():
                torch.autograd.backward(output, gradient)
            if op == "I":
                self.weights[stage, i] = model.gradients.take()
            else:
                engine.after_gradients(split=False, last=last)
        if not model.first:
            assert x.grad is not None
            self.results[stage - 1, "B", i] = x.grad

    def _weight_gradients(self, action: Action, last: bool) -> None:
        stage, _, i = action
        with self.observer.during(action), torch.profiler.record_function(str(action)):
            self.weights.pop((stage, i))()
            self.pipeline.stages[stage].engine.after_gradients(split=True, last=last)

    def _needed(self, action: Action) -> Tensor:
        """Return the tensor that an action needs, from another stage of this rank or received from another rank."""
        wait = MessageWait(action)
        return self.results.pop(wait.need) if wait.need in self.results else self.pipeline.messages.receive(wait)

    def _empty(self) -> Tensor:
        return self.pipeline.activation(self.microbatches[0].tokens_BT)
