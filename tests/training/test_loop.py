"""Proves that `shardwright train` takes the steps of a plain PyTorch loop, in one process, in layouts and after a stop.

Runs of the command (runs.py) are compared with `plain_training`, which is written here: loss, gradient norm, learning
rate and target tokens of each step, the validation loss wherever it is due, and the weights of the last checkpoint, in
float64. Bugs of a training loop, put into the code of the ranks, have to show as a difference of those numbers.
"""

import functools
import json
import math
import os
import signal
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.config import as_toml
from shardwright.data import prepare as module
from shardwright.data.order import SampleOrder
from shardwright.data.prepare import prepare
from shardwright.model.init import initialise
from shardwright.model.random import sample_keys
from shardwright.model.transformer import Transformer
from shardwright.training.checkpoint.whole import newest_checkpoint, restore
from tests.marks import rest_prove
from tests.mutation import Mutation, mutated
from tests.training.runs import checkpoints, records, train
from tests.training.worlds import SPEC

MODEL = replace(
    SPEC,
    d_model=16,
    n_heads=2,
    n_kv_heads=2,
    d_ffn=24,
    vocab_size=300,
    norm="layernorm",
    positions="learned",
    bias=True,
    dropout=0.1,
    init_std=0.2,
)
STEPS, SEED, SEQ_LEN, GLOBAL_BATCH = 11, 3, 16, 8
LR, WEIGHT_DECAY, BETA1, BETA2, EPS, CLIP_NORM = 0.02, 0.3, 0.85, 0.97, 1e-7, 1.0
WARMUP, DECAY, FINAL_FRACTION = 3, 6, 0.1
EVALUATED_EVERY, EVALUATED_SAMPLES = 4, 7
STOPPED_STEPS = 6
TOLERANCE = 1e-10
LOGGED = ("loss", "grad_norm", "lr", "target_tokens")

RUN_FILE = f"""
steps = {STEPS}
seed = {SEED}
device = "cpu"
model = {as_toml({key: value for key, value in asdict(MODEL).items() if value is not None})}
batch = {{ seq_len = {SEQ_LEN}, global_batch = {GLOBAL_BATCH}, micro_batch = 2 }}
optimizer = {{ lr = {LR}, weight_decay = {WEIGHT_DECAY}, clip_norm = {CLIP_NORM}, beta1 = {BETA1}, beta2 = {BETA2}, \
eps = {EPS} }}
precision = {{ compute = "fp64" }}
evaluation = {{ every = {EVALUATED_EVERY}, samples = {EVALUATED_SAMPLES} }}
"""
SCHEDULES = {
    "cosine": f'{{ shape = "cosine", warmup_steps = {WARMUP}, final_fraction = {FINAL_FRACTION} }}',
    "wsd": f'{{ shape = "wsd", warmup_steps = {WARMUP}, decay_steps = {DECAY}, final_fraction = {FINAL_FRACTION} }}',
}


@dataclass(frozen=True)
class Case:
    """A run: its layout, and another in which it is resumed if it is to be stopped; the shape of its learning rate; the
    steps between logged lines."""

    layouts: tuple[str, ...] = ("",)
    shape: str = "cosine"
    logged_every: int = 1

    def __str__(self) -> str:
        return ", then ".join(layout or "one process" for layout in self.layouts) + f": {self.shape}"


@dataclass(frozen=True)
class Trajectory:
    """The numbers of a training by (quantity, steps taken), and the weights after its last step."""

    numbers: dict[tuple[str, int], float]
    weights: dict[str, Tensor]


