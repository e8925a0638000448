"""Proves that a report tells of a pipeline what its ranks did, next to what their schedule says, and nothing that was
not measured in one step by all of them."""

import json
from pathlib import Path

import pytest

from shardwright.data import prepare as module
from shardwright.data.prepare import prepare
from shardwright.report.headline import headline
from shardwright.report.run_record import read_run
from shardwright.report.timeline import PipelineRecord
from shardwright.runs.folder import timeline_path
from shardwright.schedule.actions import Action
from shardwright.schedule.build import build
from shardwright.schedule.simulate import Times, simulate
from shardwright.system.errors import InputError
from shardwright.training.clock import KEPT_STEPS
from tests.report.runs import (
    EPOCH_S,
    PIPELINE,
    slow_messages,
    train_record,
    usual,
    usual_pipeline,
    write_run,
    write_timeline,
)
from tests.training.runs import train, write_run_file


def pipeline_of(folder: Path) -> PipelineRecord:
    found = read_run(folder).pipeline
    assert found is not None
    return found


def run_of(folder: Path, *overrides: str) -> Path:
    return write_run(folder, [train_record(10)], *PIPELINE, *overrides)


def later(spans: list[tuple[Action, float, float]], seconds: float) -> list[tuple[Action, float, float]]:
    return [(action, start + seconds, end + seconds) for action, start, end in spans]


def test_the_measured_bubble_has_the_messages_and_the_planned_one_has_not(tmp_path: Path) -> None:
    told = pipeline_of(usual_pipeline(tmp_path)).numbers
    without_messages = simulate(build("1f1b", 2, 4), Times())
    assert (told.step, told.schedule, told.n_microbatches) == (50, "1f1b", 4)
    assert told.bubble_measured == pytest.approx(slow_messages().bubble_rate, abs=1e-6)
    assert told.bubble_planned == pytest.approx(without_messages.bubble_rate, abs=1e-6)
    assert told.bubble_planned < told.bubble_measured
    assert told.makespan_s == pytest.approx(slow_messages().makespan, abs=1e-6)
    assert told.makespan_planned_s == pytest.approx(without_messages.makespan, abs=1e-6)
    assert told.action_mean_s == {"F": pytest.approx((1.0, 1.0), abs=1e-6), "B": pytest.approx((2.0, 2.0), abs=1e-6)}
    assert [each.peak_in_flight for each in told.ranks] == [2, 1]
    assert [each.busy_s for each in told.ranks] == pytest.approx([12.0, 12.0], abs=1e-5)
    assert told.clocks_apart_s == pytest.approx(0.0, abs=1e-6)


def test_a_bubble_is_told_apart_into_waiting_for_a_rank_and_the_rest(tmp_path: Path) -> None:
    first = [(Action(0, "F", 0), 0.0, 1.0), (Action(0, "B", 0), 5.0, 7.0)]
    second = [(Action(1, "F", 0), 1.5, 2.5), (Action(1, "B", 0), 3.0, 4.5)]
    write_timeline(run_of(tmp_path, "batch.global_batch=1"), 10, [first, second])
    told = pipeline_of(tmp_path).numbers
    # Rank 0 waits from 1 for what is made at 4.5; rank 1 until 1, and from 4.5 for the end of the step.
    assert [each.bubble_waiting for each in told.ranks] == pytest.approx([3.5 / 7, 3.5 / 7])
    assert [each.bubble_measured for each in told.ranks] == pytest.approx([4 / 7, 4.5 / 7])
    assert told.makespan_planned_s == pytest.approx(1 + 1 + 1.5 + 2, abs=1e-6)


def test_the_work_is_the_same_as_planned_when_a_few_actions_take_long(tmp_path: Path) -> None:
    spans = [list(rank) for rank in slow_messages().spans]
    action, start, end = spans[0][-1]
    spans[0][-1] = action, start, end + 7
    write_timeline(run_of(tmp_path), 10, spans)
    pipeline = pipeline_of(tmp_path)
    told = pipeline.numbers
    work_ms = [sum(end - start for spans in each.spans for _, start, end in spans) for each in pipeline.timelines]
    assert work_ms == pytest.approx([31_000, 31_000])
    assert told.bubble_planned < told.bubble_measured
    assert told.action_mean_s["B"][0] == pytest.approx((3 * 2 + 9) / 4, abs=1e-6)
    assert told.action_median_s["B"][0] == pytest.approx(2.0, abs=1e-6)


def test_a_staggered_schedule_is_counted_as_the_ranks_really_wait(tmp_path: Path) -> None:
    spans = slow_messages("zb-h2").spans
    write_timeline(run_of(tmp_path, "layout.pp_schedule=zb-h2"), 10, spans)
    told = pipeline_of(tmp_path).numbers
    makespan = max(ends for rank in spans for _, _, ends in rank)
    assert told.bubble_measured == pytest.approx(1 - 12 / makespan, abs=1e-6)


