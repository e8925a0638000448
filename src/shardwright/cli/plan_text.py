"""The printed output of `shardwright plan`."""

from collections.abc import Iterable, Sequence

from shardwright.cli.common import console, print_table, print_text
from shardwright.cost.job import Job
from shardwright.cost.stack import SHARDWRIGHT
from shardwright.planner.alternatives import Alternative
from shardwright.planner.batches import NearBatch
from shardwright.planner.choice import PricedLayout, shortage
from shardwright.planner.headline import accelerator_hours, days, headline, unmeasured
from shardwright.planner.nearest import PlanRemedy
from shardwright.planner.search import Plan
from shardwright.planner.words import (
    ALIKE,
    also_fast,
    choices_in_words,
    compared,
    difference,
    fewer_accelerators,
    host_limit_in_words,
    host_row,
    job_warnings,
    left_out,
    merged,
    remarks,
    verdict,
    warnings,
    why,
    worth_a_row,
)
from shardwright.system.units import GiB, format_bytes, format_count, format_seconds
from shardwright.view.terminal import columns

ROUNDING = 1e-9
"""Share of a step below which a part is only the rounding error of a difference of equal numbers."""


def print_job(job: Job, name: str) -> None:
    """Print the model, the cluster and the batch of the job."""
    console.print(
        f"[bold]{name}[/], {format_count(job.model.n_parameters)} parameters, on [bold]{job.cluster.name}[/]: "
        f"{job.global_batch:,} {'sequence' if job.global_batch == 1 else 'sequences'} of {job.seq_len:,} "
        f"{'token' if job.seq_len == 1 else 'tokens'} a step, {job.precision}, "
        f"{_software(job)}{_within(job)}",
        soft_wrap=True,
    )


def _software(job: Job) -> str:
    if job.compiled or job.stack.name == SHARDWRIGHT.name:
        return "compiled" if job.compiled else "eager"
    return f"software {job.stack.name}"


def _within(job: Job) -> str:
    tokens = job.document_tokens
    return "" if tokens is None else f", attention within documents (sum L^2 / sum L = {tokens:,.0f} tokens)"


def print_plan(
    plan: Plan,
    whole: Plan,
    own: Alternative | None,
    batches: Sequence[NearBatch],
    alternatives: Sequence[Alternative],
    margin: float,
    budget_tokens: float | None,
    took_s: float,
) -> None:
    """Print the layouts to choose from, the recommended layout, the fastest layouts, and why others are not
    recommended. `whole`: the plan of all requested accelerators; `own`: the layout of the run file."""
    taken = plan.recommended
    assert taken is not None
    n_fit, memory = len(plan.pool), plan.job.cluster.accelerator.memory_bytes
    room = f"{format_bytes(plan.limit_bytes)} ({1 - margin:.0%} of {format_bytes(memory)})"
    console.print(
        f"{plan.survey.n_layouts:,} layouts{_restricted(plan)}, {n_fit:,} of them fit in {room}; "
        f"searched in {format_seconds(took_s)}",
        soft_wrap=True,
    )
    _print_compared(plan, taken, own)
    if whole is not plan:
        print_text(fewer_accelerators(plan, whole))
    for remark in remarks(plan):
        print_text(remark)
    for each in batches:
        print_text(
            f"--global-batch {each.global_batch} takes {each.saved:.1%} less time for a token, with "
            f"{each.plan.best[0].choice}"
        )
    console.print()
    print_layout(taken, plan.limit_bytes, budget_tokens)
    if taken.choice != plan.best[0].choice:
        console.print(f"\n[bold]fastest[/]: {plan.best[0].choice}", soft_wrap=True)
        print_text(f"  {why(taken, Alternative('fastest', plan.best[0], None))}")
    if len(plan.best) > 1:
        console.print(f"\n[bold]Of the fastest {len(plan.best)}[/]")
        _print_top(plan, taken)
    if equal := left_out(plan.best, plan.equals):
        print_text(equal)
    rows = merged(alternatives)
    if rows:
        console.print("\n[bold]Why not another[/]")
        _print_alternatives(taken, [row for row in rows if not row[1].as_fast(taken)], plan.limit_bytes)
        if equal := also_fast(taken, alternatives):
            console.print(f"[bold]as fast, within rounding[/]: {equal}", soft_wrap=True)


