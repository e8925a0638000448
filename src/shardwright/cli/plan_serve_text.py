"""The printed output of `shardwright plan serve`."""

from itertools import islice
from math import inf
from typing import TYPE_CHECKING

import numpy as np
from rich.table import Table

from shardwright.cli.common import console, print_table, print_text
from shardwright.serving.search import PERCENTILE, ServingPlan, ServingTask, SimulatedOption
from shardwright.serving.simulate import ServedTimes
from shardwright.serving.words import SIMULATED, reasons, simulated_cells, usable
from shardwright.system.units import format_bytes, format_count, format_seconds
from shardwright.view.terminal import columns

if TYPE_CHECKING:
    from shardwright.serving.separate import SimulatedSplit

OTHERS = 12
POINTS = 12


def print_task(task: ServingTask, name: str, n_settings: int) -> None:
    """Print the serving task and the number of priced settings."""
    serving = task.serving
    print_text(
        f"{name}, {format_count(serving.model.n_parameters)} parameters, on {serving.cluster.name}: prompts of "
        f"{task.input_len:,} tokens, answers of {task.output_len:,}; weights {serving.precision}, cache "
        f"{serving.kv_precision}; constants of {task.engine.name}"
    )
    asked = "as many requests as give most tokens/s"
    if task.concurrency is not None:
        asked = f"{task.concurrency:,} requests at a time"
    elif task.rate_per_s is not None:
        asked = f"{task.rate_per_s:g} requests/s"
    limits = [
        f"{what} {format_seconds(limit)}"
        for what, limit in (("first token", task.ttft_s), ("further token", task.tpot_s))
        if limit < inf
    ]
    said = f"; limits for {PERCENTILE} of 100 requests: {', '.join(limits)}" if limits else ""
    print_text(f"{asked}{said}; {n_settings:,} settings priced")


def print_plan(plan: ServingPlan) -> None:
    """Print the best layout, the next best ones, other choices and the Pareto curve."""
    task, best = plan.task, plan.best[0]
    console.print()
    _print_best(plan, best)
    print_text(f"\nThe best {len(plan.best)}, simulated")
    table = columns(*SIMULATED, left=1)
    for each in plan.best:
        table.add_row(*simulated_cells(each))
    print_table(table)
    _print_others(plan)
    if task.concurrency is None and task.rate_per_s is None:
        _print_pareto(plan)


def _print_best(plan: ServingPlan, best: SimulatedOption) -> None:
    task = plan.task
    at = plan.layouts.index(best.layout)
    weights, working, token, cache = (
        float(np.broadcast_to(each, len(plan.layouts))[at])
        for each in (plan.memory.weights, plan.memory.working, plan.memory.token, plan.memory.cache)
    )
    print_text(f"best: {best.layout}, at most {best.option.batch:,} requests in each instance")
    table = columns("", "", left=2)
    table.show_header = False
    table.add_row("  tokens/s", f"{best.tokens_per_s:,.0f}; {best.per_accelerator:,.0f} of each accelerator, "
                  f"{best.per_user:,.1f} of each user")  # fmt: skip
    _add_latencies(table, best.served)
    table.add_row(
        "  memory",
        f"weights {format_bytes(weights)}, working {format_bytes(working)}, cache {format_bytes(cache)} "
        f"= {plan.largest[at]:,.0f} requests of {format_bytes(token * task.length)} on each rank",
    )
    if (cost := best.cost_per_million(task)) is not None:
        table.add_row(
            "  cost", f"{cost:.3g} for a million output tokens at {task.price_per_hour:g} an accelerator-hour"
        )
    if task.speculation.drafted:
        said = f"{task.speculation.accepted:.2f} tokens in each pass, {task.speculation.drafted} of them drafted"
        table.add_row("  speculation", said)
    print_table(table)


def _add_latencies(table: Table, served: ServedTimes) -> None:
    """Add rows with the seconds to the first token and of each further token."""
    for what, value in (("first token", served.first_s), ("further token", served.further_s)):
        said = ", ".join(f"{format_seconds(value(each))} for {each} of 100" for each in (50, PERCENTILE, 99))
        table.add_row(f"  {what}", said)


def _print_others(plan: ServingPlan) -> None:
    found = list(islice(reasons(plan), OTHERS))
    if not found:
        return
    print_text("\nOther layouts, by closed forms")
    table = columns("layout", "why not", left=2)
    for layout, _, why in found:
        table.add_row(str(layout), why)
    print_table(table)
    if (more := len(plan.layouts) - 1 - len(found)) > 0:
        print_text(f"and {more:,} more")


