"""The training that a trainer is compared by, and its smaller forms in the search for the smallest that differs."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwright.config import OptimizerSection, RunConfig, flat, load, parse
from shardwright.config.reading import apply_override
from shardwright.data.samples import IGNORE
from shardwright.layout.layout import Layout
from shardwright.system.errors import InputError
from shardwright.system.units import divisors
from shardwright.verification.case import CLIPPED, RATES, Case, case_of
from shardwright.verification.cut_case import cut

UNCLIPPED, CLIPPING = "unclipped", "clipped"
"""The trainings: the first shows raw gradients, the second clips on both sides of the limit."""
RATE = 0.01
"""The largest learning rate."""


@dataclass(frozen=True)
class TrainerLayout:
    """A trainer, the degrees of its axes and its options."""

    trainer: str
    """The path of a file with a class `Trainer`, or the name of an adapter."""
    degrees: tuple[tuple[str, int], ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    is_reference: bool = False
    """Whether the trainer may leave options unread."""

    @property
    def world_size(self) -> int:
        return math.prod(degree for _, degree in self.degrees)

    def __str__(self) -> str:
        axes = [f"{axis} {degree}" for axis, degree in self.degrees if degree > 1] or ["one rank"]
        return ", ".join([*axes, *(f"{key} {value}" for key, value in self.options)])


@dataclass(frozen=True)
class TrainerCase(Case):
    """A training of a few steps that a trainer and one process have to agree on.

    `reference`: the trainer that runs in one process, on each batch as a single micro-batch. `weights`: the folder of
    the initial weights, which the reference makes if it is empty.
    """

    reference: TrainerLayout = TrainerLayout("")
    weights: str = ""
    accumulates: bool = True
    """Whether a rank's part of a batch is more than one micro-batch."""
    ragged: bool = True
    """Whether some targets are not counted."""
    clips: bool = True
    """Whether there is a second training, whose gradients are clipped."""
    changes_rate: bool = True
    """Whether the learning rate changes from step to step."""

    @property
    def trainings(self) -> tuple[str, ...]:
        return (UNCLIPPED, CLIPPING) if self.clips else (UNCLIPPED,)

    @property
    def n_records(self) -> int:
        return 1 + 2 * len(self.trainings) * self.steps

    def rate(self, training: str, step: int) -> float:
        return self.optimizer.lr * (RATES[step % len(RATES)] if self.changes_rate else 1.0)

    def clip_norm(self, training: str, step: int, norm: float = math.nan) -> float:
        if training == UNCLIPPED:
            return math.inf
        if self.clip_norms:
            return self.clip_norms[self.trainings.index(training)][step]
        return CLIPPED[step % len(CLIPPED)] * norm

    def batch(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens and targets (B, T) and sample ids (B,) of a step, as `Case.batch`; but every sequence has a
        target that is counted, so that no micro-batch divides by zero."""
        tokens_BT, targets_BT, ids_B = super().batch(step)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step + 750_011)
        drawn_BT = torch.randint(self.spec.vocab_size, targets_BT.shape, generator=generator)
        missing_BT = targets_BT == IGNORE
        if self.ragged:
            missing_BT &= missing_BT.all(1, keepdim=True) & (torch.arange(self.seq_len) == 0)
        return tokens_BT, torch.where(missing_BT, drawn_BT, targets_BT), ids_B


TrainerSetting = tuple[TrainerCase, TrainerLayout]


def switched_off(setting: TrainerSetting) -> Iterator[tuple[str, TrainerSetting]]:
    """Yield every setting with one axis, option or property of the training less than this one; axes first."""
    case, layout = setting
    for at, (axis, degree) in enumerate(layout.degrees):
        for fewer in divisors(degree)[:-1]:
            without = (*layout.degrees[:at], (axis, fewer), *layout.degrees[at + 1 :])
            name = f"{axis}={degree}" if fewer == 1 else f"{axis}={degree}, not {axis}={fewer}"
            yield name, (case, replace(layout, degrees=without))
    for option in layout.options:
        rest = tuple(each for each in layout.options if each != option)
        reference = replace(case.reference, options=rest)
        yield f"{option[0]}={option[1]}", (replace(case, reference=reference), replace(layout, options=rest))
    if case.accumulates:
        yield "accumulation", (replace(case, accumulates=False), layout)
    if case.ragged:
        yield "ragged masks", (replace(case, ragged=False), layout)
    if case.clips:
        yield "clipping", (replace(case, clips=False), layout)
    if case.changes_rate:
        yield "changing learning rates", (replace(case, changes_rate=False), layout)
    if case.steps > 1:
        yield "several steps", (replace(case, steps=1), layout)


def described(setting: TrainerSetting) -> str:
    """Return the axes, the options and the properties of the training of a setting."""
    case, layout = setting
    properties = {
        "accumulation": case.accumulates,
        "ragged masks": case.ragged,
        "clipping": case.clips,
        "changing learning rates": case.changes_rate,
        "several steps": case.steps > 1,
    }
    return ", ".join([str(layout), *(name for name, has in properties.items() if has)])


SECTIONS = ("model", "batch", "seed")
"""The sections and keys of a run file that `--set` changes; any other key is the trainer's."""


def config_of(run_file: Path | None, world_size: int, overrides: Sequence[str]) -> tuple[RunConfig, dict[str, Any]]:
    """Return the model and the batch of a run file, by default of a model of a few layers that has a head, a layer and
    sequences for each rank, and the options for the trainer. Raises InputError with all problems."""
    own = [override for override in overrides if override.partition("=")[0].strip().split(".")[0] in SECTIONS]
    options: dict[str, Any] = {}
    problems = [problem for each in overrides if each not in own for problem in apply_override(options, each)]
    if problems:
        raise InputError(*problems)
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in flat(options).items()}
    if run_file is not None:
        return load(run_file, own), options
    n_heads = max(4, world_size)
    table = {
        "out": "none",
        "steps": 1,
        "data": {"path": "none"},
        "model": {
            "n_layers": max(2, world_size),
            "d_model": 8 * n_heads,
            "n_heads": n_heads,
            "n_kv_heads": n_heads,
            "d_ffn": 16 * n_heads,
            "vocab_size": 16 * n_heads,
        },
        "batch": {"seq_len": 16, "global_batch": 4 * world_size, "micro_batch": 2},
    }
    return parse(table, own, "the model of --trainer"), options


def trainer_case(config: RunConfig, world_size: int, *, full: bool = True, **changes: Any) -> TrainerCase:
    """Return the case of a model and a batch; reduced to test size unless `full`. `changes`: of the fields of the
    case."""
    true = case_of(config)
    case = true if full else cut(true, [Layout(dp_replicate=world_size)])
    return TrainerCase(
        case.spec,
        case.seq_len,
        case.global_batch if full else 4 * world_size,
        case.micro_batch if full else 2,
        case.seed,
        OptimizerSection(lr=RATE),
        **changes,
    )
