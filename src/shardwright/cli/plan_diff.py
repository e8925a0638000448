"""shardwright plan diff: why one run file is slower than another, term by term."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.cli.common import AsJson, argument, option, output_problems, reading_verb, show
from shardwright.system.errors import InputError

if TYPE_CHECKING:
    from shardwright.planner.choice import PricedLayout


@dataclass(frozen=True)
class PlanDiffOptions:
    """Arguments and options of `plan diff`."""

    a: Path = argument(..., "a run file", "A.toml")
    b: Path = argument(..., "the run file that is compared with it", "B.toml")
    cluster: str | None = option(None, "accelerators and how many, such as h100:64; as for plan", "NAME:COUNT")
    other_cluster: str | None = option(None, "the cluster of B.toml, if it is another", "NAME:COUNT")
    hardware: Path | None = option(None, "your accelerators, networks and clusters", "FILE.toml")
    html: Path | None = option(None, "write one page", "FILE.html")
    json: AsJson = False


@reading_verb
def plan_diff(options: PlanDiffOptions) -> None:
    """Explain the difference in step time and memory between two run files, term by term.

    The terms are the terms of plan's step time. They add up to the difference. The largest come first, with the inputs
    of their formulas that differ. `plan A.toml --explain LAYOUT` prints all formulas of one side. The files may be of
    different models, batches, precisions and, with --other-cluster, clusters.

    shardwright plan diff a.toml b.toml --cluster h100:64

    Exit codes: 0 compared, 2 the input cannot be used.
    """
    sides = (("A", options.a, options.cluster), ("B", options.b, options.other_cluster or options.cluster))
    priced: list[PricedLayout] = []
    problems = output_problems("--html", options.html, ".html")
    for name, path, cluster in sides:
        try:
            priced.append(_priced(path, cluster, options.hardware))
        except InputError as error:
            problems += [f"{name}, {path}: {problem.removeprefix(f'{path}: ')}" for problem in error.problems]
    if problems:
        raise InputError(*problems)
    from shardwright.planner.diff import diff
    from shardwright.report.diff_view import diff_view

    show(diff_view(diff(*priced), (str(options.a), str(options.b))), options.json, options.html)


def _priced(path: Path, cluster: str | None, hardware: Path | None) -> "PricedLayout":
    from shardwright.cli.plan_asked import choice_of_run, priced_of, read_request
    from shardwright.cli.plan_options import PlanOptions
    from shardwright.planner.search import MARGIN, limit_bytes

    request = read_request(PlanOptions(target=str(path), cluster=cluster, hardware=hardware))
    assert request.config is not None
    return priced_of(request.job, choice_of_run(request.config, request.job, limit_bytes(request.job, MARGIN)))
