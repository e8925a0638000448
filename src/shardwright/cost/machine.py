"""Jobs on a machine that `shardwright measure` measured, or on a cluster that training logs calibrated.

A training log identifies few constants: it has one time for each step. They are factors on the time of matmuls,
attention, element-wise kernels, messages and the host's work, relative to the constants of `cost.calibration`. The
logarithms of the factors have a normal distribution: before any log with mean 0 and the standard deviations of
`SPREADS`, after logs with the mean and covariance of a `LogCalibrationTable`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from shardwright.cost.calibration import OTHERS
from shardwright.cost.hardware import Cluster, NetworkLink
from shardwright.cost.hardware_file import CALIBRATED_CONSTANTS
from shardwright.cost.job import Candidates, Floats, Job
from shardwright.cost.speed import CONTEXT, DATA, TENSOR
from shardwright.cost.stack import SHARDWRIGHT
from shardwright.cost.step import step_time
from shardwright.split.compression import LOGITS_TOGETHER
from shardwright.system.units import GiB

SPREADS = np.array([0.08, 0.15, 0.15, 0.3, 0.3])
"""Standard deviations before any log, in the order of `CALIBRATED_CONSTANTS`. benchmarks/one_log.py evaluates them:
clusters differ most in their networks and hosts."""
MODEL_ERROR = 0.03
"""Standard deviation of the error of one layout's step time that no constant explains."""
STEP = 0.01
"""Change of the logarithm of a constant for a derivative."""
_HOST = ("launch_s", "step_s", "bucket_s", "message_s", "part_s")
"""Fields of `Speed` that are times of the host."""


def on_machine(job: Job) -> Job:
    """Return the job with the rates measured on its cluster's machine, or with the constants that logs of its software
    calibrated, if there are any. Rates were measured with this system's eager stack; a compiled stack, and another
    system's, use only the rates of matmuls, attention and memory."""
    job, chip = on_calibrated_cluster(job), job.cluster.accelerator
    if chip.rates is None:
        return job
    rates, share = chip.rates, chip.core_share
    fitted = replace(
        job.calibration,
        product_share={OTHERS: dict.fromkeys(("bf16", "fp8"), 1 / rates.in_step.work)},
        flash_share={OTHERS: rates.attention_share},
        ramp_k=rates.ramp_k,
        partial_wave=rates.partial_wave,
        flash_width=rates.attention_width,
        flash_length=rates.attention_length,
        flash_backward=rates.attention_backward,
        memory_share=1 / rates.in_step.work,
    )
    speed = replace(job.stack.speed, kernel_share=1.0, matmul_gain=1.0, flash_gain=1.0, attention="", by_die={})
    if job.stack.name == SHARDWRIGHT.name:
        kernels: dict[str, Any] = {str(name): moved for name, moved in rates.kernels.items()}
        if "loss_bytes" in kernels:  # in the type that was measured
            kernels |= {"loss_cast_bytes": 0.0, "loss_over_tp_bytes": 0.0}
        speed = replace(
            speed,
            launch_s=rates.launch_us * 1e-6 / share,
            launch_backward=rates.launch_backward,
            head_launches=rates.launch_ends,
            step_s=rates.step_us * 1e-6 / share,
            bucket_s=rates.bucket_us * 1e-6 / share,
            **kernels,
        )
    if chip.on_host:
        messages = {
            DATA: rates.in_step.data_parallel, TENSOR: rates.in_step.tensor_parallel,
            CONTEXT: rates.in_step.context_parallel,
        }  # fmt: skip
        # The measured factor of data-parallel messages contains the copies of parameters and gradients.
        speed = replace(speed, in_step=messages, adds_launches=True, message_s=0.0)
        speed = replace(speed, hides_dp=False, hides_tp_backward=False, copies_parameters=False)
    stack = replace(job.stack, speed=speed, workspace_bytes=rates.process_gib * GiB)
    if chip.on_host:
        stack = replace(stack, holes=tuple(rates.holes), of_process=True, logits_together=LOGITS_TOGETHER)
    return replace(job, calibration=fitted, stack=stack)


