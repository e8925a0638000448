"""The page of `shardwright watch`."""

import math
from collections.abc import Sequence
from datetime import UTC, datetime

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from shardwright.cli.common import console
from shardwright.cli.followed import MOST_RANKS, FollowedRun
from shardwright.report.run_record import resume_command
from shardwright.report.words import layout_in_words, model_in_words
from shardwright.run_folder import (
    CheckpointRecord,
    EvaluationRecord,
    EventRecord,
    TrainRecord,
    checkpoint_name,
    resumable,
    step_of,
)
from shardwright.system.console import visible
from shardwright.system.units import format_bytes, format_count, format_seconds, percent
from shardwright.view.terminal import columns

EVENTS_SHOWN = 8
CHECKPOINTS_SHOWN = 4
LOCAL_SHOWN = 2
"""Most local checkpoints that are shown: the number that a host keeps."""
_HEIGHTS = "▁▂▃▄▅▆▇█"
_WIDTH = 32
"""Width of a chart of values, in characters."""


def page(run: FollowedRun) -> RenderableType:
    """Return the whole page of a run as it was at its last look."""
    title = f"{model_in_words(run.config)}, on {layout_in_words(run.config.layout.layout())}"
    parts: list[RenderableType] = [Text(title, style="bold"), Text(f"{run.folder}: {state_in_words(run)}")]
    parts.append(_numbers(run))
    if (ranks := _ranks(run)) is not None:
        parts += [_rule("Ranks"), ranks]
    if (saved := _checkpoints(run)) is not None:
        parts += [_rule("Checkpoints"), saved]
    if run.events:
        parts += [_rule("Events"), _events(run.events[-EVENTS_SHOWN:])]
    return Group(*parts)


def _rule(name: str) -> Rule:
    return Rule(Text(name, style="bold"), align="left", characters="─", style="dim")


def state_in_words(run: FollowedRun) -> str:
    """`step 40 of 100, 12 s left`, `all 100 steps are done`, `stopped after step 40 of 100: its process is gone`."""
    step, steps, runs = run.step, run.config.steps, run.runs
    if step >= steps:
        return f"all {steps:,} steps are done" + (", the run goes on to its end" if runs else "")
    told = f"step {step:,} of {steps:,}"
    if runs is False:
        return f"stopped after {told}: its process is gone; written last {_ago(run)}; {_way_on(run)}"
    left = f", {format_seconds(run.train[-1].step_s * (steps - step))} of steps left" if run.train else ""
    if runs is None:
        return f"{told}{left}; not a process of this machine, written last {_ago(run)}"
    return f"{told}{left}; written last {_ago(run)}"


def _way_on(run: FollowedRun) -> str:
    """Return how to continue a run whose process is gone, if its launcher (`--max-restarts`, a scheduler) does not."""
    saved = resumable(run.folder, run.config.checkpoint.local)
    if not saved:
        return "no checkpoint is complete, so it can only start anew"
    command = resume_command(run.folder, run.config, run.step)
    return f"unless it is restarted, this continues from step {step_of(saved[-1]):,}: {command}"


def _ago(run: FollowedRun) -> str:
    return f"{format_seconds(max(1.0, round(run.quiet_s)))} ago"


def _numbers(run: FollowedRun) -> Table:
    """Return a table with name and latest value of each logged quantity, and a chart of its values so far."""
    table = Table.grid(padding=(0, 2))
    done = f"{run.step / run.config.steps:.0%}"
    table.add_row("steps", done, ProgressBar(total=run.config.steps, completed=run.step, width=_WIDTH), "")
    train = run.train
    if not train:
        table.add_row("loss", "none", "", Text("no step has been logged yet", style="dim"))
        return table
    last = train[-1]

    def row(name: str, value: str, values: Sequence[float] = (), remark: str = "") -> None:
        table.add_row(name, Text(value, style="bold"), Text(drawn(values, _WIDTH)), Text(remark, style="dim"))

    row("loss", f"{last.loss:.4f}", [record.loss for record in train], f"step {last.step:,}")
    evaluated = [record for record in run.others if isinstance(record, EvaluationRecord)]
    if evaluated:
        losses = [record.loss for record in evaluated]
        row("validation loss", f"{losses[-1]:.4f}", losses, f"step {evaluated[-1].step:,}")
    row("gradient norm", f"{last.grad_norm:.3g}", [record.grad_norm for record in train])
    row("learning rate", f"{last.lr:.2e}", [record.lr for record in train])
    mfu = "n/a" if last.mfu is None else f"{last.mfu:.1%}"
    speeds = [record.tokens_per_s for record in train]
    row("tokens per second", format_count(last.tokens_per_s), speeds, f"MFU {mfu}")
    row("memory", format_bytes(last.memory_bytes), [record.memory_bytes for record in train], "peak of rank 0")
    split = f"data {percent(last.data_s / last.step_s)}, optimizer {percent(last.optimizer_s / last.step_s)}"
    row("step", format_seconds(last.step_s), [record.step_s for record in train], split)
    if last.skipped_steps:
        row("skipped steps", f"{last.skipped_steps:,}")
    return table


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