def _print_compared(plan: Plan, taken: PricedLayout, own: Alternative | None) -> None:
    """Print the layouts to choose from, one line each: the run file's layout first, then the recommended layout."""
    table = columns("", "step", "slower", "memory", "layout", left=1)
    table.columns[-1].justify = "left"
    for name, each in compared(plan, own):
        peak = each.priced.peak_bytes if each.priced else each.nearest[1] if each.nearest else 0.0
        fits = "" if each.priced else ", does not fit"
        step = format_seconds(each.priced.step_s) if each.priced else ""
        slower = verdict(taken, each, plan.limit_bytes) if each.priced and each.choice != taken.choice else ""
        bold = f"[bold]{name}[/]" if each.choice == taken.choice else name
        table.add_row(bold, step, slower, format_bytes(peak) + fits, str(each.choice))
    print_table(table)


def _restricted(plan: Plan) -> str:
    return "" if plan.fixed is None else f" with {plan.fixed}"


def print_layout(priced: PricedLayout, limit_bytes: float, budget_tokens: float | None) -> None:
    """Print one layout: its choices, its speed, its time and memory by part, and its warnings."""
    console.print(f"[bold]{priced.choice}[/]", soft_wrap=True)
    table = columns("", "", "", left=3)
    for row in choices_in_words(priced.job, priced.choice):
        table.add_row(*row)
    table.show_header = False
    console.print(table)
    console.print()
    _print_speed(priced)
    if budget_tokens is not None:
        _print_budget(priced, budget_tokens)
    console.print()
    _print_time(priced)
    console.print()
    _print_memory(priced, limit_bytes)
    if priced.host_bytes_per_node:
        print_text(f"memory of the host: {host_row(priced)}")
    _print_warnings(warnings(priced))


def _print_budget(priced: PricedLayout, budget_tokens: float) -> None:
    console.print(
        f"[bold]{format_count(budget_tokens)} tokens: {days(priced.job, priced.step_s, budget_tokens):,.1f} days[/], "
        f"{accelerator_hours(priced.job, priced.step_s, budget_tokens):,.0f} accelerator-hours "
        f"({budget_tokens / priced.job.tokens:,.0f} steps, without checkpoints, evaluations and failures)",
        soft_wrap=True,
    )


def print_nothing_fits(plan: Plan, margin: float, remedies: Sequence[PlanRemedy]) -> None:
    """Print the layout that is nearest to fitting, and the changes that would make it fit."""
    nearest, memory = plan.survey.nearest, plan.job.cluster.accelerator.memory_bytes
    console.print(
        f"[bold red]nothing fits:[/] all {plan.survey.n_layouts:,} layouts{_restricted(plan)} need more than "
        f"{format_bytes(plan.limit_bytes)} ({1 - margin:.0%} of {format_bytes(memory)}){host_limit_in_words(plan)}",
        soft_wrap=True,
    )
    assert nearest is not None
    print_text(f"nearest: {nearest} needs {shortage(plan.job, nearest, plan.survey.nearest_bytes, plan.limit_bytes)}")
    if remedies:
        console.print("what would make it fit, each tried by itself:")
        for each in remedies:
            print_text(f"  {each.what}")
    else:
        console.print("no single change that was tried (accelerators, sequence length, precision) makes it fit")
    _print_warnings(list(job_warnings(plan.job)))


def print_explained(lines: Iterable[str]) -> None:
    """Print every formula with its numbers, by section."""
    for line in lines:
        if line.startswith(" "):
            print_text(line)
        else:
            console.print(f"[bold]{line}[/]")


