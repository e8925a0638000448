"""Calibrate each cluster of the table of measured runs by one of its rows, and predict its other rows.

python benchmarks/one_log.py

A cluster is a source, accelerator, software, release and format with at least three rows. Each of its rows is the log
once. Predictions before the log use the constants that were fitted without the row's family. The errors are mean
absolute relative errors over all pairs of a log and another row.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.cost.calibration import LEFT_OUT
from shardwright.cost.job import Floats, Job
from shardwright.cost.machine import SPREADS, derivatives, with_times
from shardwright.cost.step import step_time
from shardwright.planner.evaluate import MEASURED_RUNS, timed_run
from shardwright.planner.log_calibration import posterior
from shardwright.planner.measured_run import PredictableRun
from shardwright.planner.runs import read_runs

FEWEST_ROWS = 3
MEGATRON_CORE = "megatron-core"
"""The software of MLPerf's submissions on NVIDIA's clusters."""


@dataclass(frozen=True)
class ClusterError:
    """`before`, `after`: the errors of the rows of one cluster, without a log and after one other row."""

    source: str
    accelerator: str
    software: str
    release: str
    precision: str
    rows: int
    before: float
    after: float


def cluster_errors(software: str = "") -> list[ClusterError]:
    """Return the errors of every cluster, or of the clusters with one software."""
    groups: dict[tuple[str, ...], list[PredictableRun]] = defaultdict(list)
    for run in read_runs(MEASURED_RUNS):
        row = run.measured
        if isinstance(run, PredictableRun) and row.step_time_s is not None and software in ("", row.stack):
            groups[row.source, row.accelerator, row.stack, row.date, row.precision].append(run)
    return [ClusterError(*name, len(runs), *_errors(runs)) for name, runs in groups.items() if len(runs) >= FEWEST_ROWS]


def _errors(runs: Sequence[PredictableRun]) -> tuple[float, float]:
    """Return the mean error of every row, and the mean error of every row after each other row."""
    jobs: list[Job] = []
    gaps: list[float] = []
    for run in runs:
        job, time = timed_run(run, LEFT_OUT[run.measured.family])
        jobs.append(job)
        gaps.append(float(np.log(run.measured.step_time_s / time.total_s[0])))
    before, after = [], []
    no_log: tuple[Floats, Floats] = np.zeros(len(SPREADS)), np.diag(SPREADS**2)
    for log, (job, run) in enumerate(zip(jobs, runs, strict=True)):
        mean, _ = posterior(gaps[log], derivatives(job, run.candidates), 0.0, no_log)
        for other, (its_job, its_run) in enumerate(zip(jobs, runs, strict=True)):
            if other != log:
                predicted = step_time(with_times(its_job, np.exp(mean)), its_run.candidates).total_s[0]
                before.append(abs(np.exp(-gaps[other]) - 1))
                after.append(abs(float(predicted) / its_run.measured.step_time_s - 1))
    return float(np.mean(before)), float(np.mean(after))


def reduction(errors: Sequence[ClusterError]) -> float:
    """Return the relative reduction of the error, averaged over clusters."""
    return 1 - float(np.mean([each.after for each in errors]) / np.mean([each.before for each in errors]))


def main() -> None:
    """Print the errors of each cluster, and the reductions."""
    errors = cluster_errors()
    print("| source | accelerator | software | release | format | rows | error before | error after |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for each in errors:
        names = [each.source, each.accelerator, each.software, each.release, each.precision, str(each.rows)]
        print(f"| {' | '.join(names)} | {each.before:.1%} | {each.after:.1%} |")
    of_one = [each for each in errors if each.software == MEGATRON_CORE]
    for name, those in (("all software", errors), (MEGATRON_CORE, of_one)):
        better = sum(each.after < each.before for each in those)
        before, after = (np.mean([getattr(each, key) for each in those]) for key in ("before", "after"))
        print(
            f"{name}: {before:.1%} before, {after:.1%} after one log, {reduction(those):.0%} less; "
            f"{better} of {len(those)} clusters better"
        )


if __name__ == "__main__":
    main()
