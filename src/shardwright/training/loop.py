"""The train loop: take a step, then call the hooks of the run for everything else.

    on_start
    each step:  before_step, the step itself (takes_step), after_step
                if an action is due:  before_reading, numbers and on_log, on_evaluation, on_save
                end_step
    on_stop, if a signal, or data that is not published, stops the run before its last step

Every rank runs this loop. All ranks roll back to the same checkpoint and, if a signal asks any of them to stop, stop
after the same step (`StopRequest`).
"""

import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.config import RunConfig
from shardwright.data.batches import Batches
from shardwright.parallel.observer import StepPhase
from shardwright.runs.records import Record
from shardwright.system.signals import on_signals
from shardwright.training.hooks import Due, Hook, RunStart, TakenStep, due_after
from shardwright.training.optimizer import learning_rate
from shardwright.training.step import Trainer


class TrainLoop:
    """The steps of one run on one rank."""

    def __init__(
        self,
        config: RunConfig,
        trainer: Trainer,
        hooks: Sequence[Hook],
        batches: Callable[[RunStart], Batches],
        asked_to_stop: Callable[[], bool],
        has_data: Callable[[Batches, Callable[[], None]], bool] = lambda batches, beat: True,
    ) -> None:
        """`batches`: opens the batches after a start. `asked_to_stop`: returns whether a signal asked any rank to
        stop, equal on every rank. `has_data`: waits for the next batch (`PublishedSamples.wait`)."""
        self.config, self.trainer, self.hooks = config, trainer, hooks
        self.batches, self.asked_to_stop, self.has_data = batches, asked_to_stop, has_data
        self.observers, self.step = trainer.model.observers, 0
        trainer.take_steps_if(self._takes_step)

    def run(self, start: RunStart) -> int:
        """Take the steps after `start`, again after each rollback to a checkpoint. Return the number of completed
        steps."""
        while isinstance(end := self._steps(start), RunStart):
            start = end
            for hook in self.hooks:
                hook.on_rollback(start)
        return end

    def _steps(self, start: RunStart) -> int | RunStart:
        """Return the number of completed steps, or the checkpoint that the run rolls back to."""
        self.step, taken = start.step, None
        with self.batches(start) as batches:
            for hook in self.hooks:
                hook.on_start(start)
            while self.step < self.config.steps and not self.asked_to_stop():
                if not self.has_data(batches, lambda: self.observers.begin(StepPhase("data", self.step))):
                    break
                taken = self._take(batches)
                self.step = taken.step
                for hook in self.hooks:
                    if (back := hook.after_step(taken)) is not None:
                        return back
                self.observers.begin(StepPhase("log", self.step - 1))
                self._follow(taken)
                for hook in self.hooks:
                    hook.end_step(taken)
                self.observers.begin(StepPhase("agreement", self.step))
            if taken is not None and self.step < self.config.steps:
                self._stop(taken)
        return self.step

    def _take(self, batches: Batches) -> TakenStep:
        """Take one step on the next batch."""
        for hook in self.hooks:
            hook.before_step(self.step)
        with self.observers.during(StepPhase("data", self.step)):
            first_sample, batch = batches.next_sample, next(batches)
        config, trainer, skipped = self.config, self.trainer, self.trainer.skipped_steps
        # As in Megatron-LM, a skipped step does not advance the learning rate.
        rate = learning_rate(self.step - skipped, config.steps, config.optimizer.lr, config.lr_schedule, config.clock)
        result = trainer.step(batch, self.step, rate)
        overflowed = trainer.spike is None and trainer.skipped_steps > skipped
        samples, step = (first_sample, batches.next_sample), self.step + 1
        return TakenStep(step, samples, rate, result, overflowed, due_after(config, step))

    def _takes_step(self, norm: Tensor) -> bool:
        """Ask every hook, without short-circuiting: each may communicate."""
        return all([hook.takes_step(self.step, norm) for hook in self.hooks])

    def _follow(self, taken: TakenStep) -> None:
        """Log, evaluate and save as due."""
        follows = taken.due
        if follows.log or follows.evaluate or follows.save or follows.save_locally:
            for hook in self.hooks:
                hook.before_reading(taken)
        if follows.log:
            numbers: Record = {}
            for hook in self.hooks:
                numbers |= hook.numbers(taken)
            for hook in self.hooks:
                hook.on_log(taken, numbers)
        if follows.evaluate:
            for hook in self.hooks:
                hook.on_evaluation(taken.step)
        if follows.save or follows.save_locally:
            for hook in self.hooks:
                hook.on_save(taken)

    def _stop(self, taken: TakenStep) -> None:
        """Log and save after the step at which a signal stops the run, unless already done."""
        left = Due(log=not taken.due.log, evaluate=False, save=not taken.due.save, save_locally=False, last=True)
        taken = replace(taken, due=left)
        self._follow(taken)
        for hook in self.hooks:
            hook.on_stop(taken)


SAME_KEYPRESS_S = 2.0


class StopRequest:
    """The answer, equal on every rank, to whether a signal asked any rank to stop. The ranks all-reduce the answer on
    the CPU while a step computes, so it is known one step later."""

    def __init__(self) -> None:
        self.requested = False
        self._flag = torch.zeros((), dtype=torch.int64)
        self._work: dist.Work | None = None

    def everyone(self) -> bool:
        """Return True, at the same call on every rank, once any rank was asked to stop. Called each step by every
        rank."""
        if self._work is not None:
            self._work.wait()
        answer = bool(self._flag)
        self._flag = torch.tensor(int(self.requested))
        self._work = dist.all_reduce(self._flag, async_op=True)
        return answer

    def settle(self) -> None:
        """Wait for the pending all-reduce, so that the process group can be destroyed."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    @contextmanager
    def listening(self) -> Iterator["StopRequest"]:
        """Handle the signals of `signals.STOPPING` inside the `with` block: the first asks for a stop, a second
        SIGINT raises KeyboardInterrupt at once.

        Under torchrun, one Ctrl-C arrives twice, from the terminal and from torchrun. Both count as one.
        """
        asked_s = math.inf

        def ask(number: int, frame: FrameType | None) -> None:
            nonlocal asked_s
            if number == signal.SIGINT and time.monotonic() > asked_s + SAME_KEYPRESS_S:
                raise KeyboardInterrupt
            asked_s = min(asked_s, time.monotonic())
            self.requested = True

        with on_signals(ask, last=True):
            yield self
