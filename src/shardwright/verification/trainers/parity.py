"""Runs a user's trainer and its reference, and compares their traces with the mechanisms of `verify`."""

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardwright.system.errors import InputError, ShardwrightError, checked_call
from shardwright.system.forks import temporary_folder
from shardwright.system.units import counted, divisors
from shardwright.verification import compare
from shardwright.verification.case import Case
from shardwright.verification.compare import RankedLayout, Report, ReportRow
from shardwright.verification.ranks import run_ranks
from shardwright.verification.tolerance import Tolerance, with_adams_noise
from shardwright.verification.trace import Trace
from shardwright.verification.trainers.adapter import axes_of, invalid_degrees, resolved
from shardwright.verification.trainers.case import (
    TrainerCase,
    TrainerLayout,
    TrainerSetting,
    config_of,
    described,
    switched_off,
    trainer_case,
)
from shardwright.verification.trainers.rank import train_rank
from shardwright.verification.verifier import TIMEOUT_S, Verifier, smallest


def layouts_of(
    trainer: str, world_size: int, options: Mapping[str, object], timeout_s: float = TIMEOUT_S, every: bool = False
) -> list[TrainerLayout]:
    """Return a trainer with the degrees of its axes, which `options` may name, and its other options.

    The first axis without a degree has all ranks that are left; with `every`, there is a layout for each way to
    distribute these ranks over the axes without a degree. Raises InputError if degrees do not divide the ranks or the
    trainer cannot be imported.
    """
    axes = run_ranks(axes_of, 1, trainer, timeout_s=timeout_s)[0]
    degrees: dict[str, int] = {}
    left = world_size
    for axis in (axis for axis in axes if axis in options):
        degree = options[axis]
        if not isinstance(degree, int) or degree < 1 or left % degree:
            valid = ", ".join(map(str, divisors(left)))
            raise InputError(f"{axis}={degree} does not divide {left} ranks; valid: {valid}")
        degrees[axis] = degree
        left //= degree
    free = [axis for axis in axes if axis not in options]
    if left > 1 and not free:
        raise InputError(
            f"{', '.join(f'{axis}={degree}' for axis, degree in degrees.items())} are {world_size // left} ranks, and "
            f"there are {world_size}; leave an axis out, or take {world_size // left} ranks"
        )
    rest = tuple((key, value) for key, value in options.items() if key not in axes)
    products = list(factorisations(left, len(free)))
    return [
        TrainerLayout(
            trainer, tuple((axis, {**degrees, **dict(zip(free, product, strict=True))}[axis]) for axis in axes), rest
        )
        for product in (products if every else products[:1])
    ]