def differences(found: Trajectory, expected: Trajectory) -> dict[str, float]:
    """By quantity the largest relative error of its numbers, infinite where only one side has a finite number; of the
    weights the largest difference of two elements, which are about 0.1."""
    errors = dict.fromkeys([quantity for quantity, _ in expected.numbers], 0.0)
    for key in found.numbers.keys() | expected.numbers.keys():
        here, there = (side.numbers.get(key, math.inf) for side in (found, expected))
        error = abs(here - there) / abs(there) if math.isfinite(here) and math.isfinite(there) else math.inf
        errors[key[0]] = max(errors[key[0]], error)
    assert found.weights.keys() == expected.weights.keys()
    apart = [(found.weights[name] - weight).abs().max() for name, weight in expected.weights.items()]
    return errors | {"weights": float(torch.stack(apart).nan_to_num(math.inf).max())}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token shards, with a validation split, of documents of different lengths: the lines of a source file."""
    folder = tmp_path_factory.mktemp("ragged")
    lines = Path(module.__file__).read_text().splitlines()
    (folder / "lines.jsonl").write_text("".join(json.dumps({"text": line * 2}) + "\n" for line in lines))
    prepare(folder / "lines.jsonl", folder / "tokens", vocab_size=300, validation=0.2)
    return folder / "tokens"


def plain_samples(tokens: Path, split: str) -> tuple[Tensor, Tensor]:
    """Inputs and targets of all samples, (samples, T): each document is cut every SEQ_LEN predictions; targets that
    fill up the last sample of a document are -100."""
    ids = np.fromfile(tokens / f"{split}-00000.bin", "<u2").astype(np.int64)
    starts = np.fromfile(tokens / f"{split}-00000.idx", "<u8").astype(np.int64)
    inputs, targets = [], []
    for document in np.split(ids, starts[1:]):
        for first in range(0, len(document) - 1, SEQ_LEN):
            piece = torch.from_numpy(document[first : first + SEQ_LEN + 1])
            n_missing = SEQ_LEN + 1 - len(piece)
            inputs.append(F.pad(piece[:-1], (0, n_missing)))
            targets.append(F.pad(piece[1:], (0, n_missing), value=-100))
    return torch.stack(inputs), torch.stack(targets)


def plain_rate(step: int, shape: str) -> float:
    """The learning rate of step number `step`, counted from 1."""
    if step <= WARMUP:
        return LR * step / WARMUP
    if shape == "cosine":
        angle = math.pi * (step - 1 - WARMUP) / (STEPS - 1 - WARMUP)
        return LR * (FINAL_FRACTION + (1 - FINAL_FRACTION) * (1 + math.cos(angle)) / 2)
    return LR * (1 - (1 - FINAL_FRACTION) * max(0.0, 1 - (STEPS - step) / DECAY))


@functools.cache
def plain_training(tokens: Path, shape: str) -> Trajectory:
    """A training loop in plain PyTorch. Of ours are the model, its initial values, the random keys of its dropout and
    the order of the samples."""
    model = Transformer(MODEL).double()
    initialise(model, MODEL, SEED)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() == 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(BETA1, BETA2), eps=EPS)
    inputs, targets = plain_samples(tokens, "train")
    order = SampleOrder(SEED, len(inputs))
    validation = [
        side[np.arange(EVALUATED_SAMPLES) * len(side) // EVALUATED_SAMPLES]
        for side in plain_samples(tokens, "validation")
    ]
    numbers: dict[tuple[str, int], float] = {}
    for step in range(STEPS + 1):
        if step > 0:
            ids_B = np.arange((step - 1) * GLOBAL_BATCH, step * GLOBAL_BATCH)
            tokens_BT, targets_BT = inputs[order(ids_B)], targets[order(ids_B)]
            model.train()
            keys_B = sample_keys(SEED, step - 1, torch.from_numpy(ids_B))
            loss = F.cross_entropy(model(tokens_BT, random_keys_B=keys_B).flatten(0, 1), targets_BT.flatten())
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
            for group in optimizer.param_groups:
                group["lr"] = plain_rate(step, shape)
            optimizer.step()
            numbers |= {("loss", step): loss.item(), ("grad_norm", step): norm.item()}
            numbers |= {("lr", step): plain_rate(step, shape), ("target_tokens", step): int((targets_BT != -100).sum())}
        if step % EVALUATED_EVERY == 0 or step == STEPS:
            model.eval()
            with torch.no_grad():
                logits_BTV = model(validation[0])
            numbers["validation loss", step] = F.cross_entropy(logits_BTV.flatten(0, 1), validation[1].flatten()).item()
    return Trajectory(numbers, weights_of(model))


def weights_of(model: Transformer) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


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
    run_file = folder / "run.toml"
    data = f'data = {{ path = "{tokens}", sequences = "documents" }}'
    schedule = f"lr_schedule = {SCHEDULES[case.shape]}\nmetrics = {{ every = {case.logged_every} }}"
    run_file.write_text(f'out = "{folder / "out"}"\n{data}\n{schedule}\n{RUN_FILE}')
    for number, layout in enumerate(case.layouts):
        settings = [argument for key in layout.split() for argument in ("--set", f"layout.{key}")]
        stopped = number + 1 < len(case.layouts)
        fault = functools.partial(disturb, bugs, stopped)
        train(run_file, *settings, *["--resume"] * number, fault=fault, expect=os.EX_TEMPFAIL if stopped else 0)
        assert checkpoints(run_file)[-1] == f"step-{STOPPED_STEPS if stopped else STEPS:08d}"
    numbers: dict[tuple[str, int], float] = {}
    for record in records(run_file):
        named = {"validation loss": "loss"} if record["kind"] == "evaluation" else {name: name for name in LOGGED}
        new = {(name, record["step"]): record[key] for name, key in named.items()}
        assert not new.keys() & numbers.keys(), f"logged twice: {record}"
        numbers |= new
    return Trajectory(numbers, weights_of(restore(newest_checkpoint(folder / "out"))))


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
def test_a_run_takes_the_steps_of_a_plain_loop(case, tokens, tmp_path):
    plain = plain_training(tokens, case.shape).numbers
    norms = [number for (quantity, _), number in plain.items() if quantity == "grad_norm"]
    assert min(norms) < 0.8 * CLIP_NORM < 1.2 * CLIP_NORM < max(norms), "some steps are clipped, and some are not"
    errors = differences(trained(tmp_path, tokens, case), expected(tokens, case))
    assert max(errors.values()) <= TOLERANCE, errors


LOOP, STEP, OPTIMIZER = (f"shardwright.training.{name}" for name in ("loop", "step", "optimizer"))
ADAMW = "shardwright.training.optimizers.adamw:adamw"
TAKE, EVALUATE, LOG = (f"{LOOP}:_Run.{name}" for name in ("_steps", "_evaluate", "_log"))
UPDATE, RATE, FOLLOW = f"{STEP}:Trainer.update", f"{LOOP}:learning_rate", f"{STEP}:set_learning_rate"
PASSES, VALIDATE = f"{STEP}:ForwardBackward.forward_backward", f"{STEP}:ForwardBackward.evaluation_sums"
CLIP = "max_norm / (norm + 1e-6)"
TAKEN = "result = trainer.step(batch, step, rate)"
DUE = "due(step, config.evaluation.every) or last"
RATE_OF_STEP = "learning_rate(step - skipped, config.steps, config.optimizer.lr, config.lr_schedule)"
DATA_RANK = "self.layout.data_rank(self.place.rank)"


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
        [Mutation(f"{LOOP}:build_trainer", "config.optimizer.clip_norm", "0.0")], "weights"
    ),
    "the norm is logged after clipping": Bug(
        [Mutation(f"{STEP}:ForwardBackward.clip", "return norm", "return norm.clamp(max=max_norm)")], "grad_norm"
    ),
    "gradients below clip_norm are scaled up to it": Bug(
        [Mutation(f"{STEP}:clip_gradients", f"({CLIP}).clamp(max=1.0)", CLIP)], "weights"
    ),
    "every rank trains on the samples of data rank 0": Bug(
        [Mutation(f"{LOOP}:_Run._batches", DATA_RANK, "0")], "loss", SHARDED
    ),
    "every rank evaluates the samples of data rank 0": Bug(
        [Mutation(EVALUATE, DATA_RANK, "0")], "validation loss", SHARDED
    ),
    "one sample less is evaluated": Bug(
        [Mutation(EVALUATE, "config.evaluation.samples", "config.evaluation.samples - 1")], "validation loss"
    ),
    "evaluation comes before the step": Bug(
        [
            Mutation(
                TAKE,
                TAKEN,
                "if due(step + 1, config.evaluation.every) or step + 1 == config.steps:\n"
                f"    self._evaluate(step + 1, writers, screen)\n{TAKEN}",
            ),
            Mutation(TAKE, DUE, "False"),
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
    "the last step is not evaluated": Bug([Mutation(TAKE, DUE, DUE.removesuffix(" or last"))], "validation loss"),
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
        [Mutation(TAKE, TAKEN, f"if step + 1 == config.steps:\n    trainer.optimizer.step = lambda: None\n{TAKEN}")],
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
    "eps is not handed to the optimizer": Bug([Mutation(ADAMW, "options['eps']", "1e-8")], "weights"),
    "the warm-up is a step late": Bug([Mutation(RATE, "step + 1", "step")], "lr"),
    "the cosine ends a step late": Bug(
        [Mutation(RATE, "steps - 1 - schedule.warmup_steps", "steps - schedule.warmup_steps")], "lr"
    ),
    "the linear fall ends a step late": Bug([Mutation(RATE, "steps - 1 - step", "steps - step")], "lr", WSD),
    "the rate that is logged is that of the next step": Bug(
        [Mutation(LOG, "rate", RATE_OF_STEP.replace("config", "self.config").replace(" - skipped", ""))], "lr"
    ),
    "the last step is not logged": Bug(
        [Mutation(TAKE, "step % config.metrics.every == 0 or last", "step % config.metrics.every == 0")], "loss", SPARSE
    ),
    "the step of a stop is not logged": Bug([Mutation(TAKE, "logged < step", "False")], "loss", SPARSE),
    "after a resume the rate is a step ahead": Bug(
        [Mutation(TAKE, RATE_OF_STEP, RATE_OF_STEP.replace("(step", "(step + (start.step > 0)"))], "lr", STOPPED
    ),
    "after a resume a batch comes again": Bug(
        [Mutation(f"{LOOP}:_Run._load", "progress.samples", "progress.samples - self.config.batch.global_batch")],
        "loss",
        STOPPED,
    ),
    "after a resume a batch is left out": Bug(
        [Mutation(f"{LOOP}:_Run._load", "progress.samples", "progress.samples + self.config.batch.global_batch")],
        "loss",
        STOPPED,
    ),
    "after a resume the last step is taken again": Bug(
        [
            Mutation(
                f"{LOOP}:_Run._load",
                "Start(progress.step, progress.samples, path, past)",
                "Start(progress.step - 1, progress.samples - self.config.batch.global_batch, path, past)",
            )
        ],
        "loss",
        STOPPED,
    ),
    "after a resume the keys of dropout begin anew": Bug(
        [Mutation(TAKE, TAKEN, TAKEN.replace("step, rate", "step - start.step, rate"))], "loss", STOPPED
    ),
    "after a resume the optimizer's counters of steps begin anew": Bug([forgotten("step")], "weights", STOPPED),
    "after a resume the second moments begin anew": Bug([forgotten("exp_avg_sq")], "weights", STOPPED),
}


@pytest.mark.parametrize("name", rest_prove(BUGS, "only the first group of parameters follows the schedule"))
def test_a_bug_of_the_loop_shows_as_a_number(name, tokens, tmp_path):
    bug = BUGS[name]
    found = trained(tmp_path, tokens, bug.case, *bug.mutations)
    errors = differences(found, expected(tokens, bug.case))
    assert errors[bug.quantity] > 1e4 * TOLERANCE, errors


def test_every_bug_can_still_be_put_in():
    for bug in BUGS.values():
        with mutated(*bug.mutations):
            pass
