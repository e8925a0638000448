"""The interval of a step time: its width by hand, wider where less is known, and true of runs that were left out."""

from dataclasses import replace
from math import exp

import numpy as np
import pytest

from shardwright.cost.calibration import CALIBRATED, LEFT_OUT, OTHERS
from shardwright.cost.step import StepTime, step_time
from shardwright.planner.evaluate import MEASURED_RUNS, evaluate
from shardwright.planner.headline import features, interval_s
from tests.cost.jobs import candidates, job

COEFFICIENTS = {
    "base": 0.1,
    "outside": 0.2,
    "experts": 0.3,
    "narrow": 0.05,
    "attention": 0.4,
    "unmeasured": 0.5,
    "software": 0.6,
}


def test_the_width_is_that_of_the_formula():
    the_job = job("mixtral-8x7b", precision="fp8")
    time = StepTime(
        {"matmuls": np.array([6.0]), "attention": np.array([2.0]), "pipeline": np.array([2.0])}, np.array([0])
    )
    by = replace(CALIBRATED, interval=COEFFICIENTS)
    for seen in (True, False):
        kinds = [the_job.stack.speed.kind] * seen
        low, high = interval_s(replace(the_job, calibration=replace(by, software=kinds)), time, by)
        width = exp(0.1 + 0.2 * 0.2 + 0.3 + 0.05 + 0.4 * 0.2 + 0.6 * (not seen))
        assert (float(low[0]), float(high[0])) == pytest.approx((10 / width, 10 * width))


def test_a_run_that_communicates_more_is_known_less_well():
    quiet, loud = candidates(dp_shard=64, zero=1), candidates(tp=16, dp_shard=4, zero=1)
    widths = []
    for of in (quiet, loud):
        time = step_time(job(), of)
        assert features(job(), time)[0, 0] == 1
        low, high = interval_s(job(), time, CALIBRATED)
        widths.append(float(high[0] / low[0]))
    assert widths[1] > widths[0] > 1


@pytest.mark.parametrize(
    ("on", "seen"), [("h100:8", True), ("h200:8", True), ("mi300x:8", False), ("rtx4090:8", False)]
)
def test_an_accelerator_without_one_measured_run_has_a_wider_interval(on: str, seen: bool):
    of, the_job = candidates(dp_shard=8, zero=2), job(on=on)
    die = {the_job.cluster.accelerator.die: CALIBRATED.product_share[OTHERS]}
    measured = replace(CALIBRATED, product_share={**CALIBRATED.product_share, **die})
    halves = []
    for by in (CALIBRATED, measured):
        low, high = interval_s(replace(the_job, calibration=by), step_time(the_job, of), by)
        halves.append(float(high[0] / low[0]) ** 0.5)
    wider = halves[0] / halves[1]
    assert wider == pytest.approx(1 if seen else exp(CALIBRATED.interval["unmeasured"]))
    assert seen or wider > 1.15


def test_no_coefficient_narrows_an_interval():
    for each in (CALIBRATED, *LEFT_OUT.values()):
        assert min(each.interval.values()) >= 0
        assert each.interval["base"] > 0


@pytest.mark.prove
def test_four_of_five_runs_of_families_that_were_left_out_are_inside():
    everything = evaluate(MEASURED_RUNS).families
    (whole,) = (each for each in everything if each.group == "all" and each.quantity == "step time")
    assert whole.n > 450
    assert whole.inside is not None
    assert 0.75 <= whole.inside <= 0.9
