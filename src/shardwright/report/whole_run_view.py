"""The parts of a plan's document about the whole run: days, cost, interruptions, checkpoints, spare nodes."""

from collections.abc import Iterator

from shardwright.cost.hardware import Cluster
from shardwright.planner.error_summary import INTERVAL, bounds_in_words
from shardwright.planner.operations import SAVES
from shardwright.planner.whole_run import WholeRun
from shardwright.system.units import format_bytes, format_count, format_seconds
from shardwright.view.document import (
    COUNT,
    SECONDS,
    SHARE,
    Column,
    Fact,
    Facts,
    Marked,
    Note,
    Part,
    Quantity,
    Section,
    Table,
)

DAYS = Quantity("{:,.2f}".format)


def days_in_words(days: float) -> str:
    """Return days with one decimal, or hours below a day."""
    return f"{days:,.1f} days" if days >= 1 else f"{24 * days:.3g} hours"


def whole_run_parts(run: WholeRun, cluster: Cluster) -> Iterator[Part]:
    """Yield the whole run: its numbers, its days by kind, and each way to save checkpoints."""
    bounds = bounds_in_words(run.interval_days, days_in_words)
    count = f"{run.interruptions:,.0f}" if run.interruptions >= 100 else f"{run.interruptions:.3g}"
    yield Section(f"{format_count(run.tokens)} tokens: {days_in_words(run.days)}")
    yield Facts(
        [
            Fact(INTERVAL, bounds, f"{run.steps:,.0f} steps; goodput {run.goodput:.1%}"),
            Fact("accelerator-hours", f"{run.accelerator_hours:,.0f}", _cost(run)),
            Fact("interruptions", count, f"(one every {format_seconds(run.hours_between * 3600)})"),
            Fact(
                "checkpoints",
                f"every {run.every_steps:,} steps",
                f"({format_seconds(run.every_s)}), {run.save}, {format_bytes(run.checkpoint_bytes)} each{_better(run)}",
            ),
            Fact(
                "spare nodes",
                f"{run.spare_nodes:,}",
                f"in addition to {cluster.nodes:,} (at most as many are being repaired 95 % of the time)",
            ),
        ]
    )
    if run.stages:
        sizes = Column("batch", COUNT), Column("tokens a sequence", COUNT), Column("steps", COUNT)
        batches = [(part.stage.global_batch, part.stage.seq_len) for part in run.stages]
        numbers = [(round(part.steps), part.step_s, part.days) for part in run.stages]
        table = [(*batch, *row) for batch, row in zip(batches, numbers, strict=True)]
        yield Table((*sizes, Column("step", SECONDS), Column("days", DAYS)), table)
    kinds = [(kind, days, days / run.days) for kind, days in run.parts_days.items() if days]
    total = Marked("whole run", "strong"), run.days, None
    yield Table((Column("time"), Column("days", DAYS), Column("share", SHARE)), [*kinds, total])
    columns = (
        Column("checkpoints"),
        Column("training waits", SECONDS),
        Column("complete after", SECONDS),
        Column("best interval", SECONDS),
        Column("steps", COUNT),
        Column("days", DAYS),
    )
    step_days = run.parts_days["steps"] + run.parts_days["evaluation"]
    step_s = run.every_s / run.every_steps
    rows = [
        (
            Marked(way.save, "strong" if way.save == run.save else ""),
            way.pause_s,
            way.pause_s + way.write_s,
            way.every_steps * step_s,
            way.every_steps,
            way.slowdown * step_days,
        )
        for way in run.saving
    ]
    yield Table(columns, rows, "\n".join(f"{way.save}: {SAVES[way.save]}" for way in run.saving))
    yield from (Note(text, "assumed") for text in run.assumed)


def _cost(run: WholeRun) -> str:
    if run.cost is None or run.cost_with_spares is None:
        return "(--price X adds the cost)"
    return f"(they cost {_amount(run.cost)}, with the spare nodes {_amount(run.cost_with_spares)})"


def _amount(cost: float) -> str:
    return f"{cost:,.0f}" if cost >= 100 else f"{cost:,.2f}"


def _better(run: WholeRun) -> str:
    """Return the best interval if the run file or --operations gives another."""
    best = next((way for way in run.saving if way.save == run.save), None)
    if best is None or best.every_steps == run.every_steps:
        return ""
    days = best.slowdown * (run.parts_days["steps"] + run.parts_days["evaluation"])
    return f"; every {best.every_steps:,} steps would take {days_in_words(days)}"
