"""The document of `shardwright watch`."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from shardwright.cli.followed import MOST_RANKS, FollowedRun
from shardwright.report.run_record import resume_command
from shardwright.report.words import layout_in_words, model_in_words
from shardwright.runs.folder import checkpoint_name, resumable, step_of
from shardwright.runs.records import CheckpointRecord, EvaluationRecord, EventRecord, TrainRecord, as_record
from shardwright.system.console import visible
from shardwright.system.units import format_bytes, format_count, format_seconds, percent
from shardwright.view.document import (
    BYTES,
    COUNT,
    NUMBER,
    SECONDS,
    Column,
    Marked,
    Note,
    Part,
    Section,
    Table,
    VerbDocument,
)

EVENTS_SHOWN = 8
CHECKPOINTS_SHOWN = 4
LOCAL_SHOWN = 2
"""Most local checkpoints that are shown: the number that a host keeps."""
_HEIGHTS = "▁▂▃▄▅▆▇█"
_WIDTH = 32
"""Width of a chart of values, in characters."""


def watch_document(run: FollowedRun) -> VerbDocument:
    """Return the document of a run as it was at its last look."""
    title = f"{model_in_words(run.config)}, on {layout_in_words(run.config.layout.layout())}"
    parts = [
        Note(title, tone="strong"),
        Note(f"{run.folder}: {state_in_words(run)}"),
        _numbers(run),
        *_ranks(run),
        *_checkpoints(run),
        *_events(run.events[-EVENTS_SHOWN:]),
    ]
    return VerbDocument(title, _data(run), parts)


def _data(run: FollowedRun) -> dict[str, Any]:
    """Return the JSON document: the state of the run and its newest records."""
    evaluated = [record for record in run.others if isinstance(record, EvaluationRecord)]
    return {
        "folder": str(run.folder),
        "state": state_in_words(run),
        "step": run.step,
        "steps": run.config.steps,
        "running": run.runs,
        "train": as_record(run.train[-1]) if run.train else None,
        "evaluation": as_record(evaluated[-1]) if evaluated else None,
        "checkpoints": [path.name for path in run.checkpoints],
        "events": [dataclasses.asdict(event) for event in run.events[-EVENTS_SHOWN:]],
    }


def state_in_words(run: FollowedRun) -> str:
    """`step 40 of 100, 12 s left`, `all 100 steps are done`, `stopped after step 40 of 100: its process is gone`."""
    step, steps, runs = run.step, run.config.steps, run.runs
    if step >= steps:
        return f"all {steps:,} steps are done" + (", the run continues to its end" if runs else "")
    words = f"step {step:,} of {steps:,}"
    if runs is False:
        return f"stopped after {words}: its process is gone; written last {_ago(run)}; {_way_on(run)}"
    left = f", {format_seconds(_left_s(run))} of steps left" if run.train else ""
    if runs is None:
        return f"{words}{left}; not a process of this machine, written last {_ago(run)}"
    return f"{words}{left}; written last {_ago(run)}"


def _left_s(run: FollowedRun) -> float:
    """Return the seconds of the steps that are left, each as long for a token as the last logged step."""
    last, schedule = run.train[-1], run.config.batch.schedule
    tokens = schedule.tokens(run.config.steps) - schedule.tokens(run.step)
    return last.step_s * tokens / schedule.stage_at(max(0, last.step - 1)).tokens


def _way_on(run: FollowedRun) -> str:
    """Return how to continue a run whose process is gone, if its launcher (`--max-restarts`, a scheduler) does not."""
    saved = resumable(run.folder, run.config.checkpoint.local)
    if not saved:
        return "no checkpoint is complete, so it can only start again from step 0"
    command = resume_command(run.folder, run.config, run.step)
    return f"unless it is restarted, this continues from step {step_of(saved[-1]):,}: {command}"


def _ago(run: FollowedRun) -> str:
    return f"{format_seconds(max(1.0, round(run.quiet_s)))} ago"


def _numbers(run: FollowedRun) -> Table:
    """Return a table with name and latest value of each logged quantity, and a chart of its values so far."""
    done = min(run.step / run.config.steps, 1.0)
    bar = round(done * _WIDTH)
    rows = [("steps", Marked(f"{done:.0%}", "strong"), "━" * bar + "╌" * (_WIDTH - bar), "")]
    columns = tuple(Column("") for _ in rows[0])
    train = run.train
    if not train:
        return Table(columns, [*rows, ("loss", "none", "", "no step has been logged yet")])
    last = train[-1]

    def add(name: str, value: str, values: Sequence[float] = (), remark: str = "") -> None:
        rows.append((name, Marked(value, "strong"), drawn(values, _WIDTH), remark))

    add("loss", f"{last.loss:.4f}", [record.loss for record in train], f"step {last.step:,}")
    evaluated = [record for record in run.others if isinstance(record, EvaluationRecord)]
    if evaluated:
        losses = [record.loss for record in evaluated]
        add("validation loss", f"{losses[-1]:.4f}", losses, f"step {evaluated[-1].step:,}")
        averaged = [record.average_loss for record in evaluated if record.average_loss is not None]
        if averaged:
            add("of the average", f"{averaged[-1]:.4f}", averaged, "of the weights")
    add("gradient norm", f"{last.grad_norm:.3g}", [record.grad_norm for record in train])
    add("learning rate", f"{last.lr:.2e}", [record.lr for record in train])
    mfu = "n/a" if last.mfu is None else f"{last.mfu:.1%}"
    speeds = [record.tokens_per_s for record in train]
    add("tokens per second", format_count(last.tokens_per_s), speeds, f"MFU {mfu}")
    add("memory", format_bytes(last.memory_bytes), [record.memory_bytes for record in train], "peak of rank 0")
    step_s = last.step_s or math.inf
    split = f"data {percent(last.data_s / step_s)}, optimizer {percent(last.optimizer_s / step_s)}"
    add("step", format_seconds(last.step_s), [record.step_s for record in train], split)
    if last.skipped_steps:
        add("skipped steps", f"{last.skipped_steps:,}")
    return Table(columns, rows)


def drawn(values: Sequence[float], width: int) -> str:
    """Return values as a line of at most `width` blocks, from the lowest to the highest; each is the mean of one part.
    A gap is a part without a finite value."""
    if len(values) < 2:
        return ""
    n_blocks = min(width, len(values))
    parts = [values[len(values) * i // n_blocks : len(values) * (i + 1) // n_blocks] for i in range(n_blocks)]
    finite = [[value for value in part if math.isfinite(value)] for part in parts]
    means = [sum(part) / len(part) if part else math.nan for part in finite]
    known = [mean for mean in means if math.isfinite(mean)]
    low, high = min(known, default=0.0), max(known, default=0.0)
    scale = (len(_HEIGHTS) - 1) / (high - low) if high > low else 0.0
    return "".join(_HEIGHTS[round((mean - low) * scale)] if math.isfinite(mean) else " " for mean in means)


def _ranks(run: FollowedRun) -> Iterator[Part]:
    """Yield a table of the ranks' states and computing times; of many ranks, only the slowest."""
    n_ranks = run.config.layout.layout().world_size
    last = run.train[-1] if run.train else None
    own_s = last.own_s_by_rank if last is not None else ()
    order = sorted(range(len(own_s)), key=lambda rank: -own_s[rank])[:MOST_RANKS]
    ranks = sorted(order) if own_s else list(range(min(n_ranks, MOST_RANKS)))
    places = run.places(ranks)
    if n_ranks == 1 or not (places or own_s):
        return
    stragglers = last.stragglers if last is not None else ()
    rows = []
    for rank in ranks:
        place = places.get(rank)
        own = (own_s[rank], f"{own_s[rank] / max(own_s):.0%}") if own_s and max(own_s) > 0 else (None, "")
        state = (place.identity.host, place.state.phase, place.state.step + 1) if place else ("", "", None)
        rows.append((Marked(rank, "bad" if rank in stragglers else ""), *state, *own))
    columns = Column("rank", NUMBER), Column("host"), Column("phase"), Column("step", COUNT)
    yield Section("Ranks")
    yield Table(
        (*columns, Column("own time", SECONDS), Column("slowest = 100%", NUMBER)),
        rows,
        rest=_slowest(last) if last is not None else "",
    )


