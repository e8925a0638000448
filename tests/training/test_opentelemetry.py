"""Proves that an OpenTelemetry collector gets every number of a run and a span for each phase of each step, and that a
run without an answer from it goes on."""

from pathlib import Path

import pytest

from shardwright.runs.records import EvaluationRecord, TrainRecord, read_events
from shardwright.training.numbers import step_spans
from shardwright.training.run_log import RunLog
from tests.marks import prove, rest_prove
from tests.training.metric_records import RECORD, config
from tests.training.otlp import attributes, collector
from tests.training.runs import records, train, write_run_file

STEP = TrainRecord(**{key: value for key, value in RECORD.items() if key != "kind"}, own_s_by_rank=(0.25, 0.5))


def test_a_collector_gets_each_number_and_each_phase_below_its_step(tmp_path: Path):
    phases = [
        ("data", 10.0, 10.5), ("forward_backward", 10.5, 12.0), ("optimizer", 12.0, 12.25), ("checkpoint", 12.5, 13.0),
        ("data", 13.0, 13.5), ("forward_backward", 13.5, 14.0), ("optimizer", 14.0, 14.5), ("evaluation", 14.5, 15.0),
    ]  # fmt: skip
    with collector() as kept:
        log = RunLog(config(tmp_path, otlp_endpoint=kept.url + "/"), 0, True, 0)
        assert log.traces
        log.write(STEP)
        log.write(EvaluationRecord(3, 3.5, sources={"web": 3.25}))
        log.trace(step_spans(1, phases))
        log.close()
    assert not (tmp_path / "events.jsonl").exists()
    assert kept.resource["service.name"] == "shardwright"
    assert kept.resource["service.instance.id"] == str(tmp_path)
    expected = {(f"shardwright.train.{k}", None, v) for k, v in RECORD.items() if isinstance(v, int | float)}
    expected |= {("shardwright.train.own_s_by_rank", str(rank), 0.25 * (1 + rank)) for rank in (0, 1)}
    expected |= {("shardwright.evaluation.loss", None, 3.5), ("shardwright.evaluation.sources", "web", 3.25)}
    assert expected <= set(kept.gauges)
    spans = {(span.name, attributes(span)["step"]): span for span in kept.spans}
    assert len(spans) == len(kept.spans) == len(phases) + 2
    for (name, step), span in spans.items():
        inside = {"data": "step", "forward_backward": "step", "optimizer": "step"}.get(name)
        assert span.parent_span_id == (spans[inside, step].span_id if inside else b"")
        assert not inside or span.trace_id == spans[inside, step].trace_id
    times = {key: (span.start_time_unix_nano, span.end_time_unix_nano) for key, span in spans.items()}
    assert times["step", 2] == (10 * 10**9, 12_250_000_000)
    assert times["step", 3] == (13 * 10**9, 14_500_000_000)
    assert times["forward_backward", 3] == (13_500_000_000, 14 * 10**9)
    assert times["evaluation", 3] == (14_500_000_000, 15 * 10**9)
    assert times["checkpoint", 2] == (12_500_000_000, 13 * 10**9)


@pytest.mark.parametrize("reason", rest_prove(["400", "Connection refused"], "400"))
def test_a_collector_that_refuses_or_is_away_is_reported_once_without_its_password(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], reason: str
):
    with collector(status=400) as kept:
        if reason != "400":
            kept.stop()
        log = RunLog(config(tmp_path, otlp_endpoint=kept.url.replace("//", "//me:secret@")), 0, True, 0)
        log.write(STEP)
        log.close()
    [event] = read_events(tmp_path)
    assert event.text.startswith("metrics.otlp_endpoint: OpenTelemetry failed (")
    assert reason in event.text
    shown = capfd.readouterr()
    assert "secret" not in event.text + shown.out + shown.err
    assert shown.err == "", "the library's own lines would repeat with every record"
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


@prove
def test_the_spans_of_a_run_last_as_long_as_its_records_say(tokens: Path, tmp_path: Path):
    run_file = write_run_file(tmp_path, tokens)
    with collector() as kept:
        keys = (f"metrics.otlp_endpoint={kept.url!r}", "steps=4", "metrics.every=2", "checkpoint.every=2")
        settings = [word for key in keys for word in ("--set", key)]
        train(run_file, *settings)
        of_rank_0 = list(kept.spans)
        kept.spans.clear()
        train(run_file, *settings, "--set", "metrics.otlp_ranks=all", "--set", f"out={tmp_path}/all")
    of_steps = [attributes(span) for span in kept.spans if span.name == "step"]
    assert sorted((each["rank"], each["step"]) for each in of_steps) == [(r, s) for r in (0, 1) for s in range(1, 5)]
    kept.spans[:] = of_rank_0
    steps = [attributes(span)["step"] for span in kept.spans if span.name == "step"]
    assert steps == [1, 2, 3, 4]
    assert {attributes(span)["rank"] for span in kept.spans} == {0}
    assert {span.name for span in kept.spans} >= {"data", "forward_backward", "optimizer", "checkpoint"}
    for record in records(run_file):
        for phase in ("data", "forward_backward", "optimizer"):
            spans = [span for span in kept.spans if span.name == phase]
            spans = [span for span in spans if record["step"] - 2 < attributes(span)["step"] <= record["step"]]
            lasted_s = sum(span.end_time_unix_nano - span.start_time_unix_nano for span in spans) / 1e9
            assert lasted_s / 2 == pytest.approx(record[f"{phase}_s"], abs=1e-5)
