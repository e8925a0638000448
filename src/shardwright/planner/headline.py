"""Step time, throughput, MFU and HFU of a layout.

The interval around a predicted step time that contains the measured time of four of five runs.

The half width h is a logarithm, so the interval is t e^-h to t e^h:

    h = base + outside x + experts [mixture] + narrow [fewer than 16 bits] + attention a
        + unmeasured [no run on the die] + software [no run of the software]

x is the fraction of the step that is neither matmuls nor attention. The rates of matmuls are known best;
communication, launches and idle times depend on software and network. a is the fraction that is attention. Attention
kernels differ more between software releases than matmul kernels do, and dominate long sequences.
The last two terms apply if no measured run is on an accelerator with the die, such as MI300X, or of the software, such
as Shardwright itself.

The coefficients are a linear quantile regression, at 80 %, of the errors of families of runs that were left out of the
fit of the constants (Koenker and Bassett, 1978; `benchmarks/calibrate.py`), in which families with fewer runs inside
count more. `unmeasured` and `software` are fitted to predictions of the same runs without the constants of their own
die, and of their own software.
Ignored: the rows of one table err in one direction, so their intervals hold or fail together.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from shardwright.cost import ledger
from shardwright.cost.calibration import Calibration
from shardwright.cost.flops import executed_flops, model_flops
from shardwright.cost.formats import FORMATS
from shardwright.cost.job import Floats, Job
from shardwright.cost.machine import interval_narrowing
from shardwright.cost.step import StepTime
from shardwright.planner.choice import PricedLayout

_PALM = "PaLM, arXiv 2204.02311, section 4.1"


@dataclass(frozen=True)
class PlanHeadline:
    """Speed of a layout. Shares of the peak use two conventions of attention: `full` counts the whole square of scores
    (PaLM), `causal` the half that is not masked (Megatron-LM today). `interval_s`: the seconds between which the step
    of four of five runs is expected (80 % interval, `planner.headline`)."""

    step_s: float
    interval_s: tuple[float, float]
    tokens_per_s: float
    tokens_per_s_per_accelerator: float
    flops_per_s_per_accelerator: float
    mfu_full: float
    mfu_causal: float
    hfu_full: float
    hfu_causal: float

    @property
    def recomputes_flops(self) -> bool:
        """Return whether FLOPs of the model are computed again, so that HFU differs from MFU."""
        return self.hfu_full > self.mfu_full


def headline(priced: PricedLayout) -> PlanHeadline:
    """Compute MFU = tokens/s x model FLOPs per token / (accelerators x peak), and HFU likewise from the executed FLOPs.

    Source: PaLM, arXiv 2204.02311, section 4.1 and appendix B; FLOPs by `cost.flops`.
    """
    job = priced.job
    per_s = job.tokens / priced.step_s
    peak = job.cluster.size * job.peak_flops_per_s
    needed, executed = model_flops(job), executed_flops(job, priced.choice.candidates)
    low, high = interval_s(job, priced.time, job.calibration, interval_narrowing(job, priced.candidates))
    numbers = PlanHeadline(
        step_s=priced.step_s,
        interval_s=(float(low[0]), float(high[0])),
        tokens_per_s=per_s,
        tokens_per_s_per_accelerator=per_s / job.cluster.size,
        flops_per_s_per_accelerator=per_s * float(needed.full) / job.cluster.size,
        mfu_full=per_s * float(needed.full) / peak,
        mfu_causal=per_s * float(needed.causal) / peak,
        hfu_full=per_s * float(executed.full[0]) / peak,
        hfu_causal=per_s * float(executed.causal[0]) / peak,
    )
    with ledger.section("Speed"):
        ledger.note(
            "tokens per s", "tokens_of_a_step / step", per_s, "1/s", tokens_of_a_step=job.tokens, step=priced.step_s
        )
        shares = [("MFU, full square", "model", numbers.mfu_full, needed.full)]
        shares.append(("MFU, causal half", "model", numbers.mfu_causal, needed.causal))
        if numbers.recomputes_flops:
            shares.append(("HFU, full square", "executed", numbers.hfu_full, executed.full))
            shares.append(("HFU, causal half", "executed", numbers.hfu_causal, executed.causal))
        for what, kind, share, flops in shares:
            name = ledger.identifier(f"{kind} FLOPs, {what[5:]}")
            ledger.note(
                what, f"tokens_per_s * {name} / (accelerators * peak_rate)", share, "", _PALM,
                tokens_per_s=per_s, accelerators=job.cluster.size,
                peak_rate=job.peak_flops_per_s, **{name: flops},
            )  # fmt: skip
    return numbers


TERMS = ("base", "outside", "experts", "narrow", "attention", "unmeasured", "software")
KNOWN = ("matmuls", "attention", "recomputation")
"""Parts of a step that are computation at known rates."""


def features(job: Job, time: StepTime) -> Floats:
    """Return the variables of the half width, (n, 7), in the order of `TERMS`."""
    total = time.total_s
    attention = time.parts.get("attention", np.zeros(len(total))) / total
    known = sum((time.parts[name] for name in KNOWN if name in time.parts), np.zeros(len(total)))
    flags = job.model.moe is not None, FORMATS[job.precision].narrow, unmeasured(job), unmeasured_software(job)
    experts, narrow, *unseen = (np.full(len(total), float(flag)) for flag in flags)
    return np.stack([np.ones(len(total)), 1 - known / total, experts, narrow, attention, *unseen], axis=1)


def unmeasured(job: Job) -> bool:
    """Return whether no measured run is on an accelerator with this die, and the job's own machine was not measured."""
    chip = job.cluster.accelerator
    return chip.rates is None and chip.die not in job.calibration.product_share


def unmeasured_software(job: Job) -> bool:
    """Return whether no measured run and no training log is of this software, nor its machine was measured."""
    measured = job.cluster.accelerator.rates is not None or job.calibration.covariance
    return not measured and job.stack.speed.kind not in job.calibration.software


def half_width(features_n7: Floats, coefficients: Mapping[str, float]) -> Floats:
    """Return h, (n,)."""
    return np.asarray(features_n7 @ np.array([coefficients[term] for term in TERMS]))


def interval_s(job: Job, time: StepTime, by: Calibration, narrowing: float = 1.0) -> tuple[Floats, Floats]:
    """Return the shortest and the longest expected step time in seconds, each (n,). `narrowing`: of the interval by
    training logs of the cluster (`cost.machine`)."""
    width = np.exp(half_width(features(job, time), by.interval) * narrowing)
    return time.total_s / width, time.total_s * width
