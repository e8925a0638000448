"""Proves that the time of a whole run is the time of a simulation of failures, and that its choices are best."""

from dataclasses import replace
from functools import cache
from math import log, sqrt
from statistics import fmean

import numpy as np
import pytest

from shardwright.cost.hardware import cluster
from shardwright.cost.job import Job
from shardwright.cost.step import estimate
from shardwright.layout.layout import Layout
from shardwright.model.presets import resolve
from shardwright.planner.choice import Choice, PricedLayout
from shardwright.planner.evaluate import WHOLE_RUNS, PlanEvaluation, evaluate, evaluate_runs
from shardwright.planner.measured_run import PredictableRun
from shardwright.planner.operations import Operations
from shardwright.planner.runs import read_runs
from shardwright.planner.whole_run import (
    DAY_S,
    LATE,
    PlannedStage,
    SavingTime,
    TrainingGoal,
    interval_of_work_s,
    spare_nodes,
    whole_run,
    whole_run_on,
)
from shardwright.system.errors import InputError

JOB = Job(model=resolve("llama-3.1-405b"), cluster=cluster("h100:16384"), global_batch=2048, seq_len=8192)
DOWN_S, BETWEEN_S = 600.0, 11_000.0


def simulated(work_s: float, way: SavingTime, intervals: int, seed: int = 0) -> float:
    """The time of a run divided by its work, event by event: work, waiting for a checkpoint, its completion in the
    background, failures at random times, and restarts that can fail too."""
    random = np.random.default_rng(seed)
    now, done, safe, pending = 0.0, 0, 0, None
    failure = random.exponential(BETWEEN_S)
    while safe < intervals:
        ready = max(now + work_s, pending[0] if pending else 0.0) + way.pause_s
        if pending is not None and pending[0] <= min(ready, failure):
            safe, pending = pending[1], None
        if ready <= failure:
            now, done = ready, done + 1
            pending = (now + way.write_s, done)
        else:
            now, pending = failure, None
            failure = now + random.exponential(BETWEEN_S)
            while failure < now + DOWN_S + way.read_s:
                now, failure = failure, failure + random.exponential(BETWEEN_S)
            now, done = now + DOWN_S + way.read_s, safe
    return now / (intervals * work_s)


WAYS = {
    "sync": SavingTime("sync", 60.0, 0.0, 60.0),
    "async": SavingTime("async", 20.0, 300.0, 100.0),
}


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("work_s", [500.0, 2000.0])
def test_the_formula_gives_the_time_of_a_simulation_of_failures(name: str, work_s: float):
    """20,000 intervals have at least 900 failures, so the standard error of the mean is below 0.5 %."""
    expected = WAYS[name].slowdown_at(work_s, DOWN_S, BETWEEN_S)
    assert simulated(work_s, WAYS[name], 20_000) == pytest.approx(expected, rel=0.015)


@pytest.mark.parametrize("name", WAYS)
def test_no_other_interval_between_checkpoints_is_faster(name: str):
    way = WAYS[name]
    best = interval_of_work_s(way.pause_s, BETWEEN_S)
    times = {by: simulated(best * by, way, round(20_000 / by)) for by in (0.4, 1, 2.5)}
    assert times[1] == min(times.values())
    around = [way.slowdown_at(best * by, DOWN_S, BETWEEN_S) for by in (0.99, 1, 1.01)]
    assert around[1] == min(around)
    assert best == pytest.approx(sqrt(2 * way.pause_s * BETWEEN_S), rel=0.1)  # Young, 1974


def test_a_pause_as_long_as_the_time_between_failures_has_the_interval_of_daly():
    """Daly (2006): for a pause of at least 2 M, the best interval is M."""
    assert interval_of_work_s(1e6, 1.0) == pytest.approx(1.0)
    work = interval_of_work_s(1.0, 1.0)
    assert work == pytest.approx(1 - np.exp(-(work + 1.0)))


@pytest.mark.parametrize("mean", [0.01, 0.7, 6.0, 40.0, 900.0])
def test_the_spare_nodes_suffice_in_95_percent_of_draws_and_one_fewer_does_not(mean: float):
    draws = np.random.default_rng(1).poisson(mean, 200_000)
    spares = spare_nodes(mean)
    assert np.mean(draws <= spares) >= 0.945
    assert spares == 0 or np.mean(draws < spares) < 0.955


def test_more_failures_and_slower_steps_are_outside_of_the_middle_of_the_interval():
    goal = TrainingGoal(15.6e12)
    run = whole_run(JOB, 6.4, (5.8, 7.1), goal)
    low, high = run.interval_days
    doubled = whole_run(JOB, 6.4, (5.8, 7.1), replace(goal, operations=Operations(failures=0.94))).days
    assert low < run.days < doubled < high
    slow, fast = (whole_run(JOB, step_s, (5.8, 7.1), goal).days for step_s in (7.1, 5.8))
    assert low < fast < slow < high
    assert sum(run.parts_days.values()) == pytest.approx(run.days)


def test_a_run_of_llama_3_has_its_interruptions_and_effective_time():
    """The paper: 419 unexpected interruptions in 54 days, more than 90 % effective training time."""
    run = whole_run(JOB, 6.4, (5.8, 7.1), TrainingGoal(15.6e12))
    assert 54 / run.days * run.interruptions == pytest.approx(419, rel=0.02)
    assert 0.9 < run.goodput < 0.97


@pytest.mark.parametrize("tokens", [1e-6, 1.0, 1e9, 1e300])
def test_any_number_of_tokens_has_a_finite_interval(tokens: float):
    run = whole_run(JOB, 6.4, (5.8, 7.1), TrainingGoal(tokens))
    assert 0 < run.interval_days[0] < run.days < run.interval_days[1] < np.inf


