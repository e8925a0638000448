"""Predictions compared with measurements: each row of a table of published runs, and the errors of each source."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.cost.calibration import CALIBRATED, LEFT_OUT, Calibration
from shardwright.cost.job import Job
from shardwright.cost.step import StepTime, step_time
from shardwright.planner.error_summary import ComparedRow, ErrorSummary, summary
from shardwright.planner.headline import interval_s
from shardwright.planner.measured_run import PredictableRun, SkippedRun
from shardwright.planner.operations import Operations
from shardwright.planner.runs import read_runs
from shardwright.planner.whole_run import TrainingGoal, WholeRun, whole_run
from shardwright.system.errors import InputError

UNSEEN_RUNS = Path(__file__).with_name("measured") / "unseen_runs.csv"
"""Published runs that are part of the package, to which no constant was fitted."""
WHOLE_RUNS = Path(__file__).with_name("measured") / "whole_runs.csv"
"""Published whole runs that are part of the package."""
MEASURED_RUNS = Path(__file__).with_name("measured") / "runs.csv"
"""Published runs that are part of the package."""
QUANTITIES = {"step time": "s", "peak memory": "GiB", "whole run": "days"}
_KEYS = (
    *("row", "id", "source", "model", "stack"),
    *("predicted_days", "measured_days", "interval_days"),
    *("predicted_step_time_s", "measured_step_time_s", "predicted_peak_mem_gib", "measured_peak_mem_gib"),
    *("interval_s", "left_out_step_time_s", "left_out_interval_s", "family", "assumed", "skipped"),
)
"""Keys of the JSON of a row, whether it is predicted or skipped."""


@dataclass(frozen=True)
class PredictedRun:
    """A run with its prediction. `interval_s`: the seconds between which four of five runs are expected (80 %
    interval). `left_out_s`, `left_out_interval_s`: the same with constants fitted without the row's family; None
    without a measured step time. `whole`: the whole run of a row with tokens."""

    run: PredictableRun
    step_s: float
    interval_s: tuple[float, float]
    peak_gib: float
    left_out_s: float | None
    left_out_interval_s: tuple[float, float] | None
    whole: WholeRun | None = None

    def pair(self, quantity: str) -> tuple[float, float] | None:
        """Return (predicted, measured), or None if the quantity was not measured."""
        predicted, measured = {
            "step time": (self.step_s, self.run.measured.step_time_s),
            "peak memory": (self.peak_gib, self.run.measured.peak_mem_gib),
            "whole run": (self.whole.days if self.whole else 0.0, self.run.measured.days),
        }[quantity]
        return None if measured is None else (predicted, measured)

    def interval(self, quantity: str) -> tuple[float, float] | None:
        """Return the 80 % interval by which the quantity is judged: of a step, without the row's family; None if there
        is none."""
        whole = None if self.whole is None else self.whole.interval_days
        return {"step time": self.left_out_interval_s, "whole run": whole}.get(quantity)

    def error(self, quantity: str) -> float | None:
        """Return predicted / measured - 1, or None if the quantity was not measured."""
        pair = self.pair(quantity)
        return None if pair is None else pair[0] / pair[1] - 1


@dataclass(frozen=True, kw_only=True)
class PlanErrorSummary(ErrorSummary):
    """Errors of one quantity over the rows of one source or family."""

    group: str
    quantity: str


@dataclass(frozen=True)
class PlanEvaluation:
    """The result of `evaluate`."""

    path: Path
    rows: tuple[PredictedRun, ...]
    skipped: tuple[SkippedRun, ...]

    @property
    def summaries(self) -> list[PlanErrorSummary]:
        """Return one summary for each source and measured quantity, in the order of the file."""
        return list(self._summaries_by("source"))

    @property
    def families(self) -> list[PlanErrorSummary]:
        """Return one summary for each family of sources, and last one for all rows."""
        whole = [summary for quantity in QUANTITIES if (summary := _summary("all", quantity, self.rows))]
        return [*self._summaries_by("family"), *whole]

    def _summaries_by(self, column: str) -> Iterator[PlanErrorSummary]:
        for name in dict.fromkeys(getattr(row.run.measured, column) for row in self.rows):
            those = [row for row in self.rows if getattr(row.run.measured, column) == name]
            for quantity in QUANTITIES:
                if summary := _summary(name, quantity, those):
                    yield summary

    def as_json(self) -> dict[str, Any]:
        """Return `rows`, with the skipped ones among them, `sources` and `families`."""
        rows = [_row_json(row) for row in self.rows]
        rows += [dict.fromkeys(_KEYS) | _names(run) | {"skipped": run.reason} for run in self.skipped]
        return {
            "file": str(self.path),
            "rows": sorted(rows, key=lambda row: row["row"]),
            "sources": [{"source": summary.group} | vars(summary) for summary in self.summaries],
            "families": [{"family": summary.group} | vars(summary) for summary in self.families],
        }


def evaluate(path: Path) -> PlanEvaluation:
    """Predict every row of a CSV with the columns of `planner.run_columns`.

    Raises InputError with every column and cell that is not valid. A row that the cost model cannot price is skipped.
    """
    return evaluate_runs(path, read_runs(path))


def evaluate_runs(path: Path, runs: Iterable[PredictableRun | SkippedRun]) -> PlanEvaluation:
    """Predict runs that have been read from a file."""
    predicted = [run if isinstance(run, SkippedRun) else _predict(run) for run in runs]
    rows = tuple(row for row in predicted if isinstance(row, PredictedRun))
    return PlanEvaluation(path, rows, tuple(run for run in predicted if isinstance(run, SkippedRun)))


def step_seconds(run: PredictableRun, calibration: Calibration = CALIBRATED) -> float:
    """Return the predicted seconds of a step of one run."""
    return float(timed_run(run, calibration)[1].total_s[0])


def timed_run(run: PredictableRun, calibration: Calibration) -> tuple[Job, StepTime]:
    """Return a run's job with these constants, and its step time."""
    stack = replace(run.job.stack, speed=run.job.stack.speed.calibrated(calibration))
    job = replace(run.job, stack=stack, calibration=calibration)
    return job, step_time(job, run.candidates)


