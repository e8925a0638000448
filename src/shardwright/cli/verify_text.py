"""The printed output of `shardwright verify`."""

import re
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardwright.cli.common import columns, console, error_console, print_table, print_text
from shardwright.system.units import format_seconds

if TYPE_CHECKING:
    from shardwright.config import RunConfig
    from shardwright.layout.layout import Layout
    from shardwright.verification import Case, Report, Verifier


def sizes(config: "RunConfig", case: "Case") -> str:
    spec, whole = case.spec, config.model.spec()
    sizes = batch_sizes(case)
    if case.attention == "document":
        restarted = ", positions restarted" * (case.positions == "document")
        sizes += f", attention within documents{restarted}"
    if case.fp8 is not None:
        sizes += f", fp8 {case.fp8.recipe}"
    narrow = {"bf16": "bfloat16", "fp16": "float16"}.get(config.precision.compute, case.dtype)
    if case.dtype != narrow and case.fp8 is None:
        sizes += f", not the {config.precision.compute} of precision.compute, which --dtype {narrow} takes"
    if config.init.weights is not None:
        sizes += "; initial values from the seed, and not init.weights"
    return sizes if spec == whole else f"reduced to {sizes} (--full for the true sizes)"


def batch_sizes(case: "Case") -> str:
    """Return the sizes of the model and of the batch."""
    spec = case.spec
    return (
        f"{spec.n_layers} layers, d_model {spec.d_model}, {spec.n_heads} query and {spec.n_kv_heads} kv heads, "
        f"d_ffn {spec.d_ffn}, vocabulary {spec.vocab_size}; {case.global_batch} sequences of {case.seq_len} tokens a "
        f"step, {case.steps} step{'s' * (case.steps > 1)}, {case.dtype}"
    )


def print_report(report: "Report", sizes: str) -> None:
    """Print the verdict, the culprit and the comparisons."""
    failing = sorted((row for row in report.rows if not row.equal), key=lambda row: -row.excess)
    said, count = "losses, norms, gradients and parameters", len(report.rows)
    if report.equal:
        console.print(f"[bold green]equal:[/] {count} {said}", soft_wrap=True)
    else:
        replicas = f", and {len(report.differing)} of {report.n_replicated} replicas" if report.differing else ""
        console.print(f"[bold red]not equal:[/] {len(failing)} of {count} {said}{replicas}", soft_wrap=True)
        print_text(f"culprit: {report.culprit}")
    console.print()
    console.print(f"[bold]{report.layout}[/] against [bold]{report.against}[/]", soft_wrap=True)
    print_text(sizes)
    console.print()
    table = columns("compared", "worst at", "step", "error", "tolerance", "equal", left=2)
    table.columns[-1].justify = "left"
    shown = report.worst_of_each()
    for row in shown + [row for row in failing if row not in shown][:8]:
        table.add_row(
            f"{row.quantity.kind}, {row.quantity.training}",
            row.name or "-",
            str(row.quantity.step),
            f"{row.error:.1e}",
            f"{row.tolerance:.1e}",
            "yes" if row.equal else "[bold red]no[/]",
        )
    print_table(table)
    if (hidden := len([row for row in failing if row not in shown]) - 8) > 0:
        console.print(f"and {hidden} more that are not equal; all of them with --json")
    console.print()
    if report.differing:
        console.print(f"[bold red]{len(report.differing)} of {report.n_replicated} replicas differ between ranks[/]")
        for line in report.differing[:8]:
            print_text(f"  {line}")
    elif report.n_replicated:
        print_text(f"{report.n_replicated} tensors and numbers that several ranks hold: the same bits on all of them")
    for part in report.not_compared:
        print_text(f"not compared: {part}")
    for reason in dict.fromkeys(row.reason for row in report.rows):
        print_text(f"tolerance: {reason}")
    print_text("error: ||a - b|| / ||b|| of a tensor, |a - b| / |b| of a number, b the reference")


class MatrixLines:
    """Printer of a line for each comparison when it is done. `names`: the names of all comparisons, in order. The name
    is the last column, because some names are longer than all other columns."""

    def __init__(self, names: Sequence[str], what: str = "layout") -> None:
        self._names = iter(names)
        self._reasons: dict[str, dict[str, float]] = defaultdict(dict)
        self._line("", "error", "tolerance", "replicas", "worst at", what, style="bold")

    def add(self, report: "Report") -> None:
        """Print the next comparison, which has finished or whose ranks failed."""
        name = next(self._names)
        if report.crash:
            self._line("failed", "", "", "", report.crash.splitlines()[0], name, style="red")
            return
        worst = report.worst
        for row in report.rows:
            alike = self._reasons[re.sub(r"\d[\d.e+-]*", "", row.reason)]
            alike[row.reason] = max(row.tolerance, alike.get(row.reason, 0.0))
        self._line(
            "equal" if report.equal else "not equal",
            f"{worst.error:.1e}",
            f"{worst.tolerance:.1e}",
            f"{len(report.differing)} differ" if report.differing else f"{report.n_replicated}",
            f"{worst.quantity.kind} {worst.name}".strip(),
            name,
            style="" if report.equal else "red",
        )

    def end(self, reports: Sequence["Report"]) -> None:
        """Print the verdict, after the last layout."""
        console.print()
        for alike in self._reasons.values():
            others = f" (and {len(alike) - 1} alike, none wider)" if len(alike) > 1 else ""
            print_text(f"tolerance: {max(alike, key=alike.__getitem__)}{others}")
        n_ranks, failed = reports[0].layout.world_size, [report for report in reports if report.crash]
        unequal = [report for report in reports if not report.equal and not report.crash]
        for reports_, colour, words in ((unequal, "red", "not equal"), (failed, "red", "failed")):
            if reports_:
                console.print(f"[bold {colour}]{words}:[/] {len(reports_)} of {len(reports)} layouts")
                for report in reports_:
                    print_text(f"  {report.layout}")
        if unequal or failed:
            print_text("for the culprit, verify one of them by its own --set layout...")
        else:
            console.print(f"[bold green]equal:[/] all {len(reports)} layouts of {n_ranks} ranks")

    def _line(self, verdict: str, error: str, limit: str, replicas: str, at: str, name: str, style: str = "") -> None:
        line = f"{verdict:<9}  {error:>7}  {limit:>9}  {replicas:>10}  {at:<40}  {name}"
        console.print(line, style=style, soft_wrap=True, highlight=False, markup=False)


def collect(verifier: "Verifier", pairs: "Sequence[tuple[Case, Layout]]", lines: MatrixLines | None) -> "list[Report]":
    """Return the report of each case and layout. `lines`, if given, prints each report when it is done."""
    reports: list[Report] = []
    began_s = time.monotonic()
    with error_console.status(f"0 of {len(pairs)}") as status:
        for report in verifier.parities(pairs):
            reports.append(report)
            if lines is not None:
                lines.add(report)
            left_s = (time.monotonic() - began_s) / len(reports) * (len(pairs) - len(reports))
            status.update(f"{len(reports)} of {len(pairs)}, {format_seconds(left_s)} left")
    return reports
