"""Proves that `shardwright train` takes the steps of a plain PyTorch loop, in one process, in layouts and after a stop.

Runs of the command (runs.py) are compared with the loop of plain_loop.py: loss, gradient norm, learning
rate and target tokens of each step, the validation loss wherever it is due, and the weights of the last checkpoint, in
float64. Bugs of a training loop, put into the code of the ranks, have to show as a difference of those numbers.
"""

import functools
import os
import signal
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.marks import rest_prove
from tests.mutation import Mutation, mutated
from tests.training.plain_loop import (
    CLIP_NORM,
    LOGGED,
    STEPS,
    TOLERANCE,
    Trajectory,
    differences,
    logged,
    plain_training,
    write_run_file,
)
from tests.training.runs import checkpoints, train

STOPPED_STEPS = 6


@dataclass(frozen=True)
class Case:
    """A run: its layout, and another in which it is resumed if it is to be stopped; the shape of its learning rate; the
    steps between logged lines."""

    layouts: tuple[str, ...] = ("",)
    shape: str = "cosine"
    logged_every: int = 1

    def __str__(self) -> str:
        return ", then ".join(layout or "one process" for layout in self.layouts) + f": {self.shape}"


STAYING = ExitStack()
"""Holds the bugs of a rank's process until it ends."""


def disturb(bugs: tuple[Mutation, ...], stopped: bool, rank: int) -> None:
    """Put bugs into the code of this rank; if `stopped`, rank 0 gets SIGTERM in time to stop after STOPPED_STEPS."""
    from shardwright.training.step import Trainer

    STAYING.enter_context(mutated(*bugs))
    step = Trainer.step

    def signalled(self, batch, number, rate):
        # The ranks know of a signal one step after that in which it comes.
        if stopped and rank == 0 and number + 2 == STOPPED_STEPS:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, batch, number, rate)

    Trainer.step = signalled


def trained(folder: Path, tokens: Path, case: Case, *bugs: Mutation) -> Trajectory:
    """What `shardwright train` comes to. With a second layout a signal stops it after STOPPED_STEPS steps in the first,
    and it is resumed in the second. Fails if a run fails."""
    run_file = write_run_file(folder, tokens, case.shape, case.logged_every)
    for number, layout in enumerate(case.layouts):
        settings = [argument for key in layout.split() for argument in ("--set", f"layout.{key}")]
        stopped = number + 1 < len(case.layouts)
        fault = functools.partial(disturb, bugs, stopped)
        train(run_file, *settings, *["--resume"] * number, fault=fault, expect=os.EX_TEMPFAIL if stopped else 0)
        assert checkpoints(run_file)[-1] == f"step-{STOPPED_STEPS if stopped else STEPS:08d}"
    return logged(run_file)


def expected(tokens: Path, case: Case) -> Trajectory:
    """What the plain loop comes to, of the steps that a run of the case logs."""
    plain = plain_training(tokens, case.shape)
    last = {STEPS} if len(case.layouts) == 1 else {STOPPED_STEPS, STEPS}
    numbers = {
        (quantity, step): number
        for (quantity, step), number in plain.numbers.items()
        if quantity not in LOGGED or step % case.logged_every == 0 or step in last
    }
    return Trajectory(numbers, plain.weights)


ONE, WSD, STOPPED, SPARSE = Case(), Case(shape="wsd"), Case(("", ""), "wsd"), Case(("", ""), "cosine", 4)
SHARDED, TENSORS, STAGES = Case(("dp_shard=2 zero=3",)), Case(("tp=2",)), Case(("pp=2",))
CASES = [
    ONE,
    STOPPED,
    SPARSE,
    Case(2 * SHARDED.layouts),
    Case(2 * TENSORS.layouts, "wsd"),
    Case(2 * STAGES.layouts),
    Case(("pp=2", "dp_replicate=2 tp=2"), "wsd"),
]


@pytest.mark.parametrize("case", rest_prove(CASES, STOPPED), ids=str)
def test_a_run_takes_the_steps_of_a_plain_loop(case, ragged_tokens, tmp_path):
    plain = plain_training(ragged_tokens, case.shape).numbers
    norms = [number for (quantity, _), number in plain.items() if quantity == "grad_norm"]
    assert min(norms) < 0.8 * CLIP_NORM < 1.2 * CLIP_NORM < max(norms), "some steps are clipped, and some are not"
    errors = differences(trained(tmp_path, ragged_tokens, case), expected(ragged_tokens, case))
    assert max(errors.values()) <= TOLERANCE, errors


