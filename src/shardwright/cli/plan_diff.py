"""shardwright plan diff: why one run file is slower than another, term by term."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwright.cli.common import AsJson, print_json, print_table, print_text, reading_verb
from shardwright.system.errors import InputError
from shardwright.view.terminal import columns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwright.planner.choice import PricedLayout
    from shardwright.planner.diff import DiffTerm, PlanDifference

SHOWN = 4
"""Number of the most different terms, whose formulas are printed."""


@dataclass(frozen=True)
class PlanDiffOptions:
    """Arguments and options of `plan diff`."""

    a: Annotated[Path, typer.Argument(metavar="A.toml", help="a run file")]
    b: Annotated[Path, typer.Argument(metavar="B.toml", help="the run file that is compared with it")]
    cluster: Annotated[
        str | None, typer.Option(metavar="NAME:COUNT", help="accelerators and how many, such as h100:64; as for plan")
    ] = None
    other_cluster: Annotated[
        str | None, typer.Option(metavar="NAME:COUNT", help="the cluster of B.toml, if it is another")
    ] = None
    hardware: Annotated[
        Path | None, typer.Option(metavar="FILE.toml", help="your accelerators, networks and clusters")
    ] = None
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
    found: list[PricedLayout] = []
    wrong: list[str] = []
    for name, path, cluster in sides:
        try:
            found.append(_priced(path, cluster, options.hardware))
        except InputError as error:
            wrong += [f"{name}, {path}: {problem.removeprefix(f'{path}: ')}" for problem in error.problems]
    if wrong:
        raise InputError(*wrong)
    from shardwright.planner.diff import diff

    different = diff(*found)
    if options.json:
        print_json(different.as_json())
    else:
        _print(different, options)


def _priced(path: Path, cluster: str | None, hardware: Path | None) -> "PricedLayout":
    from shardwright.cli.plan_asked import choice_of_run, priced_of, read_request
    from shardwright.cli.plan_options import PlanOptions
    from shardwright.planner.search import MARGIN, limit_bytes

    asked = read_request(PlanOptions(target=str(path), cluster=cluster, hardware=hardware))
    assert asked.config is not None
    return priced_of(asked.job, choice_of_run(asked.config, asked.job, limit_bytes(asked.job, MARGIN)))


def _print(found: "PlanDifference", options: PlanDiffOptions) -> None:
    from shardwright.system.units import GiB, format_bytes, format_seconds

    for name, path, each in (("A", options.a, found.a), ("B", options.b, found.b)):
        step, peak = format_seconds(each.step_s), format_bytes(each.peak_bytes)
        print_text(f"{name}  {path}: {each.choice} on {each.job.cluster.name}: {step} a step, {peak}")
    if found.choices:
        print_text(f"differ in {', '.join(f'{name} {one} -> {other}' for name, (one, other) in found.choices.items())}")
    print_text("")
    per = "a step" if found.a.job.tokens == found.b.job.tokens else "a token"
    if not found.time:
        print_text("both take the same time")
    else:
        print_text(_verdict(found.slower, per))
        _print_terms("time", "s", found.time, 1.0, (found.a.step_s, found.b.step_s))
        _print_why(found.time)
    print_text("")
    if found.memory:
        _print_terms("memory of the fullest rank", "GiB", found.memory, GiB, (found.a.peak_bytes, found.b.peak_bytes))
    else:
        print_text("both hold the same memory")


def _verdict(slower: float, per: str) -> str:
    if abs(slower) < 5e-4:
        return f"B takes as long as A for {per}"
    return f"B takes {abs(slower):.1%} {'longer' if slower > 0 else 'less time'} than A for {per}"


def _print_terms(title: str, unit: str, terms: "Sequence[DiffTerm]", one: float, whole: tuple[float, float]) -> None:
    table = columns(title, f"A {unit}", f"B {unit}", "B - A", left=1)
    for each in terms:
        table.add_row(each.name, f"{each.a / one:.4g}", f"{each.b / one:.4g}", f"{each.more / one:+.4g}")
    in_both = whole[0] - sum(each.a for each in terms)
    if in_both > 1e-6 * max(whole):
        table.add_row("equal in both", f"{in_both / one:.4g}", f"{in_both / one:.4g}", "")
    a, b = whole
    table.add_row("[bold]all[/]", f"{a / one:.4g}", f"{b / one:.4g}", f"[bold]{(b - a) / one:+.4g}[/]")
    print_table(table)


def _print_why(terms: "Sequence[DiffTerm]") -> None:
    for each in terms[:SHOWN]:
        if each.why:
            formula, *inputs = each.why
            print_text(f"\n{each.name}: {formula}")
            for line in inputs:
                print_text(f"  {line}")