def _predicted(run: PredictableRun, calibration: Calibration) -> tuple[float, tuple[float, float]]:
    """Return the predicted seconds of a step, and their interval."""
    job, time = timed_run(run, calibration)
    low, high = interval_s(job, time, calibration)
    return float(time.total_s[0]), (float(low[0]), float(high[0]))


def _predict(run: PredictableRun) -> PredictedRun | SkippedRun:
    """Predict a run, or skip it if it cannot be priced, such as a schedule that cannot run its micro-batches."""
    left_out = LEFT_OUT.get(run.measured.family, CALIBRATED)
    try:
        # Overflows are handled below; numpy's warnings about them would only clutter the terminal.
        with np.errstate(all="ignore"):
            seconds, interval = _predicted(run, CALIBRATED)
            measured = run.measured.step_time_s is not None
            unseen = _predicted(run, left_out) if measured else (None, None)
            whole = _whole_run(run, seconds, interval)
            row = PredictedRun(run, seconds, interval, run.predicted_peak_gib(), unseen[0], unseen[1], whole)
    except InputError as error:
        return SkippedRun(run.row, run.measured, error.problems[0])
    for what, value in (("step time", row.step_s), ("peak memory", row.peak_gib), ("step time", row.left_out_s)):
        if value is not None and not 0 < value < inf:
            return SkippedRun(run.row, run.measured, f"predicted {what} of {value}: the sizes are out of range")
    return row


def _whole_run(run: PredictableRun, step_s: float, interval_s: tuple[float, float]) -> WholeRun | None:
    """Return the whole run of a row with tokens."""
    if run.measured.tokens is None:
        return None
    operations = Operations(save_every=run.measured.save_every)
    return whole_run(run.job, step_s, interval_s, TrainingGoal(run.measured.tokens, operations=operations))


def _summary(group: str, quantity: str, rows: Sequence[PredictedRun]) -> PlanErrorSummary | None:
    compared = [
        ComparedRow(
            row.run.row, *pair, row.left_out_s if quantity == "step time" else None, row.interval(quantity)
        )
        for row in rows
        if (pair := row.pair(quantity)) is not None
    ]  # fmt: skip
    return summary(PlanErrorSummary, compared, group=group, quantity=quantity) if compared else None


def _names(run: PredictableRun | SkippedRun) -> dict[str, Any]:
    return {"row": run.row, "id": run.measured.id, "source": run.measured.source, "model": run.measured.model}


def _row_json(row: PredictedRun) -> dict[str, Any]:
    run = row.run
    return (
        dict.fromkeys(_KEYS)
        | _names(run)
        | {
            "stack": run.job.stack.name,
            "predicted_step_time_s": row.step_s,
            "measured_step_time_s": run.measured.step_time_s,
            "predicted_peak_mem_gib": row.peak_gib,
            "measured_peak_mem_gib": run.measured.peak_mem_gib,
            "predicted_days": None if row.whole is None else row.whole.days,
            "measured_days": run.measured.days,
            "interval_days": None if row.whole is None else row.whole.interval_days,
            "interval_s": row.interval_s,
            "left_out_step_time_s": row.left_out_s,
            "left_out_interval_s": row.left_out_interval_s,
            "family": run.measured.family,
            "assumed": list(run.assumed),
        }
    )
