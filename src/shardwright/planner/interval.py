"""The interval around a predicted step time that contains the measured time of four of five runs.

The half width h is a logarithm, so the interval is t e^-h to t e^h:

    h = base + outside x + experts [mixture] + narrow [fewer than 16 bits] + attention a
        + unmeasured [no run on the die]

x is the fraction of the step that is neither matmuls nor attention. The rates of matmuls are known best;
communication, launches and idle times depend on software and network. a is the fraction that is attention. Attention
kernels differ more between software releases than matmul kernels do, and dominate long sequences.
The last term applies if no measured run is on an accelerator with the die, such as MI300X.

The coefficients are a linear quantile regression, at 80 %, of the errors of families of runs that were left out of the
fit of the constants (Koenker and Bassett, 1978; `benchmarks/calibrate.py`), in which each family counts the same.
`unmeasured` is fitted to predictions of the same runs without the rates that were fitted on their own die.
Ignored: the rows of one table err in one direction, so their intervals hold or fail together.
"""

from collections.abc import Mapping

import numpy as np

from shardwright.cost.calibration import Calibration
from shardwright.cost.formats import FORMATS
from shardwright.cost.job import Floats, Job
from shardwright.cost.step import StepTime

TERMS = ("base", "outside", "experts", "narrow", "attention", "unmeasured")
COVERED = 0.8
"""Share of runs that the interval contains."""
KNOWN = ("matmuls", "attention", "recomputation")
"""Parts of a step that are computation at known rates."""


def features(job: Job, time: StepTime) -> Floats:
    """Return the variables of the half width, (n, 6), in the order of `TERMS`."""
    total = time.total_s
    attention = time.parts.get("attention", np.zeros(len(total))) / total
    known = sum((time.parts[name] for name in KNOWN if name in time.parts), np.zeros(len(total)))
    flags = job.model.moe is not None, FORMATS[job.precision].narrow, unmeasured(job)
    experts, narrow, unseen = (np.full(len(total), float(flag)) for flag in flags)
    return np.stack([np.ones(len(total)), 1 - known / total, experts, narrow, attention, unseen], axis=1)


def unmeasured(job: Job) -> bool:
    """Return whether no measured run is on an accelerator with this die, and the job's own machine was not measured."""
    chip = job.cluster.accelerator
    return chip.rates is None and chip.die not in job.calibration.product_share


def half_width(features_n6: Floats, coefficients: Mapping[str, float]) -> Floats:
    """Return h, (n,)."""
    return np.asarray(features_n6 @ np.array([coefficients[term] for term in TERMS]))


def interval_s(job: Job, time: StepTime, by: Calibration) -> tuple[Floats, Floats]:
    """Return the shortest and the longest expected step time in seconds, each (n,)."""
    width = np.exp(half_width(features(job, time), by.interval))
    return time.total_s / width, time.total_s * width
