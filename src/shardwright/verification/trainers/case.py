"""The training that a trainer is compared by, and its smaller forms in the search for the smallest that differs."""

import math
from collections.abc import Collection, Iterator, Sequence
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
from shardwright.verification.cut_case import cut, cut_spec, size_like

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
        rest = tuple(other for other in layout.options if other != option)
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
    """Return the model and the batch of a run file, by default of a model of a few layers whose sizes are multiples of
    the number of ranks, and the options for the trainer. Raises InputError with all problems."""
    own = [override for override in overrides if override.partition("=")[0].strip().split(".")[0] in SECTIONS]
    options: dict[str, Any] = {}
    problems = [
        problem for override in overrides if override not in own for problem in apply_override(options, override)
    ]
    if problems:
        raise InputError(*problems)
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in flat(options).items()}
    if run_file is not None:
        return load(run_file, own), options
    n_heads = _multiple_of(world_size, 4)
    table = {
        "out": "none",
        "steps": 1,
        "data": {"path": "none"},
        "model": {
            "n_layers": _multiple_of(world_size, 2),
            "d_model": 8 * n_heads,
            "n_heads": n_heads,
            "n_kv_heads": n_heads,
            "d_ffn": 16 * n_heads,
            "vocab_size": 16 * n_heads,
        },
        "batch": {"seq_len": _multiple_of(2 * world_size, 16), "global_batch": 4 * world_size, "micro_batch": 2},
    }
    return parse(table, own, "the model of --trainer"), options


def _multiple_of(factor: int, least: int) -> int:
    """Return the smallest multiple of `factor` from `least` on."""
    return -(-least // factor) * factor


def trainer_case(
    config: RunConfig, world_size: int, kept: Collection[str] | None = None, **changes: Any
) -> TrainerCase:
    """Return the case of a model and a batch. `kept`: None, or all keys of the run file that are not reduced to test
    size. `changes`: fields of the case."""
    case = true = case_of(config)
    if kept is not None:
        case = _cut_for_axes(true, world_size)
        micro_batch = true.micro_batch if "batch.micro_batch" in kept else case.micro_batch
        case = replace(
            case,
            seq_len=true.seq_len if "batch.seq_len" in kept else case.seq_len,
            micro_batch=micro_batch,
            global_batch=true.global_batch if "batch.global_batch" in kept else 2 * micro_batch * world_size,
        )
    spec = replace(case.spec, max_seq_len=max(case.spec.max_seq_len, case.seq_len))
    return TrainerCase(
        spec, case.seq_len, case.global_batch, case.micro_batch, case.seed, OptimizerSection(lr=RATE), **changes
    )


def _cut_for_axes(true: Case, world_size: int) -> Case:
    """Return the case at test size. Each size, also the layers and the vocabulary, has the divisors up to `world_size`
    of the true size, because an axis of a trainer may partition any of them into equal parts."""
    case = cut(true, [Layout(dp_replicate=world_size)])
    spec = cut_spec(true.spec, world_size, size_like(true.spec.n_layers, max(2, world_size), world_size))
    vocab_size = size_like(true.spec.vocab_size, case.spec.vocab_size, world_size)
    return replace(case, spec=replace(spec, vocab_size=vocab_size, max_seq_len=case.seq_len))
