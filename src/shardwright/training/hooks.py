"""The interface of what a run does beside taking steps, and the registry of a user's own hooks.

`loop.py` calls every hook of a run at the same places of each step, in the order in which `run.py` lists them. Every
rank calls the same methods at the same steps, so a hook may communicate. All methods of `Hook` do nothing: a hook
overrides those that it needs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from shardwright.config import RunConfig
from shardwright.data.mixture import MixtureStage
from shardwright.run_folder import Record
from shardwright.system import extensions
from shardwright.training.run_log import RunLog
from shardwright.training.step import StepResult, Trainer


@dataclass(frozen=True)
class RunStart:
    """Where a run begins: steps taken and samples consumed so far, the checkpoint that was loaded, the stages of the
    mixture that had begun, and the ranges of samples that a rollback left out."""

    step: int = 0
    samples: int = 0
    checkpoint: Path | None = None
    past: Sequence[MixtureStage] = ()
    left_out: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Due:
    """What follows a step: a log record, an evaluation, a checkpoint in OUT (`save`) or on the hosts (`save_locally`).
    `last`: the run ends with it."""

    log: bool
    evaluate: bool
    save: bool
    save_locally: bool
    last: bool


def due(step: int, every: int) -> bool:
    """Return whether something that is done after every `every` steps, 0 for never, is done after this one."""
    return every > 0 and step % every == 0


def due_after(config: RunConfig, step: int) -> Due:
    """Return what follows after `step` steps."""
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
    """One optimizer step. `step`: steps done, this one included; `samples`: its first running sample, and the one after
    its last; `rate`: its learning rate; `result`: its numbers, on the device; `overflowed`: fp16 skipped it."""

    step: int
    samples: tuple[int, int]
    rate: float
    result: StepResult
    overflowed: bool
    due: Due


class Hook:
    """Something that a run does beside taking steps."""

    def on_start(self, start: RunStart) -> None:
        """Prepare for the steps after `start`: at the start of a run, and after each rollback."""

    def on_rollback(self, start: RunStart) -> None:
        """Forget what came after `start`: the run continues from that checkpoint."""

    def before_step(self, step: int) -> None:
        """Act before the batch of step number `step` (0-based) is read."""

    def takes_step(self, step: int, norm: Tensor) -> bool:
        """Return whether step number `step` (0-based) changes weights and optimizer states. The clipped gradients are
        in `.grad`; `norm` is their global norm before clipping, equal on every rank, and reading it waits for the
        device. All ranks have to return the same."""
        return True

    def after_step(self, taken: TakenStep) -> RunStart | None:
        """Act after a step; return where the run continues if it goes back to a checkpoint, else None."""
        return None

    def before_reading(self, taken: TakenStep) -> None:
        """Check the step before its numbers are logged, and before an evaluation or a checkpoint of its weights."""

    def numbers(self, taken: TakenStep) -> Record:
        """Return numbers of the log record of a step, by name; the record contains those of rank 0."""
        return {}

    def on_log(self, taken: TakenStep, numbers: Record) -> None:
        """Write the numbers of all hooks, or act on them."""

    def on_evaluation(self, step: int) -> None:
        """Evaluate after `step` steps."""

    def on_save(self, taken: TakenStep) -> None:
        """Save a checkpoint."""

    def end_step(self, taken: TakenStep) -> None:
        """Act after everything that was due after a step."""

    def on_stop(self, taken: TakenStep) -> None:
        """Finish: a signal stops the run after this step, which is not the last of the run file."""

    def close(self) -> None:
        """Release resources. Called once, also after an error."""


@dataclass(frozen=True)
class RunParts:
    """The parts of a run that a user's hook is made from."""

    config: RunConfig
    trainer: Trainer
    log: RunLog


@dataclass(frozen=True)
class HookKind:
    """A hook of a user's own: `make` returns the hook of a run on this rank."""

    name: str
    make: Callable[[RunParts], Hook]


HOOKS: dict[str, HookKind] = {}


def register(kind: HookKind) -> HookKind:
    """Add a hook to every run that loads this extension. Raises ConfigError for a name that is taken."""
    return extensions.add(HOOKS, "a hook", kind)
