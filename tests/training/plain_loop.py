"""A training loop in plain PyTorch, with which runs of `shardwright train` are compared, step by step."""

import functools
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import count, islice
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.config import as_toml
from shardwright.data.order import SampleOrder
from shardwright.model.init import initialise
from shardwright.model.random import sample_keys
from shardwright.model.transformer import Transformer
from shardwright.training.weights import newest_checkpoint, restore
from tests.training.runs import records
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


def write_run_file(folder: Path, tokens: Path, shape: str, logged_every: int = 1) -> Path:
    """The run file of the run that `plain_training` takes the steps of; its `out` is FOLDER/out."""
    path = folder / "run.toml"
    data = f'data = {{ path = "{tokens}", sequences = "documents" }}'
    schedule = f"lr_schedule = {SCHEDULES[shape]}\nmetrics = {{ every = {logged_every} }}"
    path.write_text(f'out = "{folder / "out"}"\n{data}\n{schedule}\n{RUN_FILE}')
    return path


def logged(run_file: Path) -> Trajectory:
    """The numbers that a run has logged, and the weights of its newest checkpoint."""
    numbers: dict[tuple[str, int], float] = {}
    for record in records(run_file):
        named = {"validation loss": "loss"} if record["kind"] == "evaluation" else {name: name for name in LOGGED}
        new = {(name, record["step"]): record[key] for name, key in named.items()}
        assert not new.keys() & numbers.keys(), f"logged twice: {record}"
        numbers |= new
    return Trajectory(numbers, weights_of(restore(newest_checkpoint(run_file.parent / "out"))))


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


@dataclass(frozen=True)
class History:
    """What happens to a run. `skipped`: the numbers of the steps whose update is left out; `left_out`: the running
    samples that no step has; `before`: the steps of an earlier run, from whose weights and optimizer states it begins.
    """

    skipped: frozenset[int] = frozenset()
    left_out: range = range(0)
    before: int = 0

    def samples(self) -> Iterator[int]:
        """The running samples in the order in which steps take them."""
        return (number for number in count() if number not in self.left_out)


UNDISTURBED = History()


@functools.cache
def plain_training(tokens: Path, shape: str, history: History = UNDISTURBED) -> Trajectory:
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

    def take_step(step: int, ids_B: np.ndarray, rate: float, skips: bool) -> dict[tuple[str, int], float]:
        tokens_BT, targets_BT = inputs[order(ids_B)], targets[order(ids_B)]
        model.train()
        keys_B = sample_keys(SEED, step - 1, torch.from_numpy(ids_B))
        loss = F.cross_entropy(model(tokens_BT, random_keys_B=keys_B).flatten(0, 1), targets_BT.flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        for group in optimizer.param_groups:
            group["lr"] = rate
        if not skips:
            optimizer.step()
        n_targets = int((targets_BT != -100).sum())
        numbers = {"loss": loss.item(), "grad_norm": norm.item(), "lr": rate, "target_tokens": n_targets}
        return {(name, step): value for name, value in numbers.items()}

    for step in range(1, history.before + 1):
        take_step(step, np.arange((step - 1) * GLOBAL_BATCH, step * GLOBAL_BATCH), plain_rate(step, shape), False)
    numbers: dict[tuple[str, int], float] = {}
    samples, n_skipped = history.samples(), 0
    for step in range(STEPS + 1):
        if step > 0:
            skips = step in history.skipped
            ids_B = np.array([*islice(samples, GLOBAL_BATCH)])
            numbers |= take_step(step, ids_B, plain_rate(step - n_skipped, shape), skips)
            n_skipped += skips
        if step % EVALUATED_EVERY == 0 or step == STEPS:
            model.eval()
            with torch.no_grad():
                logits_BTV = model(validation[0])
            numbers["validation loss", step] = F.cross_entropy(logits_BTV.flatten(0, 1), validation[1].flatten()).item()
    return Trajectory(numbers, weights_of(model))


def weights_of(model: Transformer) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}
