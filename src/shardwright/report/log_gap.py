"""The reasons why the steps of a log take longer than predicted: slow steps by their pattern, and a gap of the median
step by the constants that most likely cause it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp
from statistics import fmean, median

import numpy as np

from shardwright.cost.hardware_file import CALIBRATED_CONSTANTS
from shardwright.planner.log_calibration import LogCalibration
from shardwright.readers.logs import SLOW, StepTimes, TrainingLog
from shardwright.system.units import format_seconds

FEWEST_PERIODS = 3
"""Slow steps at one distance from which on they are periodic."""
PERIODIC_SHARE = 0.8
"""Share of the steps at this distance that have to be slow."""
DRIFT = 1.03
"""Median of the last third of a log relative to the first third, from which on steps become slower."""
SHOWN_CAUSES = 3
LEAST_SHARE = 0.005
"""A cause of less time, as a share of the step, is not shown."""
_OF_CONSTANTS = {
    "matmuls": "a lower clock (power or temperature limits), another matmul library, or small matrices",
    "attention": "another attention kernel or release",
    "kernels": "unfused element-wise kernels, or less memory bandwidth",
    "network": "a slower or shared network, another NCCL setting, or messages that do not overlap",
    "host": "slow launches: Python, no CUDA graphs, a busy host, or synchronisations",
}


@dataclass(frozen=True)
class SlowSteps:
    """Steps with a common reason for their time. `extra_s`: their time beyond the median, all together; `per_step_s`:
    the same for each step of the log."""

    kind: str
    steps: tuple[int, ...]
    extra_s: float
    per_step_s: float
    period: int | None = None


@dataclass(frozen=True)
class GapCause:
    """A likely cause of a gap between the mean measured step and the predicted step. `per_step_s`: its time, below 0 if
    it makes the run faster than predicted."""

    name: str
    per_step_s: float
    evidence: str


def slow_steps(times: StepTimes) -> list[SlowSteps]:
    """Return the warm-up, periodic slow steps, and other slow steps; groups without a step are left out."""
    usual, n = times.median_s, len(times.seconds)
    seconds = dict(zip(times.steps, times.seconds, strict=True))
    steady = times.steps[times.warm :]
    slow = [step for step in steady if seconds[step] > SLOW * usual]
    period, periodic = _periodic(slow, steady)
    groups = (
        ("warm-up", times.steps[: times.warm], None),
        ("periodic", periodic, period),
        ("isolated", tuple(step for step in slow if step not in periodic), None),
    )
    result = []
    for kind, steps, distance in groups:
        if steps:
            extra_s = sum(seconds[step] - usual for step in steps)
            result.append(SlowSteps(kind, tuple(steps), extra_s, extra_s / n, distance))
    return result


def _periodic(slow: Sequence[int], steps: Sequence[int]) -> tuple[int | None, tuple[int, ...]]:
    """Return the distance of the most slow steps that are periodic, and these steps. The distance is longer than the
    distance of logged steps."""
    best: tuple[int | None, tuple[int, ...]] = None, ()
    logged = min((b - a for a, b in pairwise(steps) if b > a), default=1)
    for period in sorted({b - a for a, b in pairwise(slow) if b - a > logged}):
        for phase in {step % period for step in slow}:
            those = tuple(step for step in slow if step % period == phase)
            expected = [step for step in steps if step % period == phase]
            regular = len(those) >= max(FEWEST_PERIODS, PERIODIC_SHARE * len(expected))
            if regular and len(those) > len(best[1]):
                best = period, those
    return best


def likely_causes(log: TrainingLog, times: StepTimes, result: LogCalibration, predicted_s: float) -> list[GapCause]:
    """Return the causes with the most time, the largest first. `result`: the calibration of the constants by the log;
    `predicted_s`: the predicted step."""
    causes = [*_slow_step_causes(times), *_wait_causes(log, times), *_drift_causes(times)]
    causes += _constant_causes(result, predicted_s)
    causes = [cause for cause in causes if abs(cause.per_step_s) >= LEAST_SHARE * predicted_s]
    causes.sort(key=lambda cause: abs(cause.per_step_s), reverse=True)
    return causes[:SHOWN_CAUSES]


def _slow_step_causes(times: StepTimes) -> Iterator[GapCause]:
    names = {
        "warm-up": ("warm-up", "{n} slow at the start: compilation, allocation, connections"),
        "periodic": ("checkpoints, evaluations or other periodic work", "{n} slow, one every {period} steps"),
        "isolated": ("stragglers, data or a shared network", "{n} slow at no regular distance"),
    }
    for group in slow_steps(times):
        name, evidence = names[group.kind]
        text = evidence.format(n=len(group.steps), period=group.period)
        at = ", ".join(map(str, group.steps[:4])) + (", ..." if len(group.steps) > 4 else "")
        extra = format_seconds(group.extra_s / len(group.steps))
        yield GapCause(name, group.per_step_s, f"{text} (step {at}), {extra} more than the median each")


def _wait_causes(log: TrainingLog, times: StepTimes) -> Iterator[GapCause]:
    waits = [step.data_s for step in log.steps[times.warm :] if step.data_s is not None]
    if waits:
        usual = format_seconds(median(waits))
        yield GapCause("data", fmean(waits), f"the median step waits {usual} for data, as the log has it")


def _drift_causes(times: StepTimes) -> Iterator[GapCause]:
    steady = times.seconds[times.warm :]
    third = len(steady) // 3
    if third < FEWEST_PERIODS:
        return
    first, last = median(steady[:third]), median(steady[-third:])
    if last > DRIFT * first:
        yield GapCause(
            "steps become slower", (last - first) / 2,
            f"median {format_seconds(first)} in the first third of the log, {format_seconds(last)} in the last: "
            f"temperature, memory fragmentation, or longer data",
        )  # fmt: skip


def _constant_causes(result: LogCalibration, predicted_s: float) -> Iterator[GapCause]:
    """Yield the gap of the median step by constant, in proportion to the posterior, and the rest."""
    if not result.informs and not result.surprises:
        gap_s = predicted_s * (exp(result.gap) - 1)
        yield GapCause("not determined", gap_s, "the log has few steps, or their times vary too much")
        return
    before, after = result.means
    parts = result.derivatives_5 * (after - before)
    for name, part, change, share in zip(
        CALIBRATED_CONSTANTS, parts, after - before, result.derivatives_5, strict=True
    ):
        direction = f"{exp(abs(change)):.2f} times {'slower' if change > 0 else 'faster'}"
        why = f"; possible: {_OF_CONSTANTS[name]}" if change > 0 else ""
        evidence = f"{share:.0%} of the step depends on it; most likely {direction} than predicted{why}"
        yield GapCause(name, predicted_s * float(np.expm1(part)), evidence)
    if result.surprises:
        yield GapCause(
            "not in the configuration or the model", predicted_s * (exp(result.gap) - exp(result.explained)),
            "larger than clusters of this kind differ: check that the log is of this configuration, accelerator and "
            "number of ranks",
        )  # fmt: skip