def _slowest(last: TrainRecord) -> str:
    if last.slowest_rank is None or last.slowest_costs_s is None:
        return ""
    costs = format_seconds(max(last.slowest_costs_s, 0.0))
    return f"rank {last.slowest_rank} takes {costs} a step longer than the median of its peers"


def _checkpoints(run: FollowedRun) -> Iterator[Part]:
    folders, saved = run.checkpoints, [record for record in run.others if isinstance(record, CheckpointRecord)]
    # A run that is done has deleted its local checkpoints; a run that was killed continues from them.
    local = [] if run.is_done else [record for record in saved if record.local]
    if not folders and not local:
        return
    records = {record.step: record for record in saved if not record.local}
    rows = [(path.name, *_costs(records.get(step_of(path)))) for path in folders[-CHECKPOINTS_SHOWN:]]
    rows += [(f"{checkpoint_name(record.step)}, local", *_costs(record)) for record in local[-LOCAL_SHOWN:]]
    rest = ""
    if len(local) > LOCAL_SHOWN:
        stood_s = format_seconds(sum(record.blocked_s for record in local))
        rest = f"{len(local):,} local ones so far, for which training stood still {stood_s} in all"
    columns = Column("checkpoint"), Column("bytes", BYTES), Column("took", SECONDS)
    yield Section("Checkpoints")
    yield Table((*columns, Column("training stood still", SECONDS)), rows, rest=rest)


def _costs(saved: CheckpointRecord | None) -> tuple[float | None, float | None, float | None]:
    """Return bytes and seconds of a checkpoint, if they are known."""
    return (None, None, None) if saved is None else (saved.n_bytes, saved.took_s, saved.blocked_s)


def _events(events: Sequence[EventRecord]) -> Iterator[Part]:
    if not events:
        return
    rows = [
        (
            _clock_time(event.time),
            Marked(event.kind, "" if event.kind in ("start", "save") else "bad"),
            event.step,
            event.rank,
            visible(event.text.partition("\n")[0]),
        )
        for event in events
    ]
    columns = Column("time"), Column("event"), Column("after step", COUNT), Column("rank", NUMBER), Column("what")
    yield Section("Events")
    yield Table(columns, rows)


def _clock_time(time: str) -> str:
    try:
        return f"{datetime.fromisoformat(time).astimezone(UTC):%H:%M:%S}"
    except (ValueError, OverflowError):
        return ""