def test_a_synchronous_checkpoint_costs_more_and_is_saved_less_often():
    run = whole_run(JOB, 6.4, (5.8, 7.1), TrainingGoal(15.6e12))
    ways = {way.save: way for way in run.saving}
    assert ways["sync"].slowdown > ways["async"].slowdown > ways["local"].slowdown
    assert ways["sync"].every_steps > ways["async"].every_steps


STEPS_PUBLISHED = ("bloom-176b", "llama-3-405b", "megascale-175b", "smollm3")


@pytest.mark.parametrize("name", STEPS_PUBLISHED)
def test_days_of_a_published_run_with_its_published_step_are_within_15_percent(name: str):
    """The step is the published one, so the error is that of failures, restarts and checkpoints, and of the parts of
    the run that its note names."""
    run = next(run for run in read_runs(WHOLE_RUNS) if run.measured.id == name)
    assert isinstance(run, PredictableRun)
    row = run.measured
    assert row.step_time_s is not None
    assert row.tokens is not None
    days = whole_run(run.job, row.step_time_s, (row.step_time_s, row.step_time_s), TrainingGoal(row.tokens)).days
    assert days == pytest.approx(row.days, rel=0.15)


@cache
def published_runs() -> PlanEvaluation:
    return evaluate(WHOLE_RUNS)


def test_a_published_run_loses_the_work_since_its_last_checkpoint():
    """StarCoder saved every 2,500 steps (5 hours), more than ten times the best interval."""
    run = next(run for run in read_runs(WHOLE_RUNS) if run.measured.id == "starcoder")
    best = replace(run, measured=replace(run.measured, save_every=None))
    stated, least = (row.whole for row in evaluate_runs(WHOLE_RUNS, [run, best]).rows)
    assert stated is not None
    assert least is not None
    assert (stated.every_steps, stated.saving) == (2500, least.saving)
    assert stated.every_steps > 10 * least.every_steps
    assert stated.parts_days["lost work"] > 10 * least.parts_days["lost work"]


def test_no_published_step_is_longer_than_its_run():
    """A step time that contradicts the days of its run is no step time of that run."""
    for run in read_runs(WHOLE_RUNS):
        row = run.measured
        if row.days and row.step_time_s and row.tokens:
            steps = row.tokens / (row.global_batch * row.seq_len)
            assert steps * row.step_time_s / DAY_S <= 1.01 * row.days, row.id


def test_every_published_run_with_a_published_step_is_judged_by_it():
    stated = [run.measured.id for run in read_runs(WHOLE_RUNS) if run.measured.days and run.measured.step_time_s]
    assert sorted(stated) == sorted(STEPS_PUBLISHED)


@pytest.mark.prove
def test_nine_of_eleven_published_runs_are_within_15_percent_with_predicted_steps():
    errors = [abs(error) for row in published_runs().rows if (error := row.error("whole run")) is not None]
    assert len(errors) == 11
    assert sum(error <= 0.15 for error in errors) >= 9
    assert published_runs().families[-1].median_absolute <= 0.12
    assert published_runs().families[-1].inside == pytest.approx(10 / 11)


@pytest.mark.prove
def test_delays_of_production_are_a_quantile_over_sources_and_hold_for_a_source_left_out():
    """Each source counts once, with the mean of its runs."""
    late: dict[str, list[float]] = {}
    for row in published_runs().rows:
        if (pair := row.pair("whole run")) and row.whole:
            late.setdefault(row.run.measured.source, []).append(log(pair[1] / row.whole.interval_days[1]) + LATE)
    means = {source: fmean(values) for source, values in late.items()}
    assert len(means) == 9
    assert np.quantile(list(means.values()), 0.9) == pytest.approx(LATE, abs=2e-3)
    without = {source: np.quantile([means[other] for other in means if other != source], 0.9) for source in means}
    assert sum(means[source] <= without[source] for source in means) == 8


def test_a_run_whose_batch_changes_takes_the_sum_of_its_stages():
    job = Job(model=resolve("llama-3.1-8b"), cluster=cluster("h100:16"), seq_len=8192, global_batch=128)
    choice = Choice(Layout(dp_shard=16, zero=3), 2)
    stages = (PlannedStage(0, 16, 8192), PlannedStage(2e9, 128, 4096), PlannedStage(6e9, 128, 8192))
    goal = TrainingGoal(1e10, operations=Operations(failures=1e-6), stages=stages)
    run = whole_run_on(PricedLayout.from_choice(job, choice), (1.0, 1.0), goal)
    sizes = [(2e9, 16, 8192, 1), (4e9, 128, 4096, 2), (4e9, 128, 8192, 2)]
    steps = [tokens / (batch * length) for tokens, batch, length, _ in sizes]
    times = [
        estimate(replace(job, global_batch=batch, seq_len=length), choice.layout, micro).step_s
        for _, batch, length, micro in sizes
    ]
    assert run.steps == pytest.approx(sum(steps))
    assert run.parts_days["steps"] == pytest.approx(sum(n * s for n, s in zip(steps, times, strict=True)) / DAY_S)
    assert [each.days for each in run.stages] == [n * s / DAY_S for n, s in zip(steps, times, strict=True)]
    with pytest.raises(InputError, match="8 sequences of 8,192 tokens on "):
        whole_run_on(
            PricedLayout.from_choice(job, choice), (1.0, 1.0), replace(goal, stages=(PlannedStage(0, 8, 8192),))
        )