def factorisations(n: int, n_factors: int) -> Iterator[tuple[int, ...]]:
    """Yield all ordered products of `n_factors` numbers that are n, the largest first factor first."""
    if n_factors == 0:
        yield ()
        return
    for first in reversed(divisors(n)) if n_factors > 1 else [n]:
        for rest in factorisations(n // first, n_factors - 1):
            yield first, *rest


_IGNORED = {
    "clip_norm": "clipping, since the trainer never reads batch.clip_norm",
    "lr": "learning rates, since the trainer never reads batch.lr",
}


class TrainerVerifier(Verifier):
    """Compares trainers with one process, and keeps the traces of references. Use it in a `with`."""

    def check_reference(self, case: TrainerCase) -> None:
        """Raise InputError if two runs of the reference differ."""
        expected = self._exact(case)
        exact = replace(case, dtype="float64", accumulates=False, weights=str(expected.folder))
        self._check_repeats(exact, case.reference, expected, self._tolerance(exact))

    def outcome(self, case: Case, layout: RankedLayout) -> Report:
        """Return `compare`; a crash, a hang or a refusal is in the report."""
        assert isinstance(case, TrainerCase)
        assert isinstance(layout, TrainerLayout)
        try:
            return self.compare(case, layout)
        except ShardwrightError as error:
            return Report(case, layout, "one process", [], 0, crash=str(error))

    def compare(self, case: TrainerCase, layout: TrainerLayout, repeats: bool = True) -> Report:
        """Compare a trainer with `case.reference`. `repeats`: run a trainer that is not equal a second time.

        Raises InputError for a trainer that cannot be run or compared, or whose runs differ from each other;
        WorkerError if a rank crashes or hangs.
        """
        expected = self._exact(case)
        ours = replace(self._prepared(case), weights=str(expected.folder))
        with tempfile.TemporaryDirectory(dir=temporary_folder()) as folder:
            trace = self._run(train_rank, layout.world_size, Path(folder), ours, layout)
            tolerance = self._tolerance(case)
            wide = with_adams_noise(tolerance, case, self._noise_of(expected))
            rows = wide.rows(compare.errors(trace, expected))
            n_replicated, differing = compare.differing_replicas(trace)
            ignored = [_IGNORED[name] for name in trace.ranks[0].ignored]
            report = Report(case, layout, "one process", rows, n_replicated, differing, not_compared=ignored)
            if report.equal:
                return report
            if repeats:
                self._check_repeats(ours, layout, trace, wide)
            return replace(report, culprit=_first_difference(report, trace, expected))

    def culprit(self, report: Report, tell: Callable[[str], None] = lambda line: None) -> str:
        """Return a sentence with the smallest setting that is not equal, its first difference, and what it needs.

        A smaller setting whose first difference is of a later kind, such as a wrong update after right gradients, has
        another bug and counts as equal.
        """
        first, kind = report.culprit, _kind_of_difference(report)

        def fails(setting: TrainerSetting) -> bool | None:
            nonlocal first
            tell(f"trying {described(setting)}")
            try:
                smaller = self.compare(*setting, repeats=False)
            except ShardwrightError:
                return None
            same = not smaller.equal and _kind_of_difference(smaller) <= kind
            first = smaller.culprit if same else first
            return same

        assert isinstance(report.case, TrainerCase)
        assert isinstance(report.layout, TrainerLayout)
        setting, needed = smallest((report.case, report.layout), switched_off, fails)
        ends = f"it is equal without {' and without '.join(needed)}" if needed else "nothing is left to switch off"
        return (
            f"the smallest configuration that still differs: {described(setting)} "
            f"({counted(setting[1].world_size, 'rank')}): {first}; {ends}"
        )

    def _alone(self, case: Case) -> Trace:
        assert isinstance(case, TrainerCase)
        case = replace(case, accumulates=False)
        if case.dtype != "float64" and not case.weights:
            case = replace(case, weights=str(self._exact(case).folder))
        return self._keep(case, train_rank, 1, case, case.reference)

    def _check_repeats(self, case: TrainerCase, layout: TrainerLayout, first: Trace, tolerance: Tolerance) -> None:
        """Raise InputError if a second run of a trainer differs from its first by more than rounding."""
        with tempfile.TemporaryDirectory(dir=temporary_folder()) as folder:
            second = self._run(train_rank, layout.world_size, Path(folder), case, layout)
            # NaN and tensors with a hole are differences from the reference, not a spread.
            rows = [row for row in tolerance.rows(compare.errors(second, first)) if math.isfinite(row.error)]
        worst = max(rows, key=lambda row: row.excess, default=None)
        if worst is not None and not worst.equal:
            raise InputError(
                f"{layout.trainer} is not deterministic: two runs of it ({layout}) differ by {worst.error:.1e} "
                f"({_place(worst)}); set its seeds from world.seed, and switch off dropout"
            )


@dataclass(frozen=True)
class TrainerJob:
    """The question of `verify --trainer`; the fields are arguments of `verify_trainer`."""

    trainer: str | Path | type
    world_size: int
    overrides: Sequence[str] = ()
    reference: str | Path | type | None = None
    run_file: Path | None = None
    full: bool = False
    steps: int = 3
    dtype: str = "float64"
    timeout_s: float = TIMEOUT_S

    def settings(self, every: bool = False) -> tuple[list[TrainerSetting], list[tuple[TrainerLayout, str]]]:
        """Return the case and the trainer to run; with `every`, one for each distribution of the ranks over axes, and
        the layouts that the trainer refuses, with its reason."""
        config, options = config_of(self.run_file, self.world_size, self.overrides)
        trainer, reference = resolved(self.trainer), resolved(self.reference or self.trainer)
        layouts = layouts_of(trainer, self.world_size, options, self.timeout_s, every)
        alone = layouts_of(reference, 1, dict(layouts[0].options), self.timeout_s)[0]
        kept = {override.partition("=")[0].strip() for override in self.overrides}
        case = trainer_case(
            config,
            self.world_size,
            None if self.full or self.run_file is None else kept,
            steps=self.steps,
            dtype=self.dtype,
            reference=replace(alone, is_reference=True),
        )
        refused = self._refused(case, layouts) if every else []
        left_out = [layout for layout, _ in refused]
        return [(case, layout) for layout in layouts if layout not in left_out], refused

    def _refused(self, case: TrainerCase, layouts: list[TrainerLayout]) -> list[tuple[TrainerLayout, str]]:
        """Return the layouts that the trainer refuses, with its reason. Raises InputError with the reasons if it
        refuses all."""
        degrees, options = [dict(layout.degrees) for layout in layouts], dict(layouts[0].options)
        name = layouts[0].trainer
        reasons = run_ranks(invalid_degrees, 1, name, case.spec, degrees, options, timeout_s=self.timeout_s)[0]
        refused = [(layout, reason) for layout, reason in zip(layouts, reasons, strict=True) if reason]
        if len(refused) == len(layouts):
            raise InputError(*(f"{layout}: {reason}" for layout, reason in refused))
        return refused

    def report(self, tell: Callable[[str], None] = lambda line: None) -> Report:
        """Compare the trainer with one process, and look for the smallest configuration that differs."""
        [(case, layout)], _ = self.settings()
        with TrainerVerifier(timeout_s=self.timeout_s) as verifier:
            tell(f"running {self.world_size} ranks and the reference")
            verifier.check_reference(case)
            report = verifier.compare(case, layout)
            return report if report.equal else replace(report, culprit=verifier.culprit(report, tell))


@checked_call
def verify_trainer(
    trainer: str | Path | type,
    world_size: int,
    overrides: Sequence[str] = (),
    *,
    reference: str | Path | type | None = None,
    run_file: Path | None = None,
    full: bool = False,
    steps: int = 3,
    dtype: str = "float64",
    timeout_s: float = TIMEOUT_S,
    tell: Callable[[str], None] | None = None,
) -> Report:
    """Compare a trainer on `world_size` gloo ranks with one process, and look for the smallest configuration that
    differs.

    `trainer`: a file with a class `Trainer`, or that class; each rank executes the file. `overrides`: as of `--set`:
    `model.*`, `batch.*`, `seed`, the axes of the trainer and its options. `reference`: the trainer that runs in one
    process, by default the same. `run_file`: the model and the batch, reduced to test size unless `full`; by default a
    model of a few layers. `dtype`: float64 or float32. `timeout_s`: of each run. `tell`: called with the progress.

    Returns a Report: `equal`, `rows`, `differing` (replicas) and `culprit`. Raises InputError for a trainer that cannot
    be run or compared, or whose runs differ from each other; WorkerError if a rank crashes or hangs.
    """
    job = TrainerJob(trainer, world_size, overrides, reference, run_file, full, steps, dtype, timeout_s)
    return job.report(tell or (lambda line: None))


_ORDER = ("initial", "loss", "gradient", "grad norm", "parameter")


def _failing(report: Report) -> list[ReportRow]:
    """Return the results that differ, in the order in which they are computed, the worst of each kind first."""

    def order(row: ReportRow) -> tuple[int, int, int, float]:
        kind, training, step = row.quantity
        return report.case.trainings.index(training), step, _ORDER.index(kind), -row.excess

    return sorted((row for row in report.rows if not row.equal), key=order)


def _kind_of_difference(report: Report) -> tuple[int, int]:
    """Return the training of the first difference, and its place in the order (loss or gradient, norm, update).
    Replicas that differ are of the first kind."""
    failing = _failing(report)
    if not failing:
        return 0, _ORDER.index("gradient")
    kind, training, _ = failing[0].quantity
    return report.case.trainings.index(training), max(_ORDER.index(kind), _ORDER.index("gradient"))


def _first_difference(report: Report, trace: Trace, expected: Trace) -> str:
    """Return a sentence about the first results of a training that differ: a loss, and the gradient, or else the norm,
    or else a parameter."""
    failing = _failing(report)
    if not failing:
        return report.differing[0]
    same_step = [row for row in failing if row.quantity[1:] == failing[0].quantity[1:]]
    by_kind = {row.quantity.kind: row for row in reversed(same_step)}
    parts: list[str] = []
    for kind in [kind for kind in _ORDER if kind in by_kind]:
        if parts and (kind == "parameter" or (kind == "grad norm" and "gradient" in by_kind)):
            break
        row = by_kind[kind]
        alike = [other for other in same_step if other.quantity.kind == kind]
        parts.append(_sentence(row, alike, trace, expected))
    if report.differing:
        parts.append(report.differing[0])
    return "; ".join(parts)


def _sentence(row: ReportRow, alike: list[ReportRow], trace: Trace, expected: Trace) -> str:
    """Return a sentence about the difference of a result. `alike`: the rows of its kind and step that differ."""
    if not row.name:
        ours, theirs = trace.scalars.get(row.quantity, math.nan), expected.scalars[row.quantity]
        digits = next((n for n in (6, 9, 12) if f"{ours:.{n}g}" != f"{theirs:.{n}g}"), 17)
        return f"{_place(row)} is {ours:.{digits}g}, and {theirs:.{digits}g} in the reference"
    if not math.isfinite(row.error):
        whole = trace.tensor(row.quantity, row.name)
        return f"{_place(row)} {'has shards that overlap or leave a hole' if whole is None else 'is NaN or infinite'}"
    factors = {other.name: compare.factor(trace, expected, other.quantity, other.name) for other in alike}
    this = factors[row.name]
    if this is None:
        others = f", and of {len(alike) - 1} more tensors" if len(alike) > 1 else ""
        return f"{_place(row)} differs by {row.error:.1e}{others}"
    same = sum(other is not None and math.isclose(other, this, rel_tol=1e-5) for other in factors.values())
    others = f", as {same - 1} more are" if same > 1 else ""
    if same == len(expected.shapes):
        others = f", as every other {row.quantity.kind} is"
    return f"{_place(row)} is {this:.4g} times the reference's{others}"


def _place(row: ReportRow) -> str:
    kind, training, step = row.quantity
    return f"{kind} {f'of {row.name} ' if row.name else ''}in step {step} ({training})"
