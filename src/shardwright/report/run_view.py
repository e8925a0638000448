"""The document of a run: its headline numbers for the terminal and, on a page, its curves, layout, starts, events,
checkpoints and run file."""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from shardwright.report.curves import curves_svg
from shardwright.report.headline import RunHeadline, headline, title_of
from shardwright.report.ranks import has_ranks, ranks_svg
from shardwright.report.run_record import RunRecord
from shardwright.report.timeline import READING, PipelineNumbers
from shardwright.report.words import batch_in_words, layout_in_words, rank_state_words
from shardwright.runs.folder import CHECKPOINTS, EVENTS, METRICS
from shardwright.schedule.draw import svg as timelines_svg
from shardwright.system.files import real_path
from shardwright.system.units import counted, format_count, format_seconds, percent
from shardwright.view.document import (
    CODE,
    COUNT,
    NUMBER,
    SHARE,
    Code,
    Column,
    Fact,
    Facts,
    Note,
    Part,
    Picture,
    Quantity,
    Section,
    Table,
    VerbDocument,
)

_DATE = Quantity(lambda time: f"{datetime.fromisoformat(time).astimezone(UTC):%Y-%m-%d %H:%M} UTC", left=True)
_MILLISECONDS = Quantity(lambda seconds: f"{1000 * seconds:,.1f}")
MOST_ROWS = 400
"""Most rows of a table of a page: the newest starts, events or checkpoints."""


def run_document(run: RunRecord, files: Mapping[str, Path]) -> VerbDocument:
    """Return the document of a run. `files`: the paths of the files that `report` writes, by their keys in the JSON
    document."""
    numbers = headline(run)
    parts: list[Part] = [
        Note(title_of(run), tone="strong"),
        Note(_place(run), tone="quiet"),
        *_alarm(numbers),
        Facts([*numbers.facts(), *_events_in_short(run)]),
    ]
    return VerbDocument(
        f"{real_path(run.folder).name}: {numbers.steps:,} steps",
        dataclasses.asdict(numbers) | {key: str(path) for key, path in files.items()},
        parts,
        list(_page_parts(run, numbers)),
    )


def _place(run: RunRecord) -> str:
    """Return the folder of a run; and date, device, host and versions of its newest start, if they are recorded."""
    if not run.starts:
        return str(run.folder)
    start = run.starts[-1]
    commit = f", git commit {start.git_commit[:12]}" if start.git_commit else ""
    date = f"{_DATE.text(start.time)}, " if start.time is not None else ""
    device = f"{start.world_size} x {start.device} on {start.host}"
    return f"{run.folder}: {date}{device}; torch {start.torch}, shardwright {start.shardwright}{commit}"


def _alarm(numbers: RunHeadline) -> Iterator[Note]:
    if numbers.first_non_finite_step is not None:
        yield Note(f"The loss is not finite at step {numbers.first_non_finite_step:,}.", tone="bad")


def _events_in_short(run: RunRecord) -> Iterator[Fact]:
    if kinds := Counter(event.kind for event in run.faults):
        counts = ", ".join(counted(n, kind) for kind, n in sorted(kinds.items()))
        yield Fact("events", counts, f"(the last: {_first_line(run.faults[-1].text)})")


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def _page_parts(run: RunRecord, numbers: RunHeadline) -> Iterator[Part]:
    every = run.config.metrics.every
    measured = "each step" if every == 1 else f"every {every} steps; speed and time are means over those steps"
    yield Picture(
        "curves",
        "Curves",
        partial(curves_svg, run),
        f"Logged {measured}. MFU is shown where the peak rate of the device is known.",
    )
    if has_ranks(run):
        yield from _ranks(run)
    if run.config.layout.layout().pp > 1:
        yield from _pipeline(run)
    yield from _layout(run)
    if len(run.starts) > 1:
        yield from _starts(run)
    if run.faults:
        yield from _events(run)
    yield from _checkpoints(run, numbers)
    yield Section("Run file")
    yield Note("With every default filled in; `shardwright train` accepts it.", tone="quiet")
    yield Code(run.run_file, narrow=True)


def _ranks(run: RunRecord) -> Iterator[Part]:
    """Yield the times that the ranks compute, and the ranks that were slow."""
    records = [record for record in run.train if record.own_s_by_rank]
    costs_s = sum(record.slowest_costs_s or 0.0 for record in records)
    share = costs_s / (sum(record.step_s for record in records) or 1.0)
    often, n_times = Counter(record.slowest_rank for record in records).most_common(1)[0]
    named = sorted({rank for record in run.train for rank in record.stragglers})
    slow = f"Stragglers: {', '.join(map(str, named))}; the events say when." if named else "No rank was a straggler."
    yield Picture(
        "ranks",
        "Ranks",
        partial(ranks_svg, run),
        "Time for data and computation without waiting for other ranks. Stages of a pipeline are unequal.",
    )
    yield Note(
        f"{slow} The slowest rank of each record, most often rank {often} ({n_times} of {len(records)}), takes longer "
        f"than the median of its peers by {percent(share)} of the time in steps."
    )


