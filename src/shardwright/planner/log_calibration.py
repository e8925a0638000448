"""Calibrate the constants of a cluster and its software by the step time of a training log.

One log is one observation of y = ln(measured / predicted), which is d x plus an error, for the logarithms x of the
constants (`cost.machine`) and the derivatives d of the logarithm of the step time. Mean and covariance of x follow as
in a Kalman filter: gain K = C d / (d C d + n^2), mean + K y, C - K d C. n is the standard deviation of the error of the
model and of the log's steps. Ignored: terms of second order, and errors that several layouts of a cluster share.
"""

from dataclasses import dataclass
from math import exp, log, sqrt

import numpy as np

from shardwright.cost.hardware import Cluster
from shardwright.cost.hardware_file import CALIBRATED_CONSTANTS, LogCalibrationTable
from shardwright.cost.job import Floats
from shardwright.cost.machine import MODEL_ERROR, derivatives, narrowing, prior
from shardwright.planner.choice import PricedLayout
from shardwright.planner.error_summary import NORMAL_80

SURPRISE = 2.0
"""Standard deviations from which on a gap counts for less: a slow disk or node is not a constant of the model."""
LEAST_NARROWING = 0.95
"""A log that narrows the interval of its own step time by less is uninformative."""


@dataclass(frozen=True)
class LogCalibration:
    """The constants before and after a log. `kind`: of the software; `gap`: ln(measured / predicted), with the standard
    deviation `noise`; `means`, `covariances`: of the logarithms of the constants, (before, after); `derivatives_5`: of
    the step time."""

    kind: str
    gap: float
    noise: float
    derivatives_5: Floats
    means: tuple[Floats, Floats]
    covariances: tuple[Floats, Floats]

    @property
    def narrowings(self) -> tuple[float, float]:
        """Return the width of the interval of the log's step time relative to the width without any log, before and
        after this log."""
        before, after = (narrowing(self.derivatives_5, covariance) for covariance in self.covariances)
        return before, after

    @property
    def informs(self) -> bool:
        """Return whether the log narrows the interval of its step time."""
        before, after = self.narrowings
        return after / before < LEAST_NARROWING

    @property
    def explained(self) -> float:
        """Return the part of the gap that the changed constants explain, as a logarithm."""
        before, after = self.means
        return float(self.derivatives_5 @ (after - before))

    @property
    def surprises(self) -> bool:
        """Return whether the gap is larger than the constants and the steps of the log can explain."""
        large = abs(self.gap) > SURPRISE * sqrt(MODEL_ERROR**2 + self.noise**2)
        return large and abs(self.gap - self.explained) > abs(self.gap) / 2

    def intervals(self) -> list[tuple[str, tuple[float, float], tuple[float, float], float]]:
        """Return (constant, 80 % interval of its factor before, the same after, share of the step) of each constant."""
        rows: list[tuple[str, tuple[float, float], tuple[float, float], float]] = []
        for at, name in enumerate(CALIBRATED_CONSTANTS):
            before, after = (
                (exp(mean[at] - half), exp(mean[at] + half))
                for mean, covariance in zip(self.means, self.covariances, strict=True)
                for half in [NORMAL_80 * sqrt(covariance[at, at])]
            )
            rows.append((name, before, after, float(self.derivatives_5[at])))
        return rows

    def table(self, logs: list[str]) -> LogCalibrationTable:
        """Return the table of a hardware file."""
        mean, covariance = self.means[1], np.round(self.covariances[1], 7).tolist()
        return LogCalibrationTable(
            time={name: round(exp(mean[at]), 5) for at, name in enumerate(CALIBRATED_CONSTANTS)},
            covariance={name: covariance[at] for at, name in enumerate(CALIBRATED_CONSTANTS)},
            logs=logs,
        )


def posterior(gap: float, derivatives_5: Floats, noise: float, before: tuple[Floats, Floats]) -> tuple[Floats, Floats]:
    """Return mean and covariance after one observation. `noise`: standard deviation of the logarithm of the measured
    time; `before`: mean and covariance before it."""
    mean, covariance = before
    noise_squared = MODEL_ERROR**2 + noise**2
    variance = derivatives_5 @ covariance @ derivatives_5 + noise_squared
    surprise = gap**2 / (SURPRISE**2 * variance)
    if surprise > 1:
        variance += noise_squared * (surprise**2 - 1)
    gain = covariance @ derivatives_5 / variance
    after = covariance - np.outer(gain, derivatives_5 @ covariance)
    return mean + gain * gap, (after + after.T) / 2


def calibrate(priced: PricedLayout, cluster: Cluster, step_s: float, noise: float) -> LogCalibration:
    """Return the constants of a cluster after a log of a layout. `priced`: the layout with the constants before the
    log; `cluster`: with its calibration by earlier logs, if any; `step_s`: the measured time; `noise`: as of
    `posterior`."""
    kind = priced.job.stack.speed.kind
    before = prior(cluster, kind)
    slopes = derivatives(priced.job, priced.candidates)
    gap = log(step_s / priced.step_s)
    mean, covariance = posterior(gap, slopes, noise, before)
    return LogCalibration(kind, gap, noise, slopes, (before[0], mean), (before[1], covariance))