def _print_pareto(plan: ServingPlan) -> None:
    print_text("\nTokens/s of an accelerator against those of a user; no setting has more of both")
    table = columns("of a user", "of an accelerator", "batch", "layout", left=0)
    table.columns[-1].justify = "left"
    step = max(1, -(-len(plan.pareto) // POINTS))
    for each in plan.pareto[::step]:
        row = f"{1 / each.tpot_s:,.1f}", f"{each.per_accelerator():,.1f}", f"{each.batch:,}", str(each.layout)
        table.add_row(*row)
    print_table(table)


def print_nothing_fits(plan: ServingPlan, remedies: list[str]) -> None:
    """Print the memory that the weights need, and the changes that would make them fit."""
    least = int(np.argmin(plan.memory.weights + plan.memory.working))
    weights = float(np.broadcast_to(plan.memory.weights, len(plan.layouts))[least])
    working = float(np.broadcast_to(plan.memory.working, len(plan.layouts))[least])
    token = float(np.broadcast_to(plan.memory.token, len(plan.layouts))[least])
    print_text(
        f"\nnothing fits: {plan.layouts[least]} needs least, {format_bytes(weights)} of weights + "
        f"{format_bytes(working)} of working memory + {format_bytes(token * plan.task.length)} for one request, of "
        f"{usable(plan.task)}"
    )
    print_text(
        f"would fit: {'; '.join(remedies)}"
        if remedies
        else "no other precision and no larger cluster would make it fit"
    )


def print_no_limits_kept(plan: ServingPlan) -> None:
    """Print the best possible value of each limited quantity."""
    task = plan.task
    first = min(plan.options, key=lambda each: each.ttft_s)
    further = min(plan.options, key=lambda each: each.tpot_s)
    most = max(plan.options, key=lambda each: each.tokens_per_s)
    print_text("\nno layout keeps the limits")
    if task.ttft_s < inf:
        print_text(
            f"  shortest time to the first token: {format_seconds(first.ttft_s)}, {first.layout} with {first.batch}"
        )
    if task.tpot_s < inf:
        print_text(
            f"  shortest time of a further token: {format_seconds(further.tpot_s)}, {further.layout} with "
            f"{further.batch}"
        )
    if task.rate_per_s is not None:
        said = f"{most.tokens_per_s / task.output_len:.3g} requests/s, {most.layout} with {most.batch}"
        print_text(f"  most requests: {said}; {task.rate_per_s:g} requests/s were asked for")
    if plan.missed:
        nearest = min(
            plan.missed,
            key=lambda each: max(each.ttft_s(PERCENTILE) / task.ttft_s, each.tpot_s(PERCENTILE) / task.tpot_s),
        )
        print_text(
            f"  nearest as simulated: {nearest.layout} with {nearest.option.batch}: {PERCENTILE} of 100 requests have "
            f"their first token within {format_seconds(nearest.ttft_s(PERCENTILE))} and further ones within "
            f"{format_seconds(nearest.tpot_s(PERCENTILE))}"
        )


def print_separate(task: ServingTask, apart: "SimulatedSplit | None", plan: ServingPlan) -> None:
    """Print prefill and decode on separate accelerators, compared with both on the same ones."""
    print_text("\nPrefill and decode on separate accelerators, simulated")
    if apart is None:
        print_text("  no split of the cluster fits and keeps the limits")
        return
    split, crossed = apart.split, apart.crossed
    together = ""
    if plan.best:
        share = apart.per_accelerator() / plan.best[0].per_accelerator - 1
        together = f", {share:+.0%} against the best layout above"
    under_way = f"; {apart.requests:,} requests at a time" if apart.requests is not None else ""
    table = columns("", "", left=2)
    table.show_header = False
    table.add_row("  prefill", f"{split.readers} x ({split.prefill})")
    table.add_row("  decode", f"{split.writers} x ({split.decode}), at most {split.batch:,} requests each{under_way}")
    table.add_row(
        "  tokens/s", f"{apart.tokens_per_s:,.0f}; {apart.per_accelerator():,.0f} of each accelerator{together}"
    )
    _add_latencies(table, apart.crossed.served)
    table.add_row(
        "  of the first",
        f"{format_seconds(float(crossed.queued_s.mean()))} in the line before prefill, "
        f"{format_seconds(float(crossed.transfer_s.mean()))} for the transfer of the cache, on average",
    )
    print_table(table)
