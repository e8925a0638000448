"""Proves that a run which handles a fault and is then stopped goes on, after a resume, as a plain PyTorch loop does.

The loop (plain_loop.py) shares no code with the run: it leaves out the update of a spike, the samples that a run went
back from, or begins with the weights and the states of an optimizer that is there. Loss, gradient norm, learning rate
and target tokens of each step and the last weights are compared, in float64; so a bug in what a checkpoint keeps of a
fault shows in the numbers of the steps after the resume.
"""

import functools
import os
import signal
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from shardwright.training.step import Trainer
from shardwright.verification.rank import overflow_once
from tests.marks import prove
from tests.mutation import Mutation, mutated
from tests.training.plain_loop import (
    GLOBAL_BATCH,
    TOLERANCE,
    History,
    Trajectory,
    differences,
    logged,
    plain_training,
    write_run_file,
)
from tests.training.runs import checkpoints, train

STAYING = ExitStack()
"""Holds the bugs of a rank's process until it ends."""
SKIPPED, BEFORE = (4, 8), 5
SPIKE = 7
"""The step that a run goes back from, to the checkpoint after step 4."""


@dataclass(frozen=True)
class Scenario:
    """`parts`: the `--set` arguments of a run and of its resume. `spoiled`: the calls of a rank's `Trainer.step`, from
    1, in which the gradient is infinite; `signalled`: the one in which SIGTERM asks for a stop. `saved`: the steps of
    the checkpoints then. `history`: what the plain loop does instead."""

    parts: tuple[str, str]
    spoiled: tuple[tuple[int, ...], tuple[int, ...]]
    signalled: int
    saved: tuple[int, ...]
    history: History


FAULTS = {
    # Steps 4 and 8 are skipped; between them the run is stopped after step 6, and goes on with other ranks.
    "skip": Scenario(
        ("faults.spike=skip", "faults.spike=skip layout.dp_shard=2 layout.zero=3"),
        ((SKIPPED[0],), (SKIPPED[1] - 6,)),
        5,
        (6,),
        History(skipped=frozenset(SKIPPED)),
    ),
    # In step 7 the run goes back to step 4, and is stopped after step 5: the samples of step 7 are yet to come.
    "rollback": Scenario(
        ("faults.spike=rollback checkpoint.every=4 layout.dp_replicate=2", "faults.spike=rollback checkpoint.every=4"),
        ((SPIKE,), ()),
        SPIKE,
        (4, 5),
        History(left_out=range((SPIKE - 1) * GLOBAL_BATCH, SPIKE * GLOBAL_BATCH)),
    ),
}


def disturb(bugs: tuple[Mutation, ...], spoiled: tuple[int, ...], signalled: int | None, rank: int) -> None:
    """Put bugs into the code of this rank, and faults into the steps of rank 0."""
    STAYING.enter_context(mutated(*bugs))
    step, calls = Trainer.step, []

    def spoil(self, batch, number, rate):
        calls.append(number)
        if rank == 0 and len(calls) in spoiled:
            overflow_once(self.model.parts)
        if rank == 0 and len(calls) == signalled:
            os.kill(os.getpid(), signal.SIGTERM)  # the ranks know of it one step later
        return step(self, batch, number, rate)

    Trainer.step = spoil


def train_with(run_file: Path, settings: str, *arguments: str, **how) -> None:
    train(run_file, *(each for key in settings.split() for each in ("--set", key)), *arguments, **how)


def without_norms(found: Trajectory, steps: frozenset[int]) -> Trajectory:
    """The gradient norms of steps with a fault left out: they are infinite."""
    numbers = {key: number for key, number in found.numbers.items() if key not in {("grad_norm", n) for n in steps}}
    return Trajectory(numbers, found.weights)


