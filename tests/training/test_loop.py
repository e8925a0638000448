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
from shardwright.training.sample import newest_checkpoint, restore
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
STOPPED_IN = 4  # a signal that comes in this step, counted from 0, ends the run when two more have been taken
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
metrics = {{ every = 1 }}
evaluation = {{ every = {EVALUATED_EVERY}, samples = {EVALUATED_SAMPLES} }}
"""
SCHEDULES = {
    "cosine": f'{{ shape = "cosine", warmup_steps = {WARMUP}, final_fraction = {FINAL_FRACTION} }}',
    "wsd": f'{{ shape = "wsd", warmup_steps = {WARMUP}, decay_steps = {DECAY}, final_fraction = {FINAL_FRACTION} }}',
}


@dataclass(frozen=True)
class Trajectory:
    """The numbers of a training by (quantity, steps taken), and the weights after its last step."""

    numbers: dict[tuple[str, int], float]
    weights: dict[str, Tensor]


def differences(found: Trajectory, expected: Trajectory) -> dict[str, float]:
    """By quantity the largest relative error of its numbers, infinite where only one side has a number; of the weights
    the largest difference of two elements, which are about 0.1."""
    errors = dict.fromkeys([quantity for quantity, _ in expected.numbers], 0.0)
    for key in found.numbers.keys() | expected.numbers.keys():
        here, there = (side.numbers.get(key, math.inf) for side in (found, expected))
        error = abs(here - there) / abs(there) if math.isfinite(here) and math.isfinite(there) else math.inf
        errors[key[0]] = max(errors[key[0]], error)
    assert found.weights.keys() == expected.weights.keys()
    pairs = [(found.weights[name], weight) for name, weight in expected.weights.items()]
    return errors | {"weights": max(float((here - there).abs().max()) for here, there in pairs)}


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
    """Put bugs into the code of this rank; if `stopped`, rank 0 gets SIGTERM in step STOPPED_IN."""
    from shardwright.training.step import Trainer

    STAYING.enter_context(mutated(*bugs))
    step = Trainer.step

    def signalled(self, batch, number, rate):
        if stopped and rank == 0 and number == STOPPED_IN:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, batch, number, rate)

    Trainer.step = signalled


def trained(folder: Path, tokens: Path, shape: str, layouts: tuple[str, ...], *bugs: Mutation) -> Trajectory:
    """What `shardwright train` comes to on the first of `layouts`; with a second one it is stopped by a signal after
    STOPPED_IN + 2 steps, and resumed there. Fails if a run fails."""
    run_file = folder / "run.toml"
    data = f'data = {{ path = "{tokens}", sequences = "documents" }}'
    run_file.write_text(f'out = "{folder / "out"}"\n{data}\nlr_schedule = {SCHEDULES[shape]}\n{RUN_FILE}')
    for number, layout in enumerate(layouts):
        settings = [argument for key in layout.split() for argument in ("--set", f"layout.{key}")]
        stopped = number + 1 < len(layouts)
        fault = functools.partial(disturb, bugs, stopped)
        train(run_file, *settings, *["--resume"] * number, fault=fault, expect=os.EX_TEMPFAIL if stopped else 0)
        steps = STOPPED_IN + 2 if stopped else STEPS
        assert checkpoints(run_file)[-1] == f"step-{steps:08d}"
    numbers: dict[tuple[str, int], float] = {}
    for record in records(run_file):
        named = {"validation loss": "loss"} if record["kind"] == "evaluation" else {name: name for name in LOGGED}
        new = {(name, record["step"]): record[key] for name, key in named.items()}
        assert not new.keys() & numbers.keys(), f"logged twice: {record}"
        numbers |= new
    return Trajectory(numbers, weights_of(restore(newest_checkpoint(folder / "out"))))


CASES = [
    ("cosine", ("",)),
    ("wsd", ("", "")),
    ("cosine", ("", "")),
    ("cosine", ("dp_shard=2 zero=3", "dp_shard=2 zero=3")),
    ("wsd", ("tp=2", "tp=2")),
    ("cosine", ("pp=2", "pp=2")),
    ("wsd", ("pp=2", "dp_replicate=2 tp=2")),
]


@pytest.mark.parametrize(("shape", "layouts"), rest_prove(CASES, CASES[1]), ids=str)
def test_a_run_takes_the_steps_of_a_plain_loop(shape, layouts, tokens, tmp_path):
    expected = plain_training(tokens, shape)
    norms = [number for (quantity, _), number in expected.numbers.items() if quantity == "grad_norm"]
    assert min(norms) < 0.8 * CLIP_NORM < 1.2 * CLIP_NORM < max(norms), "some steps are clipped and some are not"
    found = differences(trained(tmp_path, tokens, shape, layouts), expected)
    assert max(found.values()) <= TOLERANCE, found
