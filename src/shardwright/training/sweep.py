"""Runs of one run file over a grid of values: their configurations, their results, and a power law of loss by FLOPs."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import curve_fit
from scipy.stats import t as student

from shardwright.config import RunConfig, load
from shardwright.config.reading import keys_named
from shardwright.hugging_face.files import shortened
from shardwright.runs.folder import CHECKPOINTS, METRICS, checkpoint_name, published
from shardwright.runs.records import EvaluationRecord, TrainRecord, read_metrics
from shardwright.system.errors import ConfigError, InputError
from shardwright.training.kept import changes_of_run

MOST_POINTS = 1000
CONFIDENCE = 0.9
"""Of the intervals of a fit."""
LEAST_FOR_FLOOR = 5
"""Fewest values of C with which c is fitted; three parameters then leave two degrees of freedom."""


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep: the values of its keys, as they are written, and its configuration."""

    values: Mapping[str, str]
    config: RunConfig

    @property
    def out(self) -> Path:
        """The folder of the run."""
        return Path(self.config.out)

    @property
    def in_words(self) -> str:
        """The values, such as `optimizer.lr=1e-3, seed=2`."""
        return ", ".join(f"{key}={value}" for key, value in self.values.items())

    @property
    def flops(self) -> float:
        """The model FLOPs of the whole run."""
        spec, schedule = self.config.spec(), self.config.batch.schedule
        ends = [stage.from_step for stage in schedule.stages[1:]] + [self.config.steps]
        tokens = [schedule.tokens(min(end, self.config.steps)) for end in ends]
        per_token = [spec.train_flops_per_token(stage.seq_len) for stage in schedule.stages]
        return sum((n - before) * flops for n, before, flops in zip(tokens, [0, *tokens], per_token, strict=False))

    @property
    def ended(self) -> bool:
        """Return whether the checkpoint after the last step is there."""
        last = checkpoint_name(self.config.steps)
        return any(saved.name == last for saved in published(self.out / CHECKPOINTS))

    @cached_property
    def loss(self) -> float | None:
        """The last validation loss of an ended run, or without evaluations its last training loss; None if the run has
        not ended, or diverged. Read from its records once, after the sweep."""
        if not self.ended:
            return None
        records = [*read_metrics(self.out / METRICS)]
        of_kinds = [
            [record.loss for record in records if isinstance(record, kind)] for kind in (EvaluationRecord, TrainRecord)
        ]
        losses = next((values for values in of_kinds if values), [math.nan])
        return losses[-1] if math.isfinite(losses[-1]) else None


def parse_grid(options: Sequence[str]) -> dict[str, list[str]]:
    """Return the values of each key from options such as `lr=1e-3,3e-3`. A key without its section is the one key of
    that name. Raises InputError with every problem."""
    grid: dict[str, list[str]] = {}
    problems: list[str] = []
    for option in options:
        name, equals, text = option.partition("=")
        values = [value.strip() for value in text.split(",")]
        if not equals or not all(values):
            problems.append(f"--grid {option}: write key=value,value, such as optimizer.lr=1e-3,3e-3")
            continue
        keys = [name] if "." in name else keys_named(name)
        if len(keys) != 1:
            known = f"it is one of {', '.join(keys)}" if keys else "there is no such key of the run file"
            problems.append(f"--grid {option}: {known}; write the key with its section, such as optimizer.lr")
            continue
        if keys[0] in grid or len(set(values)) < len(values):
            problems.append(f"--grid {option}: the key or a value is given twice; give each once")
        if keys[0] in ("out", "extensions"):
            problems.append(f"--grid {option}: every run has an out of its own, below --out; leave it out")
        grid[keys[0]] = values
    if not options:
        problems.append("--grid is missing; give a key and its values, such as --grid optimizer.lr=1e-3,3e-3")
    n_runs = math.prod(map(len, grid.values()))
    if n_runs > MOST_POINTS:
        problems.append(f"--grid has {n_runs:,} runs; at most {MOST_POINTS:,} are possible")
    if problems:
        raise InputError(*problems)
    return grid