def _ranks(run: FollowedRun) -> RenderableType | None:
    """Return a table of the ranks' states and computing times; of many ranks, only the slowest."""
    n_ranks = run.config.layout.layout().world_size
    last = run.train[-1] if run.train else None
    own_s = last.own_s_by_rank if last is not None else ()
    order = sorted(range(len(own_s)), key=lambda rank: -own_s[rank])[:MOST_RANKS]
    ranks = sorted(order) if own_s else list(range(min(n_ranks, MOST_RANKS)))
    places = run.places(ranks)
    if n_ranks == 1 or not (places or own_s):
        return None
    table = columns("rank", "host", "phase", "step", "own time", "slowest = 100%")
    for rank in ranks:
        place = places.get(rank)
        own = (format_seconds(own_s[rank]), f"{own_s[rank] / max(own_s):.0%}") if own_s and max(own_s) > 0 else ("", "")
        slow = last is not None and rank in last.stragglers
        table.add_row(
            str(rank),
            Text(place.identity.host if place else ""),
            place.state.phase if place else "",
            f"{place.state.step + 1:,}" if place else "",
            *own,
            style="bold red" if slow else "",
        )
    return Group(table, Text(_slowest(last), style="dim")) if last is not None else table


def _slowest(last: TrainRecord) -> str:
    if last.slowest_rank is None or last.slowest_costs_s is None:
        return ""
    costs = format_seconds(max(last.slowest_costs_s, 0.0))
    return f"rank {last.slowest_rank} takes {costs} a step longer than the median of its peers"


def _checkpoints(run: FollowedRun) -> RenderableType | None:
    there, saved = run.checkpoints, [record for record in run.others if isinstance(record, CheckpointRecord)]
    # A run that is done has deleted its local checkpoints; a run that was killed continues from them.
    local = [] if run.is_done else [record for record in saved if record.local]
    if not there and not local:
        return None
    told = {record.step: record for record in saved if not record.local}
    table = columns("checkpoint", "bytes", "took", "training stood still", left=1)
    for path in there[-CHECKPOINTS_SHOWN:]:
        table.add_row(Text(path.name), *_costs(told.get(step_of(path))))
    for record in local[-LOCAL_SHOWN:]:
        table.add_row(f"{checkpoint_name(record.step)}, local", *_costs(record))
    if len(local) > LOCAL_SHOWN:
        stood_s = format_seconds(sum(record.blocked_s for record in local))
        words = f"{len(local):,} local ones so far, for which training stood still {stood_s} in all"
        return Group(table, Text(words, style="dim"))
    return table


def _costs(saved: CheckpointRecord | None) -> tuple[str, str, str]:
    """Return bytes and seconds of a checkpoint, if they are known."""
    if saved is None:
        return "", "", ""
    return format_bytes(saved.n_bytes), format_seconds(saved.took_s), format_seconds(saved.blocked_s)


def _events(events: Sequence[EventRecord]) -> Table:
    table = columns("time", "event", "after step", "rank", "what", left=5)
    for event in events:
        usual = event.kind in ("start", "save")
        table.add_row(
            _clock_time(event.time),
            event.kind,
            f"{event.step:,}",
            "" if event.rank is None else str(event.rank),
            Text(visible(event.text.partition("\n")[0]), overflow="ellipsis", no_wrap=console.is_terminal),
            style="" if usual else "bold red",
        )
    return table


def _clock_time(time: str) -> str:
    try:
        return f"{datetime.fromisoformat(time).astimezone(UTC):%H:%M:%S}"
    except ValueError:
        return ""
