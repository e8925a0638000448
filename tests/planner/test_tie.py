"""Which layouts are a tie, with errors set by hand."""

from dataclasses import replace
from math import log

from shardwright.cost.calibration import CALIBRATED
from shardwright.cost.job import Job
from shardwright.planner.choice import PricedLayout, read
from shardwright.planner.recommendation import moved_share, ties
from tests.cost.jobs import job

PIPED = "pp=2,pp_schedule=interleaved-1f1b,virtual_stages=4,dp_shard=4,zero=1,recompute=selective"
PLAIN = "dp_shard=8,zero=2,recompute=selective"


def within(share: float, moved: float = 0.0) -> Job:
    """A job whose differences are predicted within this share of the step, as a logarithm, and this share of what two
    steps spend otherwise."""
    by = replace(CALIBRATED, difference={"base": share, "moved": moved})
    return replace(job(on="h100:8", global_batch=128), calibration=by)


def priced(the_job: Job, text: str) -> PricedLayout:
    return PricedLayout.from_choice(the_job, read(text))


def apart(one: str, other: str) -> float:
    """By how much the second takes longer, as a logarithm."""
    the_job = within(0.1)
    return log(priced(the_job, other).step_s / priced(the_job, one).step_s)


def test_the_error_of_a_difference_grows_with_the_work_that_differs():
    assert moved_share({"matmuls": 6.0, "pipeline": 4.0}, {"matmuls": 6.0, "pipeline": 4.0}) == 0
    assert moved_share({"matmuls": 6.0}, {"matmuls": 5.0, "pipeline": 3.0}) == (1 + 3) / (6 + 8)
    share, moved = apart(PIPED, PLAIN), moved_share(*(priced(within(0.0), text).parts_s for text in (PIPED, PLAIN)))
    for factor, tie in ((1.01, True), (0.99, False)):
        wide = within(0.0, moved=factor * share / moved)
        assert ties(priced(wide, PIPED), priced(wide, PLAIN)) is tie
        assert ties(priced(wide, PLAIN), priced(wide, PIPED)) is tie


def test_an_error_is_fitted_to_pairs_of_published_runs():
    assert 0 < CALIBRATED.difference["base"] < 0.03
    assert 0 < CALIBRATED.difference["moved"] < 0.3
