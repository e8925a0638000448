"""Proves that what a run writes in its folder is what is read from it."""

import json
import math
import os
import resource
from dataclasses import replace
from pathlib import Path

import pytest

from shardwright.runs.folder import EVENTS, checkpoint_name, now, published
from shardwright.runs.records import (
    EvaluationRecord,
    EventRecord,
    GrowingFile,
    PipelineStep,
    StartRecord,
    TrainRecord,
    append_event,
    as_record,
    read_events,
    read_metrics,
    read_pipeline_steps,
)
from shardwright.system.errors import InputError

DENSE = TrainRecord(1, 6.0, 0.5, 3e-4, 64, 1000.0, 500.0, 0.01, None, 2**20, 0.064, 0.004, 0.05, 0.01)


def test_records_and_pipeline_steps_are_read_as_they_were_written_and_half_a_line_is_left_out(tmp_path: Path):
    moe = replace(DENSE, step=2, load_by_layer=(1.5, 2.0), dropped_fraction=0.0)
    start = StartRecord(
        0, "1 rank", "one rank", "constant", 1, "host", "cpu", "2.13", "0.1", time="2026-11-22T10:52:20+00:00"
    )
    told = [start, EvaluationRecord(0, 6.2, now()), DENSE, moe]
    (tmp_path / "metrics").write_text("".join(json.dumps(as_record(each)) + "\n" for each in told) + '{"kind": "tra')
    assert list(read_metrics(tmp_path / "metrics")) == told
    assert "load_by_layer" not in as_record(DENSE)
    assert as_record(DENSE)["mfu"] is None
    step = PipelineStep(5, 1, 1.7e9, (("1F0", 0.0, 0.25), ("1B0", 0.5, 1.0)))
    (tmp_path / "timeline").write_text(step.line() + step.line()[:20])
    assert list(read_pipeline_steps(tmp_path / "timeline")) == [step]


def test_numbers_times_and_texts_that_cannot_be_shown_are_read_as_what_can(tmp_path: Path):
    texts = {"device": "\x1b[31m\u202e", "torch": "2\nb\tc", "checkpoint": "s3://KEY:SECRET@b/x"}
    texts["time"] = "9999-12-31T23:59:59-14:00"
    start = as_record(StartRecord(0, "1 rank", "one rank", "constant", 1, "host", "cpu", "2.13", "0.1")) | texts
    evaluation = {"kind": "evaluation", "step": 1, "loss": 1.7e308, "sources": {"\x07\na": -1e39}, "time": "no date"}
    event = {"kind": "fault", "step": 1, "text": "https://u:SECRET@h/x \x1b[2J", "time": now()}
    lines = [json.dumps(each, ensure_ascii=escaped) for each in (start, evaluation) for escaped in (True, False)]
    (tmp_path / "metrics").write_text("\n".join(lines) + "\n")
    (tmp_path / EVENTS).write_text(json.dumps(event) + "\n")
    first, again, *evaluations = read_metrics(tmp_path / "metrics")
    assert first == again
    assert isinstance(first, StartRecord)
    assert (first.device, first.checkpoint, first.time) == ("\\x1b[31m\\u202e", "s3://***@b/x", None)
    assert first.torch == "2\\x0ab\\x09c", "a name does not begin a line of its own"
    assert evaluations == [EvaluationRecord(1, math.inf, None, {"\\x07\\x0aa": -math.inf})] * 2
    assert read_events(tmp_path)[0].text == "https://***@h/x \\x1b[2J"
    foreign = {**event, "text": "TEXT"}
    for written, shown in ((r"a\b\f\rb", r"a\x08\x0c\x0db"), (r"s3:\/\/KEY:SECRET@bucket", "s3://***@bucket")):
        (tmp_path / EVENTS).write_text(json.dumps(foreign).replace("TEXT", written) + "\n")
        assert read_events(tmp_path)[0].text == shown


def test_published_checkpoints_are_in_the_order_of_their_steps(tmp_path: Path):
    for name in (checkpoint_name(100_000_000), checkpoint_name(50), "step-00000060.partial", "other"):
        (tmp_path / name).mkdir()
    assert [path.name for path in published(tmp_path)] == ["step-00000050", "step-100000000"]
    assert published(tmp_path / "none") == []


EVENT_LIST = [EventRecord("fault", step, "the disk is full", rank=1) for step in range(3)]


def test_an_event_that_a_full_disk_takes_half_of_is_not_there_and_the_next_one_is(tmp_path: Path):
    file = tmp_path / EVENTS
    append_event(tmp_path, EVENT_LIST[0])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 20, limits[1]))
    try:
        append_event(tmp_path, EVENT_LIST[1])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    append_event(tmp_path, EVENT_LIST[2])
    assert len(file.read_text().splitlines()) == 2
    assert read_events(tmp_path) == [EVENT_LIST[0], EVENT_LIST[2]]


def test_an_event_after_the_half_one_of_a_killed_process_is_read_and_a_damaged_one_refused(tmp_path: Path):
    file, growing = tmp_path / EVENTS, GrowingFile(tmp_path / EVENTS)
    append_event(tmp_path, EVENT_LIST[0])
    os.truncate(file, file.stat().st_size - 20)
    assert growing.new_lines() == (True, [])
    append_event(tmp_path, EVENT_LIST[1])
    assert read_events(tmp_path) == [EVENT_LIST[1]]
    assert len(growing.new_lines()[1]) == 2
    file.write_text(file.read_text() + '{"kind": 5}\n')
    with pytest.raises(InputError, match="line 3 is not an event"):
        read_events(tmp_path)
