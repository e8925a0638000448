"""shardwright plan --compare: the same job on several clusters, one line for each."""

from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from shardwright.cli.common import error_console, show
from shardwright.cli.plan_asked import PlanRequest, changed_cluster, no_peak
from shardwright.cli.plan_goal import check_goal
from shardwright.cli.plan_options import PlanOptions
from shardwright.system.errors import InputError, LayoutError, nearest

if TYPE_CHECKING:
    from shardwright.cost.hardware import Cluster
    from shardwright.planner.search import Plan

CHANGES = ("link", "network")


def compare(request: PlanRequest, options: PlanOptions) -> None:
    """Search on the requested cluster and on each cluster of --compare, and print the recommended layout of each.

    Raises InputError for unknown clusters, and typer.Exit(1) if nothing fits on any cluster.
    """
    from shardwright.cost.machine import on_machine
    from shardwright.planner.search import search
    from shardwright.report.compare_view import compare_view
    from shardwright.system.control_groups import usable_cores

    problems: list[str] = []
    clusters = [
        request.job.cluster,
        *(_cluster(text, options, request.job.precision, problems) for text in _others(options)),
    ]
    if problems:
        raise InputError(*problems)
    plans: list[Plan] = []
    with error_console.status("evaluating every layout") as status:
        for cluster in clusters:
            status.update(f"evaluating every layout of {cluster.name}")
            try:
                job = on_machine(replace(request.anywhere, cluster=cluster))
                check_goal(request.goal, job)
                processes = usable_cores()
                plans.append(
                    search(job, memory_margin=options.memory_margin, top=1, fixed=request.fixed, processes=processes)
                )
            except LayoutError as error:
                raise LayoutError(*(f"{cluster.name}: {problem}" for problem in error.problems)) from None
    show(compare_view(request.name, plans, request.goal), options.json, options.html)
    if not any(plan.recommended for plan in plans):
        raise typer.Exit(1)


def _others(options: PlanOptions) -> list[str]:
    return options.compare or []


def _cluster(text: str, options: PlanOptions, precision: str, problems: list[str]) -> "Cluster":
    """Return a cluster by its name, or the cluster of --cluster with other links. Adds problems to `problems`."""
    changes = dict(pair.split("=", 1) for pair in text.replace(" ", "").split(",") if "=" in pair)
    unknown = [name for name in changes if name not in CHANGES]
    problems += [f"--compare {text}: there is no {name} to change; {nearest(name, CHANGES)}" for name in unknown]
    assert options.cluster is not None
    try:
        if "=" not in text:
            machine = changed_cluster(text, options, None, None)
        else:
            link, network = changes.get("link", options.link), changes.get("network", options.network)
            machine = changed_cluster(options.cluster, options, link, network)
    except InputError as error:
        problems += [f"--compare {problem}" for problem in error.problems]
        return changed_cluster(options.cluster, options, None, None)
    problems += [f"--compare {text}: {problem}" for problem in no_peak(machine, precision)]
    return machine