def errors_of(name: str, folder: Path, tokens: Path, *bugs: Mutation) -> dict[str, float]:
    """How far a run with a fault, its stop and its resume are from the plain loop."""
    scenario = FAULTS[name]
    run_file = write_run_file(folder, tokens, "cosine")
    fault = functools.partial(disturb, bugs, scenario.spoiled[0], scenario.signalled)
    train_with(run_file, scenario.parts[0], fault=fault, expect=os.EX_TEMPFAIL)
    assert checkpoints(run_file) == [f"step-{step:08d}" for step in scenario.saved]
    fault = functools.partial(disturb, bugs, scenario.spoiled[1], None)
    train_with(run_file, scenario.parts[1], "--resume", fault=fault)
    history = scenario.history
    found, expected = logged(run_file), plain_training(tokens, "cosine", history)
    return differences(without_norms(found, history.skipped), without_norms(expected, history.skipped))


@pytest.mark.parametrize("name", FAULTS)
def test_a_resume_after_a_fault_takes_the_steps_of_a_plain_loop(name: str, ragged_tokens, tmp_path):
    errors = errors_of(name, tmp_path, ragged_tokens)
    assert max(errors.values()) <= TOLERANCE, errors


def errors_of_a_beginning(folder: Path, tokens: Path, *bugs: Mutation) -> dict[str, float]:
    """How far a run that begins with the weights and the optimizer states of another is from the plain loop."""
    for name in ("before", "after"):
        (folder / name).mkdir()
    before, after = (write_run_file(folder / name, tokens, "cosine") for name in ("before", "after"))
    # A step is over before the next one knows of the signal; an evaluation before it would know of it too.
    train_with(
        before,
        "layout.tp=2 evaluation.every=0",
        fault=functools.partial(disturb, (), (), BEFORE - 1),
        expect=os.EX_TEMPFAIL,
    )
    assert checkpoints(before) == [f"step-{BEFORE:08d}"]
    weights = before.parent / "out" / "checkpoints" / f"step-{BEFORE:08d}"
    train_with(after, f"init.weights={weights} init.optimizer=true", fault=functools.partial(disturb, bugs, (), None))
    return differences(logged(after), plain_training(tokens, "cosine", History(before=BEFORE)))


def test_a_run_that_begins_with_the_states_of_an_optimizer_takes_the_steps_of_a_plain_loop(ragged_tokens, tmp_path):
    errors = errors_of_a_beginning(tmp_path, ragged_tokens)
    assert max(errors.values()) <= TOLERANCE, errors


STATES = "shardwright.training.run:begin_with"
NAMED = "named_state(trainer.optimizer, model.named_parameters.items()).items()"
BUGS = {
    "samples that a rollback left out come again after a resume": (
        functools.partial(errors_of, "rollback"),
        Mutation("shardwright.training.resuming:RunCheckpoints._load", "progress.left_out", "()"),
        "loss",
    ),
    "a checkpoint does not say which samples a rollback left out": (
        functools.partial(errors_of, "rollback"),
        Mutation("shardwright.training.saving:SaveCheckpoints.on_save", "tuple(self.samples.left_out)", "()"),
        "loss",
    ),
    "a rollback keeps the last sample of the spike": (
        functools.partial(errors_of, "rollback"),
        Mutation(
            "shardwright.training.resilience.after_spike:AfterSpike.next",
            "self.samples.leave_out([samples])",
            "self.samples.leave_out([(samples[0], samples[1] - 1)])",
        ),
        "loss",
    ),
    "the learning rate runs on in skipped steps": (
        functools.partial(errors_of, "skip"),
        Mutation(
            "shardwright.training.loop:TrainLoop._take",
            "learning_rate(self.step - skipped, config.steps, config.optimizer.lr, config.lr_schedule, config.clock)",
            "learning_rate(self.step, config.steps, config.optimizer.lr, config.lr_schedule, config.clock)",
        ),
        "lr",
    ),
    "moments that init.optimizer keeps lose Adam's step": (
        errors_of_a_beginning,
        Mutation(STATES, NAMED, f"[(n, t) for n, t in {NAMED} if not n.startswith('step/')]"),
        "loss",
    ),
}


@prove
@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_seen(name: str, ragged_tokens, tmp_path):
    check, bug, quantity = BUGS[name]
    assert check(tmp_path, ragged_tokens, bug)[quantity] > 1e4 * TOLERANCE
