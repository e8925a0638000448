"""The hook interface for everything in a run except taking steps, and the registry of user-defined hooks.

`loop.py` calls every hook of a run at the same places of each step, in the order in which `run.py` lists them. Every
rank calls the same methods at the same steps, so a hook may communicate. All methods of `Hook` do nothing by default.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from shardwright.config import RunConfig
from shardwright.data.mixture import MixtureStage
from shardwright.runs.records import Record
from shardwright.system import extensions
from shardwright.training.run_log import RunLog
from shardwright.training.step import StepResult, Trainer


@dataclass(frozen=True)
class RunStart:
    """The start of a run: number of completed steps and samples, the loaded checkpoint, the mixture stages that had
    started, the ranges of samples that rollbacks excluded, and the digest of the weights of the reference."""

    step: int = 0
    samples: int = 0
    checkpoint: Path | None = None
    past: Sequence[MixtureStage] = ()
    left_out: tuple[tuple[int, int], ...] = ()
    reference: str | None = None


@dataclass(frozen=True)
class Due:
    """The actions due after a step: a log record, an evaluation, a checkpoint in OUT (`save`) or on the hosts
    (`save_locally`). `last`: the run ends after the step."""

    log: bool
    evaluate: bool
    save: bool
    save_locally: bool
    last: bool


def due(step: int, every: int) -> bool:
    """Return whether an action with period `every` is due after `step` steps; 0 means never."""
    return every > 0 and step % every == 0


def due_after(config: RunConfig, step: int) -> Due:
    """Return the actions due after `step` steps."""
    last, checkpoint = step == config.steps, config.checkpoint
    return Due(
        log=due(step, config.metrics.every) or last,
        evaluate=due(step, config.evaluation.every) or last,
        save=due(step, checkpoint.every) or last,
        save_locally=checkpoint.local is not None and due(step, checkpoint.local_every),
        last=last,
    )


@dataclass(frozen=True)
class TakenStep:
    """One optimizer step. `step`: completed steps, including this one. `samples`: its first running sample, and the
    one after its last. `rate`: learning rate. `result`: its numbers, on the device. `overflowed`: fp16 skipped the
    step."""

    step: int
    samples: tuple[int, int]
    rate: float
    result: StepResult
    overflowed: bool
    due: Due


class Hook:
    """An optional part of a run, called at fixed places of each step."""

    def on_start(self, start: RunStart) -> None:
        """Prepare for the steps after `start`. Called at the start of a run and after each rollback."""

    def on_rollback(self, start: RunStart) -> None:
        """Discard state from after `start`: the run continues from that checkpoint."""

    def before_step(self, step: int) -> None:
        """Act before the batch of step number `step` (0-based) is read."""

    def takes_step(self, step: int, norm: Tensor) -> bool:
        """Return whether step number `step` (0-based) changes weights and optimizer states. The clipped gradients
        are in `.grad`. `norm` is their global norm before clipping, equal on every rank; reading it synchronizes
        with the device. All ranks must return the same value."""
        return True

    def after_step(self, taken: TakenStep) -> RunStart | None:
        """Act after a step. Return the start to continue from if the run rolls back to a checkpoint, otherwise None."""
        return None

    def before_reading(self, taken: TakenStep) -> None:
        """Check the step before its numbers are logged, and before an evaluation or a checkpoint of its weights."""

    def numbers(self, taken: TakenStep) -> Record:
        """Return numbers for the log record of a step, by name. The record contains the numbers of rank 0."""
        return {}

    def on_log(self, taken: TakenStep, numbers: Record) -> None:
        """Write the numbers of all hooks, or act on them."""

    def on_evaluation(self, step: int) -> None:
        """Evaluate after `step` steps."""

    def on_save(self, taken: TakenStep) -> None:
        """Save a checkpoint."""

    def end_step(self, taken: TakenStep) -> None:
        """Act after all due actions of a step."""

    def on_stop(self, taken: TakenStep) -> None:
        """Finish. Called if a signal stops the run after this step, before the last step of the run file."""

    def close(self) -> None:
        """Release resources. Called once, also after an error."""


@dataclass(frozen=True)
class RunParts:
    """The parts of a run that are passed to a user-defined hook."""

    config: RunConfig
    trainer: Trainer
    log: RunLog


@dataclass(frozen=True)
class HookKind:
    """A user-defined hook. `make` returns the hook of a run on this rank."""

    name: str
    make: Callable[[RunParts], Hook]


HOOKS: dict[str, HookKind] = {}


def register(kind: HookKind) -> HookKind:
    """Add a hook to every run that loads this extension. Raises ConfigError if the name is taken."""
    return extensions.add(HOOKS, "a hook", kind)
