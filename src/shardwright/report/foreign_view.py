"""The document of `plan --from`: the options that were read, the layout of the file, and its alternatives."""

from collections.abc import Iterator, Sequence
from typing import Any

from shardwright.planner.choice import PricedLayout
from shardwright.planner.document import job_document, layout_document
from shardwright.planner.whole_run import TrainingGoal
from shardwright.planner.words import warnings
from shardwright.readers.foreign_run import ForeignRun, Instead, as_document, options_by_fate
from shardwright.readers.table import NO_COUNTERPART, NO_EFFECT, READ
from shardwright.report.plan_view import job_note, layout_parts
from shardwright.system.units import format_bytes, format_seconds
from shardwright.view.document import Column, Note, Part, Section, Table, VerbDocument


def foreign_view(
    run: ForeignRun,
    assumed: Sequence[str],
    priced: PricedLayout,
    limit_bytes: float,
    others: Sequence[Instead],
    goal: TrainingGoal | None,
) -> VerbDocument:
    """Return the document of a configuration of another system. `assumed`: the assumptions on the cluster; `others`:
    its alternatives."""
    job, reading = priced.job, as_document(run)
    reading["assumed"] += assumed
    data = job_document(job, run.system.name, limit_bytes) | layout_document(priced, limit_bytes, goal)
    parts = [
        Note(f"{run.system.name}: {', '.join(run.files)}"),
        job_note(job, "the model of the file"),
        *_read(run, reading["assumed"]),
        *layout_parts(priced, limit_bytes, goal),
        *_others(priced, others, limit_bytes),
    ]
    alternatives = [_as_document(other) for other in others]
    return VerbDocument(f"{run.files[0]}: the layout", reading | data | {"alternatives": alternatives}, parts)


def _read(run: ForeignRun, assumed: Sequence[str]) -> Iterator[Part]:
    """Yield every option with its place: read, without counterpart, without effect; and the assumptions."""
    fates = options_by_fate(run.records)
    yield Section("Read")
    yield Table(
        [*map(Column, ("option", "value", "line", "here", "note"))],
        [
            (record.option, record.value, _line(record.where, run), record.key, record.note)
            for record in fates.get(READ, [])
        ],
    )
    if assumed or run.skipped:
        yield Section("Assumed")
        yield from (Note(f"  {text}") for text in [*assumed, *run.skipped])
    if missing := fates.get(NO_COUNTERPART, []):
        yield Section("No counterpart here")
        yield from (Note(f"  {record.option} {record.value} ({record.where}): {record.note}") for record in missing)
    if silent := fates.get(NO_EFFECT, []):
        yield Section("No effect on time and memory")
        for note in dict.fromkeys(record.note for record in silent):
            named = ", ".join(
                f"{record.option} ({_line(record.where, run)})" for record in silent if record.note == note
            )
            yield Note(f"  {note}: {named}")


def _line(where: str, run: ForeignRun) -> str:
    """Return a place; with a single file, its line alone."""
    file, _, line = where.rpartition(":")
    return line if file in ("", run.files[0]) and len(run.files) == 1 else where


def _others(priced: PricedLayout, others: Sequence[Instead], limit_bytes: float) -> Iterator[Note]:
    """Yield each alternative with its changes, as lines of the file, and its warnings."""
    if not others:
        yield Note("no layout that the system can run fits; give more accelerators, or change the model or the batch")
    for other in others:
        change = other.priced.step_s / priced.step_s - 1
        yield Note(
            f"{format_seconds(other.priced.step_s)} a step, {abs(change):.1%} {'faster' if change < 0 else 'slower'}, "
            f"{format_bytes(other.priced.peak_bytes)} of {format_bytes(limit_bytes)}",
            "instead",
            "strong",
        )
        for option, before, after in other.changes:
            if before is not None:
                yield Note(f"  - {_pasted(option, before)}")
            if after is not None:
                yield Note(f"  + {_pasted(option, after)}")
        yield from (Note(f"  warning: {warning}") for warning in warnings(other.priced))


def _pasted(option: str, value: str) -> str:
    """Return an option as it is written in a file: a switch of a command line has no value."""
    if not option.startswith("--"):
        return f"{option}{value}" if option.endswith((" = ", ": ", "=")) else f"{option} = {value}"
    return option if value == "true" else f"{option} {value}"


def _as_document(other: Instead) -> dict[str, Any]:
    return {
        "step_s": other.priced.step_s,
        "peak_bytes": other.priced.peak_bytes,
        "layout": other.priced.choice.settings(),
        "changes": [{"option": option, "from": before, "to": after} for option, before, after in other.changes],
    }
