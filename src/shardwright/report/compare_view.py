"""The document of `plan --compare`: the recommended layout of each cluster, and with a goal the whole run on each."""

from collections.abc import Sequence
from typing import Any

from shardwright.planner.choice import PricedLayout, shortage
from shardwright.planner.document import job_document, layout_document
from shardwright.planner.error_summary import INTERVAL, bounds_in_words
from shardwright.planner.headline import headline
from shardwright.planner.search import Plan
from shardwright.planner.whole_run import StageError, TrainingGoal, WholeRun, whole_run_on
from shardwright.report.whole_run_view import days_in_words
from shardwright.system.units import GiB, format_count
from shardwright.view.document import (
    CHANGE,
    CODE,
    COUNT,
    FOUR_DIGITS,
    SHARE,
    Column,
    Note,
    Part,
    Quantity,
    Table,
    VerbDocument,
)

MEMORY = Quantity(lambda n_bytes: f"{n_bytes / GiB:.1f}")
EACH = Quantity(format_count)
DAYS = Quantity("{:,.1f}".format)


def compare_view(name: str, plans: Sequence[Plan], goal: TrainingGoal | None) -> VerbDocument:
    """Return the document. The rows are in the order of the clusters; with a goal, notes rank them by days and cost."""
    job, first = plans[0].job, plans[0].recommended
    columns = [
        Column("cluster"),
        Column("step s", FOUR_DIGITS),
        Column("change", CHANGE),
        Column("tokens/s each", EACH),
    ]
    columns += [Column("MFU", SHARE), Column("GiB", MEMORY)]
    columns += [Column("days", DAYS), Column("accelerator-hours", COUNT), Column("cost", COUNT)] if goal else []
    rows: list[tuple[Any, ...]] = []
    runs: dict[str, WholeRun] = {}
    for plan in plans:
        taken = plan.recommended
        if taken is None:
            assert plan.survey.nearest is not None
            lacks = shortage(plan.job, plan.survey.nearest, plan.survey.nearest_bytes, plan.limit_bytes)
            rows.append((plan.job.cluster.name, *[None] * (len(columns) - 1), f"nothing fits: {lacks}"))
            continue
        cells: tuple[Any, ...] = ()
        choice = str(taken.choice)
        if goal is not None:
            try:
                run = runs[plan.job.cluster.name] = _run(taken, goal)
                cells = run.days, round(run.accelerator_hours), None if run.cost is None else round(run.cost)
            except StageError as error:
                cells, choice = (None, None, None), f"{choice}; not the whole run: {error}"
        rows.append((*_cells(taken, first), *cells, choice))
    parts: list[Part] = [
        Note(f"{name}: {job.global_batch:,} sequences of {job.seq_len:,} tokens a step, {job.precision}"),
        Table((*columns, Column("recommended", CODE)), rows),
    ]
    if first is not None:
        low, high = (bound / first.step_s for bound in headline(first).interval_s)
        bounds = bounds_in_words((low, high), "{:.0%}".format)
        parts.append(Note(f"{bounds} of the prediction for the first", INTERVAL))
    parts += _ranks(runs)
    return VerbDocument(f"{name} on {len(plans)} clusters", _document(name, plans, goal), parts)


def _cells(taken: PricedLayout, first: PricedLayout | None) -> tuple[Any, ...]:
    numbers = headline(taken)
    slower = taken.step_s / first.step_s - 1 if first is not None and taken is not first else None
    rate, mfu = numbers.tokens_per_s_per_accelerator, numbers.mfu_full
    return taken.job.cluster.name, taken.step_s, slower, rate, mfu, taken.peak_bytes


def _run(taken: PricedLayout, goal: TrainingGoal) -> WholeRun:
    return whole_run_on(taken, headline(taken).interval_s, goal)


def _ranks(runs: dict[str, WholeRun]) -> list[Note]:
    """Return the clusters by days and by cost."""
    if len(runs) < 2:
        return []
    by_days = sorted(runs.items(), key=lambda pair: pair[1].days)
    notes = [Note(", ".join(f"{name} {days_in_words(run.days)}" for name, run in by_days), "by time")]
    costs = {name: run.cost for name, run in runs.items() if run.cost is not None}
    if missing := ", ".join(name for name in runs if name not in costs):
        return [
            *notes,
            Note(f"no price for {missing}; add --price X, or --price NAME=X of an accelerator", "by cost"),
        ]
    by_cost = sorted(costs.items(), key=lambda pair: pair[1])
    return [*notes, Note(", ".join(f"{name} {cost:,.0f}" for name, cost in by_cost), "by cost")]


def _document(name: str, plans: Sequence[Plan], goal: TrainingGoal | None) -> dict[str, Any]:
    compared = []
    for plan in plans:
        taken = plan.recommended
        layout = None if taken is None else layout_document(taken, plan.limit_bytes, goal)
        compared.append(job_document(plan.job, name, plan.limit_bytes) | {"recommended": layout})
    return {"compared": compared}