LOOP, STEP, OPTIMIZER = (f"shardwright.training.{name}" for name in ("loop", "step", "optimizer"))
FORWARD = "shardwright.training.forward_backward"
ADAMW = "shardwright.training.optimizers.adamw:adamw"
TAKE, STOP, LOAD = (
    f"{LOOP}:TrainLoop._take",
    f"{LOOP}:TrainLoop._stop",
    "shardwright.training.resuming:RunCheckpoints._load",
)
SAMPLES, DUE_AFTER = "shardwright.training.sources:RunSamples", f"{LOOP}:due_after"
UPDATE, RATE, FOLLOW = f"{STEP}:Trainer.update", f"{LOOP}:learning_rate", f"{STEP}:set_learning_rate"
PASSES, VALIDATE = f"{FORWARD}:ForwardBackward.forward_backward", f"{FORWARD}:ForwardBackward.evaluation_sums"
CLIP = "max_norm / (norm + 1e-6)"
TAKEN = "result = trainer.step(batch, self.step, rate)"
DUE = "due(step, config.evaluation.every) or last"
RATE_OF_STEP = "learning_rate(self.step - skipped, config.steps, config.optimizer.lr, config.lr_schedule, config.clock)"
TAKEN_STEP = "TakenStep(step, samples, rate, result, overflowed, due_after(config, step))"
LATER_RATE = "learning_rate(step, config.steps, config.optimizer.lr, config.lr_schedule, config.clock)"
DUE_TO_LOG = "due(step, config.metrics.every) or last"
RESUMED = "RunStart(progress.step, progress.samples, path, past_stages(manifest), progress.left_out, reference)"
DATA_RANK = "self.layout.data_rank(self.rank)"


@dataclass(frozen=True)
class Bug:
    """Code changed, the quantity that has to differ from the plain loop's, and the run in which it has to."""

    mutations: list[Mutation]
    quantity: str
    case: Case = ONE


def forgotten(state: str) -> Mutation:
    """A state of the optimizer is neither saved nor loaded."""
    before = "optimizer.state.get(parameter, {}).items()"
    after = f"[(kind, tensor) for kind, tensor in {before} if kind != '{state}']"
    return Mutation("shardwright.training.checkpoint.state:named_state", before, after)


