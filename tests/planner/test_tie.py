"""Which layouts are a tie, and that the simplest of them is recommended; with errors set by hand."""

from dataclasses import replace
from math import log

import numpy as np

from shardwright.cost.calibration import CALIBRATED
from shardwright.cost.hardware import cluster
from shardwright.cost.job import Job
from shardwright.planner.choice import read
from shardwright.planner.pool import Pool
from shardwright.planner.priced import Priced
from shardwright.planner.tie import NEAR, complexity, moved_share, simpler, simplest, simplest_tie, ties
from tests.cost.jobs import job

PIPED = "pp=2,pp_schedule=interleaved-1f1b,virtual_stages=4,dp_shard=4,zero=1,recompute=selective"
PLAIN = "dp_shard=8,zero=2,recompute=selective"
SLOW = "dp_shard=8,zero=2,recompute=full"


def within(share: float, moved: float = 0.0) -> Job:
    """A job whose differences are predicted within this share of the step, as a logarithm, and this share of what two
    steps spend otherwise."""
    by = replace(CALIBRATED, difference={"base": share, "moved": moved})
    return replace(job(on="h100:8", global_batch=128), calibration=by)


def priced(the_job: Job, text: str) -> Priced:
    return Priced.of(the_job, read(text))


def pool(the_job: Job, *texts: str) -> Pool:
    every = [priced(the_job, text) for text in texts]
    steps = np.array([each.step_s for each in every])
    return Pool(the_job, [each.choice.candidates for each in every], steps, np.zeros(len(every)))


def apart(one: str, other: str) -> float:
    """By how much the second takes longer, as a logarithm."""
    the_job = within(0.1)
    return log(priced(the_job, other).step_s / priced(the_job, one).step_s)


def recommended(share: float, best: str, *others: str) -> str:
    the_job = within(share)
    every = [priced(the_job, best), *simpler(priced(the_job, best), pool(the_job, best, *others))]
    return next(text for text in (best, *others) if read(text) == simplest_tie(every).choice)


def in_nodes_of_8(*texts: str) -> list[int]:
    return [int(complexity(read(text).candidates, 8)[0]) for text in texts]


def simplest_listed(share: float, *texts: str) -> str:
    the_job = within(share)
    taken = simplest_tie([priced(the_job, text) for text in texts])
    return next(text for text in texts if read(text) == taken.choice)


def test_fewer_axes_are_simpler_and_then_a_plain_schedule():
    assert in_nodes_of_8("dp_shard=8", PLAIN, "pp=2,dp_shard=4", PIPED, "pp=2,cp=2") == [0, 0, 2, 3, 4]


def test_tp_over_nodes_is_less_simple_than_tp_within_a_node():
    assert in_nodes_of_8("tp=8", "tp=8,pp=2", "tp=16", "tp=6", "tp=8,pp=2,cp=2", "tp=16,pp=2") == [2, 4, 4, 4, 6, 6]
    nodes, over, inside = replace(within(1.0), cluster=cluster("h100:32")), "tp=16,pp=2", "tp=8,pp=4"
    for best, other in ((over, inside), (inside, over)):
        found = [priced(nodes, best), *simpler(priced(nodes, best), pool(nodes, best, other))]
        assert simplest(found).choice == read(inside)


def test_the_simplest_layout_is_recommended_where_the_prediction_cannot_tell_it_from_the_fastest():
    assert 0 < (share := apart(PIPED, PLAIN)) < apart(PIPED, SLOW)
    assert recommended(1.01 * share, PIPED, SLOW, PLAIN) == PLAIN
    assert recommended(0.99 * share, PIPED, SLOW, PLAIN) == PIPED


def test_of_equally_simple_layouts_the_fastest_is_recommended():
    share = apart(PIPED, SLOW)
    assert recommended(1.01 * share, PIPED, SLOW, PLAIN) == PLAIN
    assert recommended(1.01 * share, PIPED, SLOW) == SLOW


def test_the_fastest_layout_is_recommended_where_it_is_the_simplest():
    assert recommended(1.0, PLAIN, SLOW, PIPED) == PLAIN


def test_the_error_of_a_difference_grows_with_the_work_that_differs():
    assert moved_share({"matmuls": 6.0, "pipeline": 4.0}, {"matmuls": 6.0, "pipeline": 4.0}) == 0
    assert moved_share({"matmuls": 6.0}, {"matmuls": 5.0, "pipeline": 3.0}) == (1 + 3) / (6 + 8)
    share, moved = apart(PIPED, PLAIN), moved_share(*(priced(within(0.0), text).parts_s for text in (PIPED, PLAIN)))
    for factor, tie in ((1.01, True), (0.99, False)):
        wide = within(0.0, moved=factor * share / moved)
        assert ties(priced(wide, PIPED), priced(wide, PLAIN)) is tie
        assert ties(priced(wide, PLAIN), priced(wide, PIPED)) is tie


def test_the_simplest_layout_near_the_fastest_is_shown_though_it_does_not_tie():
    the_job = within(0.0)
    assert 0.05 < (share := apart(PIPED, SLOW)) < log(NEAR)
    found = list(simpler(priced(the_job, PIPED), pool(the_job, PIPED, SLOW)))
    assert [each.choice for each in found] == [read(SLOW)]
    assert share > 0
    assert simplest_tie([priced(the_job, PIPED), *found]).choice == read(PIPED)


def test_an_error_is_fitted_to_pairs_of_published_runs():
    assert 0 < CALIBRATED.difference["base"] < 0.03
    assert 0 < CALIBRATED.difference["moved"] < 0.3


def test_of_listed_layouts_the_simplest_that_ties_with_the_first_is_recommended():
    share = apart(PIPED, PLAIN)
    assert simplest_listed(1.01 * share, PIPED, PLAIN, SLOW) == PLAIN
    assert simplest_listed(0.99 * share, PIPED, PLAIN, SLOW) == PIPED
    assert simplest_listed(1.0, PLAIN, SLOW) == PLAIN, "equally simple: the fastest"