def _print_speed(priced: PricedLayout) -> None:
    told, job = headline(priced), priced.job
    console.print(
        f"[bold]a step takes {format_seconds(told.step_s)}[/]: {format_count(told.tokens_per_s)} tokens/s, "
        f"{format_count(told.tokens_per_s_per_accelerator)} on each accelerator",
        soft_wrap=True,
    )
    low, high = map(format_seconds, told.interval_s)
    known = "" if not unmeasured(job) else f"; no measured run is on {job.cluster.accelerator.name}, so this is wide"
    console.print(f"80 % interval: {low} to {high}{known}", soft_wrap=True)
    peak_tflops = job.peak_flops_per_s / 1e12
    peak = f"{peak_tflops:,.0f} TFLOP/s" if peak_tflops >= 10 else f"{peak_tflops:.3g} TFLOP/s"
    again = f"; HFU {told.hfu_full:.1%}, {told.hfu_causal:.1%}" if told.recomputes_flops else ""
    console.print(
        f"MFU {told.mfu_full:.1%} with the full square of attention, {told.mfu_causal:.1%} with its causal half{again} "
        f"(PaLM, arXiv 2204.02311; peak {peak})",
        soft_wrap=True,
    )


def _print_time(priced: PricedLayout) -> None:
    table = columns("time", "s", "share", left=1)
    for kind, seconds in priced.parts_s.items():
        share = seconds / priced.step_s
        if abs(share) > ROUNDING:
            table.add_row(kind, f"{seconds:.4g}", f"{share:.1%}" if abs(share) >= 1e-3 else f"{share:.2%}")
    table.add_row("[bold]step[/]", f"[bold]{priced.step_s:.4g}[/]", "")
    console.print(table)


def _print_memory(priced: PricedLayout, limit_bytes: float) -> None:
    memory = priced.memory
    rank = memory.fullest_rank
    title = f"memory, pp rank {rank}" if priced.choice.layout.pp > 1 else "memory"
    table = columns(title, "GiB", "of limit", left=1)
    for kind, held in memory.kinds.items():
        if (n_bytes := float(held[0, rank])) > 0:
            table.add_row(kind, f"{n_bytes / GiB:.2f}", f"{n_bytes / limit_bytes:.1%}")
    lost = priced.peak_bytes - float(memory.rank_bytes[0, rank])
    table.add_row("allocator", f"{lost / GiB:.2f}", f"{lost / limit_bytes:.1%}")
    over = " [bold red]does not fit[/]" if priced.peak_bytes > limit_bytes else ""
    table.add_row(
        "[bold]peak[/]", f"[bold]{priced.peak_bytes / GiB:.2f}[/]", f"{priced.peak_bytes / limit_bytes:.1%}{over}"
    )
    table.add_row("limit", f"{limit_bytes / GiB:.2f}", "")
    console.print(table)


def _print_warnings(found: Sequence[str]) -> None:
    if found:
        console.print()
    for warning in found:
        console.print("[bold yellow]warning:[/] ", end="")
        print_text(warning)


def _print_top(plan: Plan, taken: PricedLayout) -> None:
    """Print the fastest layouts, each with its differences from the recommended layout."""
    table = columns("", "step s", "slower", "MFU", "GiB", "instead", left=0)
    table.columns[-1].justify, table.columns[-1].overflow = "left", "fold"
    rows = worth_a_row(plan.best, taken)
    for number, each in rows:
        table.add_row(
            str(number),
            f"{each.step_s:.4g}",
            f"{each.step_s / taken.step_s - 1:+.2%}" if each.choice != taken.choice else "",
            f"{headline(each).mfu_full:.1%}",
            f"{each.peak_bytes / GiB:.1f}",
            difference(taken.choice, each.choice),
        )
    console.print(table)
    if more := len(plan.best) - len(rows):
        print_text(f"{more} more of them differ from one of these in one choice, and by less than {ALIKE:.0%}")


def _print_alternatives(best: PricedLayout, rows: Sequence[tuple[str, Alternative]], limit_bytes: float) -> None:
    for name, each in rows:
        console.print(f"[bold]{name}[/]: {verdict(best, each, limit_bytes)}", soft_wrap=True)
        print_text(f"  {each.choice}")
        print_text(f"  {why(best, each)}")