BUGS = {
    "clip_norm is not handed to the trainer": Bug(
        [Mutation("shardwright.training.run:build_trainer", "config.optimizer.clip_norm", "0.0")], "weights"
    ),
    "the norm is logged after clipping": Bug(
        [Mutation(f"{FORWARD}:ForwardBackward.clip", "return norm", "return norm.clamp(max=max_norm)")], "grad_norm"
    ),
    "gradients below clip_norm are scaled up to it": Bug(
        [Mutation(f"{FORWARD}:clip_gradients", f"({CLIP}).clamp(max=1.0)", CLIP)], "weights"
    ),
    "every rank trains on the samples of data rank 0": Bug(
        [Mutation(f"{SAMPLES}.batches", DATA_RANK, "0")], "loss", SHARDED
    ),
    "every rank evaluates the samples of data rank 0": Bug(
        [Mutation("shardwright.training.sources:split_batches", "layout.data_rank(rank)", "0")],
        "validation loss",
        SHARDED,
    ),
    "one sample less is evaluated": Bug(
        [
            Mutation(
                f"{SAMPLES}.evaluation_batches", "self.config.evaluation.samples", "self.config.evaluation.samples - 1"
            )
        ],
        "validation loss",
    ),
    "evaluation comes before the step": Bug(
        [
            Mutation(
                TAKE,
                TAKEN,
                "if (self.step + 1) % config.evaluation.every == 0 or self.step + 1 == config.steps:\n"
                f"    for hook in self.hooks:\n        hook.on_evaluation(self.step + 1)\n{TAKEN}",
            ),
            Mutation(DUE_AFTER, DUE, "False"),
        ],
        "validation loss",
        STAGES,
    ),
    "dropout is on in evaluation": Bug(
        [
            Mutation(VALIDATE, "self.model.train(False)", "self.model.train(True)"),
            Mutation(VALIDATE, "self._microbatches(batch, None)", "self._microbatches(batch, 0)"),
        ],
        "validation loss",
    ),
    "dropout stays off after an evaluation": Bug([Mutation(PASSES, "self.model.train()", "None")], "loss"),
    "the last step is not evaluated": Bug([Mutation(DUE_AFTER, DUE, DUE.removesuffix(" or last"))], "validation loss"),
    "no update in each fifth step": Bug(
        [
            Mutation(
                UPDATE,
                "self.optimizer.step()",
                "self.taken = getattr(self, 'taken', 0) + 1\nif self.taken % 5:\n    self.optimizer.step()",
            )
        ],
        "weights",
        TENSORS,
    ),
    "no update in the last step": Bug(
        [
            Mutation(
                TAKE, TAKEN, f"if self.step + 1 == config.steps:\n    trainer.optimizer.step = lambda: None\n{TAKEN}"
            )
        ],
        "weights",
    ),
    "gradients of a step are added to those of the next": Bug(
        [Mutation(UPDATE, "self.model.forget_gradients()", "None")], "grad_norm"
    ),
    "one micro-batch less is accumulated": Bug(
        [Mutation(PASSES, "self._microbatches(batch, step)", "self._microbatches(batch, step)[:-1]")], "loss"
    ),
    "only the first group of parameters follows the schedule": Bug(
        [Mutation(FOLLOW, "optimizer.param_groups", "optimizer.param_groups[:1]")], "weights"
    ),
    "the optimizer takes the rate of the step before": Bug(
        [
            Mutation(
                UPDATE,
                "set_learning_rate(self.optimizer, rate)\nself.optimizer.step()",
                "self.optimizer.step()\nset_learning_rate(self.optimizer, rate)",
            )
        ],
        "weights",
    ),
    "weight decay does not follow the schedule": Bug(
        [
            Mutation(
                FOLLOW,
                "group['lr'] = rate * group.get('lr_scale', 1.0)",
                "group['weight_decay'] *= group['lr'] / rate\ngroup['lr'] = rate",
            )
        ],
        "weights",
    ),
    "norms and biases decay": Bug(
        [Mutation(f"{OPTIMIZER}:parameter_groups", "config.weight_decay_of(row)", "config.weight_decay")], "weights"
    ),
    "weight_decay is not handed to the optimizer": Bug(
        [Mutation(f"{OPTIMIZER}:parameter_groups", "config.weight_decay_of(row)", "0.1 * row.decays")], "weights"
    ),
    "beta2 is not handed to the optimizer": Bug([Mutation(ADAMW, "options['beta2']", "0.95")], "weights"),
    "eps is not handed to the optimizer": Bug(
        [Mutation("shardwright.config.optimizer:OptimizerSection.eps_of", "self.options['eps']", "1e-8")], "weights"
    ),
    "the warm-up is a step late": Bug([Mutation(RATE, "step + 1", "step")], "lr"),
    "the cosine ends a step late": Bug(
        [Mutation(RATE, "warm, end = schedule.warmup_steps, steps - 1", "warm, end = schedule.warmup_steps, steps")],
        "lr",
    ),
    "the linear fall ends a step late": Bug(
        [Mutation(RATE, "progress(end) - progress(step)", "progress(steps) - progress(step)")], "lr", WSD
    ),
    "the rate that is logged is that of the next step": Bug(
        [Mutation(TAKE, TAKEN_STEP, TAKEN_STEP.replace("rate", LATER_RATE))], "lr"
    ),
    "the last step is not logged": Bug(
        [Mutation(DUE_AFTER, DUE_TO_LOG, DUE_TO_LOG.removesuffix(" or last"))], "loss", SPARSE
    ),
    "the step of a stop is not logged": Bug([Mutation(STOP, "not taken.due.log", "False")], "loss", SPARSE),
    "after a resume the rate is a step ahead": Bug(
        [
            Mutation(
                TAKE, RATE_OF_STEP, RATE_OF_STEP.replace("(self.step", f"(self.step + (self.step >= {STOPPED_STEPS})")
            )
        ],
        "lr",
        STOPPED,
    ),
    "after a resume a batch comes again": Bug(
        [Mutation(LOAD, "progress.samples", "progress.samples - self.config.batch.global_batch")],
        "loss",
        STOPPED,
    ),
    "after a resume a batch is left out": Bug(
        [Mutation(LOAD, "progress.samples", "progress.samples + self.config.batch.global_batch")],
        "loss",
        STOPPED,
    ),
    "after a resume the last step is taken again": Bug(
        [
            Mutation(
                LOAD,
                RESUMED,
                RESUMED.replace("step,", "step - 1,").replace("samples,", "samples - self.config.batch.global_batch,"),
            )
        ],
        "loss",
        STOPPED,
    ),
    "after a resume the keys of dropout begin anew": Bug(
        [
            Mutation(
                TAKE, TAKEN, TAKEN.replace("self.step", f"self.step - {STOPPED_STEPS} * (self.step >= {STOPPED_STEPS})")
            )
        ],
        "loss",
        STOPPED,
    ),
    "after a resume the optimizer's counters of steps begin anew": Bug([forgotten("step")], "weights", STOPPED),
    "after a resume the second moments begin anew": Bug([forgotten("exp_avg_sq")], "weights", STOPPED),
}


@pytest.mark.parametrize("name", rest_prove(BUGS, "only the first group of parameters follows the schedule"))
def test_a_bug_of_the_loop_shows_as_a_number(name, ragged_tokens, tmp_path):
    bug = BUGS[name]
    found = trained(tmp_path, ragged_tokens, bug.case, *bug.mutations)
    errors = differences(found, expected(ragged_tokens, bug.case))
    assert errors[bug.quantity] > 1e4 * TOLERANCE, errors


def test_every_bug_can_still_be_put_in():
    for bug in BUGS.values():
        with mutated(*bug.mutations):
            pass