def test_a_whole_backward_pass_has_its_own_time_in_the_plan(tmp_path: Path) -> None:
    schedule = build("dualpipe", 2, 4)
    assert {action.op for _, action in schedule.actions()} == {"F", "B", "I", "W"}
    ran = simulate(schedule, Times(comm=0.25)).spans
    ran_less = [[(action, start, end - 0.5 * (action.op == "B")) for action, start, end in spans] for spans in ran]
    write_timeline(run_of(tmp_path, "layout.pp_schedule=dualpipe"), 10, ran_less)
    pipeline = pipeline_of(tmp_path)
    assert pipeline.numbers.action_mean_s["B"] == pytest.approx((1.5, 1.5), abs=1e-6)
    assert (
        pipeline.numbers.action_mean_s["I"]
        == pipeline.numbers.action_mean_s["W"]
        == pytest.approx((1.0, 0.0), abs=1e-6)
    )
    planned = pipeline.timelines[0]
    lengths_ms = {action.op: end - start for spans in planned.spans for action, start, end in spans}
    assert lengths_ms == pytest.approx({"F": 1000, "B": 1500, "I": 1000, "W": 1000}, abs=1e-3)


def test_the_newest_step_is_shown_that_all_ranks_have_written(tmp_path: Path) -> None:
    usual_pipeline(tmp_path)
    write_timeline(tmp_path, 60, slow_messages().spans, EPOCH_S + 100)
    assert pipeline_of(tmp_path).step == 60
    path = timeline_path(tmp_path, 1)
    path.write_text(path.read_text()[:-40])
    assert pipeline_of(tmp_path).step == 50
    path.unlink()
    assert read_run(tmp_path).pipeline is None


def test_what_another_process_or_another_schedule_left_is_not_shown(tmp_path: Path) -> None:
    run_of(tmp_path)
    old, new = slow_messages("zb-h1").spans, slow_messages().spans
    write_timeline(tmp_path, 40, new)
    write_timeline(tmp_path, 50, old, EPOCH_S + 100)
    assert pipeline_of(tmp_path).step == 40
    write_timeline(tmp_path, 60, [new[0], later(new[1], 100.0)], EPOCH_S + 200)
    assert pipeline_of(tmp_path).step == 40


def test_clocks_that_differ_are_told(tmp_path: Path) -> None:
    first, second = slow_messages().spans
    write_timeline(run_of(tmp_path), 10, [first, later(second, -0.75)])
    assert pipeline_of(tmp_path).numbers.clocks_apart_s == pytest.approx(0.25, abs=1e-6)


@pytest.mark.parametrize(
    "damage", ["{half", "[]", '{"step": 50}', '{"step": 50, "zero_s": 1, "actions": [["0F0", 1]]}']
)
def test_a_damaged_line_before_the_last_is_an_error_that_names_it(tmp_path: Path, damage: str) -> None:
    path = timeline_path(usual_pipeline(tmp_path), 1)
    path.write_text(f"{damage}\n" + path.read_text())
    with pytest.raises(InputError, match=r"rank-1\.jsonl, line 1 is not a step of a pipeline.*; remove the file"):
        read_run(tmp_path)


def test_a_run_without_a_pipeline_has_no_such_numbers(tmp_path: Path) -> None:
    run = read_run(usual(tmp_path))
    assert run.pipeline is None
    assert headline(run).pipeline is None


@pytest.mark.prove
def test_a_run_records_its_last_logged_steps_on_the_ranks_of_one_pipeline_and_again_when_resumed(
    tmp_path: Path,
) -> None:
    prepare(Path(module.__file__), tmp_path / "tokens", vocab_size=300, validation=0.0)
    run_file, out = write_run_file(tmp_path, tmp_path / "tokens"), tmp_path / "out"

    # 4 ranks, which are 2 pipelines.
    train(run_file, *setting("layout.pp=2", "layout.pp_schedule=zb-h1", "metrics.every=2", "steps=12"))
    assert sorted(path.name for path in (out / "timeline").iterdir()) == ["rank-0.jsonl", "rank-1.jsonl"]
    assert steps_of(timeline_path(out, 1)) == [12 - 2 * back for back in range(KEPT_STEPS)][::-1]
    pipeline = pipeline_of(out)
    told = pipeline.numbers
    assert (pipeline.step, told.schedule, told.n_microbatches) == (12, "zb-h1", 2)
    assert told.clocks_apart_s < 0.01
    assert 0 < told.bubble_waiting <= told.bubble_measured < 1
    for spans in pipeline.spans:
        edges = [time for _, start, end in spans for time in (start, end)]
        assert edges == sorted(edges)

    train(run_file, "--resume", *setting("layout.pp=2", "layout.pp_schedule=1f1b", "metrics.every=4"))
    told = pipeline_of(out).numbers
    assert (told.step, told.schedule) == (20, "1f1b")
    assert steps_of(timeline_path(out, 0)) == [16, 20]


def setting(*overrides: str) -> list[str]:
    return [word for override in overrides for word in ("--set", override)]


def steps_of(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]