def _pipeline(run: RunRecord) -> Iterator[Part]:
    """Yield a step of the pipeline, as planned and as measured."""
    yield Section("Pipeline")
    if run.pipeline is None:
        pp = run.config.layout.layout().pp
        yield Note(
            f"No step has been recorded by all {pp} ranks of the pipeline yet, or their clocks are further apart than "
            f"a step is long."
        )
        return
    step, timelines = run.pipeline.numbers, run.pipeline.timelines
    sent = step.bubble_measured - step.bubble_waiting
    yield Note(
        f"In step {step.step:,} the ranks did nothing for {step.bubble_measured:.1%} of the time; the schedule, "
        f"{step.schedule}, leaves {step.bubble_planned:.1%}. For {step.bubble_waiting:.1%} another rank had not yet "
        f"computed the input of the next action; in the rest, {sent:.1%}, the input was being sent, or the rank "
        f"started late."
    )
    if step.clocks_apart_s > 0.001 * step.makespan_s:
        yield Note(
            f"The clocks of the ranks differ by {format_seconds(step.clocks_apart_s)} or more: an action is seen to "
            f"start before what it needs was made, and rows are shifted by as much.",
            tone="bad",
        )
    yield Picture("pipeline", "", lambda: timelines_svg(timelines), READING, own_scale=True)
    yield _bubbles(step)


def _bubbles(step: PipelineNumbers) -> Table:
    columns = (
        Column("rank", NUMBER),
        Column("busy ms", _MILLISECONDS),
        Column("bubble planned", SHARE),
        Column("bubble measured", SHARE),
        Column("peak in flight", Quantity("{:g}".format)),
    )
    return Table(
        columns,
        [
            (of_rank.rank, of_rank.busy_s, of_rank.bubble_planned, of_rank.bubble_measured, of_rank.peak_in_flight)
            for of_rank in step.ranks
        ],
        rest="A bubble is the share of the time from the first start of any rank to the last end of any. In flight: "
        "micro-batches between their F and the end of their B or I, each weighted by its part of the rank's layers.",
    )


def _layout(run: RunRecord) -> Iterator[Part]:
    layout = run.config.layout.layout()
    stages = f"The layers are partitioned into {layout.n_stages} stages; the schedule is {layout.pp_schedule}. "
    yield Section("Layout")
    yield Note(f"{layout_in_words(layout)}. {stages if layout.pp > 1 else ''}{rank_state_words(layout)}")
    for stage, words in batch_in_words(run.config):
        yield Note(f"{f'After step {stage.from_step:,} a' if stage.from_step else 'A'} step trains on {words}.")


def _starts(run: RunRecord) -> Iterator[Part]:
    """Yield the starts of a run that was resumed, and its speed after each."""
    ends = [*(start.step for start in run.starts[1:]), max(run.last_step, run.starts[-1].step)]
    rows: list[tuple[Any, ...]] = []
    for start, end in zip(run.starts, ends, strict=True):
        speeds = [record.tokens_per_s for record in run.train_after(start.step, end)]
        rows.append(
            (
                f"{start.step + 1:,} to {end:,}" if end > start.step else "none",
                start.layout,
                format_count(median(speeds)) if speeds else "n/a",
                start.time,
                start.host,
                start.device,
                start.git_commit[:12] if start.git_commit else "",
            )
        )
    columns = Column("steps"), Column("layout"), Column("median tokens/s", NUMBER), Column("started", _DATE)
    yield Section("Starts")
    yield _newest((*columns, Column("host"), Column("device"), Column("git commit")), rows, METRICS)


def _events(run: RunRecord) -> Iterator[Part]:
    """Yield the faults and omissions of a run."""
    columns = (
        Column("time", _DATE),
        Column("event"),
        Column("after step", COUNT),
        Column("rank", NUMBER),
        Column("what"),
    )
    rows = [
        (event.time, event.kind, event.step, "all" if event.rank is None else event.rank, _first_line(event.text))
        for event in run.faults
    ]
    yield Section("Events")
    yield _newest(columns, rows, EVENTS)


def _newest(columns: Sequence[Column], rows: Sequence[Sequence[Any]], place: str) -> Table:
    """Return a table of the last rows, and how many there are. `place`: file or folder of a run that has all rows."""
    left_out = len(rows) > MOST_ROWS
    rest = f"The newest {MOST_ROWS} of {len(rows):,}; all of them are in {place}." if left_out else ""
    return Table(columns, rows[-MOST_ROWS:], rest)


def _checkpoints(run: RunRecord, numbers: RunHeadline) -> Iterator[Part]:
    yield Section("Checkpoints")
    if not run.checkpoints:
        yield Note("None has been saved.")
        return
    yield _newest((Column("", CODE),), [(name,) for name in run.checkpoints], CHECKPOINTS)
    more = "take more steps" if numbers.steps >= numbers.planned_steps else "continue from the last one"
    yield Note(f"To {more}, on these ranks or others:")
    yield Code(run.resume_command)
    newest = run.folder / CHECKPOINTS / run.checkpoints[-1]
    yield Note("Another run starts from one of them with:", tone="quiet")
    yield Code(f"--set checkpoint.resume={newest} --set out=...")
