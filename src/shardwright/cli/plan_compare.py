"""shardwright plan --compare: the same job on several clusters, one line for each."""

from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from shardwright.cli.common import console, error_console, print_json, print_table, print_text
from shardwright.cli.plan_asked import PlanOptions, PlanRequest, changed_cluster, no_peak
from shardwright.system.errors import InputError, LayoutError, nearest
from shardwright.system.units import GiB, format_count
from shardwright.view.terminal import columns

if TYPE_CHECKING:
    from shardwright.cost.hardware import Cluster
    from shardwright.planner.search import Plan

CHANGES = ("link", "network")


def compare(asked: PlanRequest, options: PlanOptions) -> None:
    """Search on the requested cluster and on each cluster of --compare, and print the recommended layout of each.

    Raises InputError for unknown clusters, and typer.Exit(1) if nothing fits on any cluster.
    """
    from shardwright.cost.machine import on_machine
    from shardwright.planner.search import search
    from shardwright.system.control_groups import usable_cores

    wrong: list[str] = []
    clusters = [asked.job.cluster, *(_cluster(text, options, asked.job.precision, wrong) for text in _others(options))]
    if wrong:
        raise InputError(*wrong)
    found: list[Plan] = []
    with error_console.status("evaluating every layout") as status:
        for cluster in clusters:
            status.update(f"evaluating every layout of {cluster.name}")
            try:
                job = on_machine(replace(asked.anywhere, cluster=cluster))
                processes = usable_cores()
                found.append(
                    search(job, memory_margin=options.memory_margin, top=1, fixed=asked.fixed, processes=processes)
                )
            except LayoutError as error:
                raise LayoutError(*(f"{cluster.name}: {problem}" for problem in error.problems)) from None
    if options.json:
        _print_document(asked, found)
    else:
        _print(asked, found)
    if not any(plan.recommended for plan in found):
        raise typer.Exit(1)


def _others(options: PlanOptions) -> list[str]:
    return options.compare or []


def _cluster(text: str, options: PlanOptions, precision: str, wrong: list[str]) -> "Cluster":
    """Return a cluster by its name, or the cluster of --cluster with other links. Adds problems to `wrong`."""
    changes = dict(pair.split("=", 1) for pair in text.replace(" ", "").split(",") if "=" in pair)
    unknown = [name for name in changes if name not in CHANGES]
    wrong += [f"--compare {text}: there is no {name} to change; {nearest(name, CHANGES)}" for name in unknown]
    assert options.cluster is not None
    try:
        if "=" not in text:
            found = changed_cluster(text, options, None, None)
        else:
            link, network = changes.get("link", options.link), changes.get("network", options.network)
            found = changed_cluster(options.cluster, options, link, network)
    except InputError as error:
        wrong += [f"--compare {problem}" for problem in error.problems]
        return changed_cluster(options.cluster, options, None, None)
    wrong += [f"--compare {text}: {problem}" for problem in no_peak(found, precision)]
    return found


def _print_document(asked: PlanRequest, found: "list[Plan]") -> None:
    from shardwright.planner.document import job_document, layout_document

    compared = []
    for plan in found:
        taken = plan.recommended
        told = None if taken is None else layout_document(taken, plan.limit_bytes)
        compared.append(job_document(plan.job, asked.name, plan.limit_bytes) | {"recommended": told})
    print_json({"compared": compared})


def _print(asked: PlanRequest, found: "list[Plan]") -> None:
    from shardwright.planner.choice import shortage
    from shardwright.planner.headline import headline

    job, first = asked.job, found[0].recommended
    console.print(
        f"[bold]{asked.name}[/]: {job.global_batch:,} sequences of {job.seq_len:,} tokens a step, {job.precision}",
        soft_wrap=True,
    )
    table = columns("cluster", "step s", "", "tokens/s each", "MFU", "GiB", "recommended", left=1)
    table.columns[-1].justify, table.columns[-1].overflow = "left", "fold"
    for plan in found:
        taken = plan.recommended
        if taken is None:
            assert plan.survey.nearest is not None
            lacks = shortage(plan.job, plan.survey.nearest, plan.survey.nearest_bytes, plan.limit_bytes)
            least = f"nothing fits: {lacks}"
            table.add_row(plan.job.cluster.name, "", "", "", "", "", least)
            continue
        told = headline(taken)
        table.add_row(
            plan.job.cluster.name,
            f"{taken.step_s:.4g}",
            f"{taken.step_s / first.step_s - 1:+.1%}" if first is not None and taken is not first else "",
            format_count(told.tokens_per_s_per_accelerator),
            f"{told.mfu_full:.1%}",
            f"{taken.peak_bytes / GiB:.1f}",
            str(taken.choice),
        )
    print_table(table)
    if first is not None:
        low, high = (bound / first.step_s for bound in headline(first).interval_s)
        print_text(f"80 % interval: {low:.0%} to {high:.0%} of what is predicted for the first")
