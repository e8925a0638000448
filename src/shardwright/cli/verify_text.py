"""What `shardwright verify` prints."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardwright.cli.common import columns, console, print_table, say

if TYPE_CHECKING:
    from shardwright.config import RunConfig
    from shardwright.layout import Layout
    from shardwright.verification import Case, Report


def sizes(config: "RunConfig", case: "Case") -> str:
    spec, whole = case.spec, config.model.spec()
    sizes = (
        f"{spec.n_layers} layers, d_model {spec.d_model}, {spec.n_heads} query and {spec.n_kv_heads} kv heads, "
        f"d_ffn {spec.d_ffn}, vocabulary {spec.vocab_size}; {case.global_batch} sequences of {case.seq_len} tokens a "
        f"step, {case.steps} step{'s' * (case.steps > 1)}, {case.dtype}"
    )
    return sizes if spec == whole else f"reduced to {sizes} (--full for the true sizes)"


def print_report(report: "Report", sizes: str) -> None:
    """The verdict and the culprit, and then what was compared."""
    failing = sorted((row for row in report.rows if not row.equal), key=lambda row: -row.excess)
    said, count = "losses, norms, gradients and parameters", len(report.rows)
    if report.equal:
        console.print(f"[bold green]equal:[/] {count} {said}", soft_wrap=True)
    else:
        replicas = f", and {len(report.differing)} of {report.n_replicated} replicas" if report.differing else ""
        console.print(f"[bold red]not equal:[/] {len(failing)} of {count} {said}{replicas}", soft_wrap=True)
        say(f"culprit: {report.culprit}")
    console.print()
    console.print(f"[bold]{report.layout}[/] against [bold]{report.against}[/]", soft_wrap=True)
    say(sizes)
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
            say(f"  {line}")
    elif report.n_replicated:
        say(f"{report.n_replicated} tensors and numbers that several ranks hold: the same bits on all of them")
    for reason in dict.fromkeys(row.reason for row in report.rows):
        say(f"tolerance: {reason}")
    say("error: ||a - b|| / ||b|| of a tensor, |a - b| / |b| of a number, b the reference")


class MatrixLines:
    """Prints the layouts of a matrix, a line each, as they come."""

    def __init__(self, layouts: Sequence["Layout"]) -> None:
        self._width = max(len(str(layout)) for layout in layouts)
        self._reasons: dict[str, None] = {}
        self._line("layout", "worst at", "error", "tolerance", "replicas", "", style="bold")

    def add(self, report: "Report") -> None:
        """A layout that has been compared, or whose ranks failed."""
        if report.crash:
            first = report.crash.splitlines()[0]
            console.print(f"{report.layout!s:<{self._width}}  [bold red]failed[/] ", soft_wrap=True, end="")
            say(first)
            return
        worst = report.worst
        self._reasons |= dict.fromkeys(row.reason for row in report.rows)
        self._line(
            str(report.layout),
            f"{worst.quantity.kind} {worst.name}".strip(),
            f"{worst.error:.1e}",
            f"{worst.tolerance:.1e}",
            f"{len(report.differing)} differ" if report.differing else f"{report.n_replicated}",
            "equal" if report.equal else "[bold red]not equal[/]",
        )

    def end(self, reports: Sequence["Report"]) -> None:
        """The verdict, after the last layout."""
        console.print()
        for reason in self._reasons:
            say(f"tolerance: {reason}")
        n_ranks, failed = reports[0].layout.world_size, [report for report in reports if report.crash]
        unequal = [report for report in reports if not report.equal and not report.crash]
        for reports_, colour, words in ((unequal, "red", "not equal"), (failed, "red", "failed")):
            if reports_:
                console.print(f"[bold {colour}]{words}:[/] {len(reports_)} of {len(reports)} layouts")
                for report in reports_:
                    say(f"  {report.layout}")
        if unequal or failed:
            say("for the culprit, verify one of them by its own --set layout...")
        else:
            console.print(f"[bold green]equal:[/] all {len(reports)} layouts of {n_ranks} ranks")

    def _line(self, layout: str, at: str, error: str, limit: str, replicas: str, verdict: str, style: str = "") -> None:
        line = f"{layout:<{self._width}}  {at:<40}  {error:>7}  {limit:>9}  {replicas:>10}  {verdict}"
        console.print(line.rstrip(), style=style, soft_wrap=True, highlight=False)