def on_calibrated_cluster(job: Job) -> Job:
    """Return the job with the calibration of its cluster for its software; the returned job's cluster has none, so a
    second call changes nothing."""
    table = job.cluster.calibrated.get(job.stack.speed.kind)
    if table is None:
        return job
    scaled = with_times(job, [table.time[name] for name in CALIBRATED_CONSTANTS])
    covariance: dict[str, tuple[float, ...]] = {name: tuple(row) for name, row in table.covariance.items()}
    fitted = replace(scaled.calibration, covariance=covariance)
    return replace(scaled, calibration=fitted, cluster=replace(scaled.cluster, calibrated={}))


def with_times(job: Job, factors: Sequence[float] | Floats) -> Job:
    """Return the job with the times of `CALIBRATED_CONSTANTS` multiplied by factors. Rates of attention are relative to
    rates of matmuls; here each changes alone."""
    matmuls, attention, kernels, network, host = map(float, factors)
    fitted = replace(
        job.calibration,
        product_share={
            die: {form: share / matmuls for form, share in shares.items()}
            for die, shares in job.calibration.product_share.items()
        },
        attention_time=job.calibration.attention_time * attention / matmuls,
        memory_share=job.calibration.memory_share / kernels,
    )
    inside, across = (_slower(link, network) for link in (job.cluster.inside, job.cluster.across))
    times: dict[str, Any] = {name: getattr(job.stack.speed, name) * host for name in _HOST}
    return replace(
        job,
        calibration=fitted,
        cluster=replace(job.cluster, inside=inside, across=across),
        stack=replace(job.stack, speed=replace(job.stack.speed, **times)),
    )


def _slower(link: NetworkLink, factor: float) -> NetworkLink:
    """Return a link whose messages take `factor` times as long."""
    return replace(
        link,
        bytes_per_s=link.bytes_per_s / factor,
        latency_s=link.latency_s * factor,
        start_s=link.start_s * factor,
        switch_bytes_per_s=link.switch_bytes_per_s / factor,
        peer_bytes_per_s=link.peer_bytes_per_s / factor,
    )


def derivatives(job: Job, candidates: Candidates) -> Floats:
    """Return the derivative of the logarithm of one layout's step time by the logarithm of each constant, (5,): about
    the share of the step that depends on the constant."""
    factors = np.exp(np.vstack([np.zeros(len(SPREADS)), np.diag(np.full(len(SPREADS), STEP))]))
    times = np.log([float(step_time(with_times(job, row), candidates).total_s[0]) for row in factors])
    return np.asarray((times[1:] - times[0]) / STEP)


def prior(cluster: Cluster, kind: str) -> tuple[Floats, Floats]:
    """Return mean (5,) and covariance (5, 5) of the logarithms of the constants before a log of software `kind`: of the
    cluster's calibration if it has one."""
    table = cluster.calibrated.get(kind)
    if table is None:
        return np.zeros(len(SPREADS)), np.diag(SPREADS**2)
    mean = np.log([table.time[name] for name in CALIBRATED_CONSTANTS])
    return mean, np.array([table.covariance[name] for name in CALIBRATED_CONSTANTS])


def narrowing(derivatives_5: Floats, covariance: Floats) -> float:
    """Return the width of the interval of a step time with this covariance, relative to the width without any log."""
    after, before = (
        MODEL_ERROR**2 + derivatives_5 @ matrix @ derivatives_5 for matrix in (covariance, np.diag(SPREADS**2))
    )
    return float(np.sqrt(after / before))


def interval_narrowing(job: Job, candidates: Candidates) -> float:
    """Return `narrowing` of one layout of a job `on_machine`; 1 without a calibration by logs."""
    covariance: Mapping[str, Sequence[float]] = job.calibration.covariance
    if not covariance:
        return 1.0
    rows = np.array([covariance[name] for name in CALIBRATED_CONSTANTS])
    return narrowing(derivatives(job, candidates), rows)