def sweep_runs(
    run_file: Path, overrides: Sequence[str], grid: Mapping[str, Sequence[str]], out: Path
) -> list[SweepRun]:
    """Return the runs of a grid, the values of its last key varying fastest, each with a folder of its own in `out`.
    Raises ConfigError with the problems of every run that cannot be started, and InputError if two runs have one
    folder, or if a folder holds a run of another configuration."""
    runs, problems = [], []
    for chosen in product(*grid.values()):
        values = dict(zip(grid, chosen, strict=True))
        changes = [f"{key}={value}" for key, value in values.items()]
        folder = out / "_".join(f"{key.rpartition('.')[2]}-{value}" for key, value in values.items()).replace("/", "-")
        try:
            kept = [*overrides, *changes, f"out={folder}", 'checkpoint.resume="auto"']
            runs.append(SweepRun(values, load(run_file, kept, started=True)))
        except ConfigError as error:
            problems += [problem for problem in error.problems if problem not in problems]
    if problems:
        raise ConfigError(*problems)
    if problems := [*_folder_problems(runs)]:
        raise InputError(*shortened(problems))
    return runs


def _folder_problems(runs: Sequence[SweepRun]) -> Iterator[str]:
    """Yield why runs cannot have their folders."""
    of_folders: dict[Path, SweepRun] = {}
    for run in runs:
        other = of_folders.setdefault(run.out, run)
        if other is not run:
            yield (
                f"{run.out} would be the folder of {other.in_words} and of {run.in_words}, because / is written as - "
                "in the name of a folder; sweep them one after another, each with an --out of its own"
            )
        elif changed := changes_of_run(run.config):
            yield f"{run.out} holds a run of another configuration: {', '.join(changed)}; give another --out"


@dataclass(frozen=True)
class PowerLaw:
    """L = a C^-b + c with C in FLOPs, and intervals of the confidence `CONFIDENCE`: b, and L at each C of `band`."""

    a: float
    b: float
    c: float
    b_interval: tuple[float, float]
    band: tuple[tuple[float, float, float, float], ...]
    """(C, L, lowest L, highest L)."""


def best_by_flops(runs: Sequence[SweepRun]) -> dict[float, float]:
    """Return the lowest loss of the ended runs of each number of FLOPs."""
    best: dict[float, float] = {}
    for run in runs:
        if (loss := run.loss) is not None:
            best[run.flops] = min(loss, best.get(run.flops, math.inf))
    return dict(sorted(best.items()))


def fit_power_law(best: Mapping[float, float]) -> PowerLaw | None:
    """Return the power law of the lowest loss by FLOPs, by least squares of log L; c is 0 with fewer than
    `LEAST_FOR_FLOOR` values of C, or where that fits no worse. None for fewer than three values.

    Intervals are by Student's t from the covariance of the parameters, linear in them.
    """
    if len(best) < 3:
        return None
    flops, losses = (np.array(values, float) for values in (list(best), list(best.values())))
    middle = float(np.exp(np.log(flops).mean()))
    x, y = np.log(flops / middle), np.log(losses)

    def log_loss(x: Any, log_a: float, b: float, c: float = 0.0) -> Any:
        return np.log(np.exp(log_a - b * x) + c)

    slope, level = np.polyfit(x, y, 1)
    parameters, covariance = curve_fit(lambda x, log_a, b: log_loss(x, log_a, b), x, y, p0=(level, -slope))
    if len(best) >= LEAST_FOR_FLOOR:
        start = (math.log(max(1e-9, losses.max() - 0.9 * losses.min())), -2 * slope, 0.9 * losses.min())
        bounds = ((-math.inf, -math.inf, 0.0), (math.inf, math.inf, losses.min()))
        try:
            with_floor = curve_fit(log_loss, x, y, p0=start, bounds=bounds, maxfev=20000)
        except RuntimeError:  # no minimum was found
            with_floor = None
        if with_floor is not None and with_floor[0][2] > 0 and np.isfinite(with_floor[1]).all():
            parameters, covariance = with_floor
    free = len(best) - len(parameters)
    multiple = float(student.ppf((1 + CONFIDENCE) / 2, free))
    b, b_error = float(parameters[1]), math.sqrt(covariance[1, 1])
    band = []
    for value in np.linspace(x.min(), x.max(), 50):
        central = float(log_loss(value, *parameters))
        step = 1e-6
        slopes = [
            (log_loss(value, *(p + step * (i == j) for j, p in enumerate(parameters))) - central) / step
            for i in range(len(parameters))
        ]
        error = multiple * math.sqrt(max(0.0, float(np.array(slopes) @ covariance @ np.array(slopes))))
        low, fitted, high = (math.exp(central + sign * error) for sign in (-1, 0, 1))
        band.append((middle * math.exp(value), fitted, low, high))
    a = math.exp(float(parameters[0])) * middle**b
    c = float(parameters[2]) if len(parameters) == 3 else 0.0
    return PowerLaw(a, b, c, (b - multiple * b_error, b + multiple * b_error), tuple(band))
