"""The result of `verify` on one HTML page that needs no network, no script and no other file.

The page is made from any objects with the attributes of `verification.compare.Report` and `ComparisonRow`; this
package does not import them.
"""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Protocol

from shardwright.report.verify_pictures import ROLES, ComparisonRow, errors_svg, short
from shardwright.system.files import write_whole
from shardwright.view.html import document, facts, picture, table

MORE_ROWS = 12
"""Rows that are not equal in the table of a layout, in addition to the worst row of each kind."""


class ComparisonReport(Protocol):
    """A comparison of a layout with its reference, such as `verification.compare.Report`."""

    @property
    def layout(self) -> object: ...
    @property
    def against(self) -> str: ...
    @property
    def rows(self) -> Sequence[ComparisonRow]: ...
    @property
    def n_replicated(self) -> int: ...
    @property
    def differing(self) -> Sequence[str]: ...
    @property
    def culprit(self) -> str: ...
    @property
    def crash(self) -> str: ...
    @property
    def equal(self) -> bool: ...
    @property
    def worst(self) -> ComparisonRow: ...
    def worst_of_each(self) -> Sequence[ComparisonRow]:
        """Return the worst row of each kind and training."""


def write_page(report: ComparisonReport, sizes: str, path: str | Path) -> None:
    """Write the page of one layout, replacing an existing file. `sizes`: the sizes of model and batch as text.

    Raises InputError if `path` cannot be written.
    """
    title = f"{report.layout}: {_verdict(report)}"
    body = f"""<header>
<h1>{escape(title)}</h1>
<p class="quiet">against {escape(report.against)}; {escape(sizes)}</p>
</header>
{_culprit(report)}{facts(_numbers(report))}
<h2>Errors by layer and step</h2>
<figure>
{picture(errors_svg(report.rows), "errors", "Errors by layer and step", ROLES[0])}
<figcaption>A tensor is equal up to 1, its tolerance. Step 0 of the parameters: their initial values. Losses, norms
and what several ranks hold are below.</figcaption>
</figure>
<h2>The worst of each kind</h2>
{table(("compared", "worst at", "step", "error", "tolerance", "error / tolerance", "equal"), _rows(report), "verify")}
{_reasons(report)}
<h2>What several ranks hold</h2>
{_replicas(report)}"""
    write_whole(Path(path), document(title, body, _STYLE, (ROLES[0], ROLES[1])).encode("utf-8"))


def write_matrix_page(reports: Sequence[ComparisonReport], title: str, path: str | Path) -> None:
    """Write the page of many layouts, a table of their verdicts in the order given, replacing an existing file.

    Raises InputError if `path` cannot be written.
    """
    counts = [(words, sum(_verdict(each) == words for each in reports)) for words in ("equal", "not equal", "failed")]
    body = f"""<header>
<h1>{escape(title)}</h1>
</header>
{facts([(words, f"{n:,}", f"of {len(reports):,} layouts") for words, n in counts])}
<h2>Layouts</h2>
{table(("layout", "verdict", "worst at", "error", "tolerance", "replicas"), map(_line, reports), "verify")}
<p class="quiet">Worst: the tensor or number with the largest error in multiples of its tolerance. Replicas: tensors and
numbers that several ranks hold, compared bit for bit.</p>"""
    write_whole(Path(path), document(title, body, _STYLE).encode("utf-8"))


_STYLE = """table.verify td, table.verify th { font-size: .875rem; border-bottom: 1px solid var(--grid); }
table.verify td:nth-child(-n+2), table.verify th:nth-child(-n+2) { text-align: left; }
table.verify td { vertical-align: top; }
"""


def _verdict(report: ComparisonReport) -> str:
    return "failed" if report.crash else "equal" if report.equal else "not equal"


def _culprit(report: ComparisonReport) -> str:
    return f'<p class="bad">Culprit: {escape(report.culprit)}.</p>\n' if report.culprit else ""


def _numbers(report: ComparisonReport) -> list[tuple[str, str, str]]:
    failing = sum(not row.equal for row in report.rows)
    n_copies = len(report.differing)
    return [
        ("verdict", _verdict(report), ""),
        ("not equal", f"{failing:,}", f"of {len(report.rows):,} losses, norms, gradients and parameters"),
        ("largest error", f"{report.worst.error:.1e}", f"{short(report.worst.excess)} tolerances"),
        ("replicas that differ", f"{n_copies:,}", f"of {report.n_replicated:,}, compared bit for bit"),
    ]


def _rows(report: ComparisonReport) -> list[tuple[str, ...]]:
    """Return the worst row of each kind, then the worst of the other rows that are not equal."""
    shown = list(report.worst_of_each())
    others = sorted((row for row in report.rows if not row.equal and row not in shown), key=lambda row: -row.excess)
    return [
        (
            escape(f"{row.quantity.kind}, {row.quantity.training}"),
            f"<code>{escape(row.name)}</code>" if row.name else "-",
            f"{row.quantity.step}",
            f"{row.error:.1e}",
            f"{row.tolerance:.1e}",
            short(row.excess),
            _yes(row.equal, "yes", "no"),
        )
        for row in shown + others[:MORE_ROWS]
    ]


def _reasons(report: ComparisonReport) -> str:
    reasons = "\n".join(f"<li>{escape(reason)}</li>" for reason in dict.fromkeys(row.reason for row in report.rows))
    more = sum(not row.equal for row in report.rows) - sum(not row.equal for row in report.worst_of_each()) - MORE_ROWS
    left = f"<p>{more:,} more are not equal; all of them with --json.</p>\n" if more > 0 else ""
    return f"""{left}<p class="quiet">Error: ||a - b|| / ||b|| of a tensor, |a - b| / |b| of a number, b the reference.
Tolerance:</p>
<ul class="quiet">
{reasons}
</ul>"""


def _replicas(report: ComparisonReport) -> str:
    if not report.n_replicated:
        return "<p>Nothing is on more than one rank.</p>"
    if not report.differing:
        return f"<p>{report.n_replicated:,} tensors and numbers: the same bits on all ranks that hold them.</p>"
    items = "\n".join(f"<li>{escape(line)}</li>" for line in report.differing)
    return f"""<p class="bad">{len(report.differing):,} of {report.n_replicated:,} differ between ranks:</p>
<ul>
{items}
</ul>"""


def _line(report: ComparisonReport) -> tuple[str, ...]:
    layout, verdict = escape(str(report.layout)), _yes(report.equal, "equal", _verdict(report))
    if report.crash:
        return layout, verdict, escape(report.crash.splitlines()[0]), "", "", ""
    worst = report.worst
    at = f"{escape(worst.quantity.kind)} <code>{escape(worst.name)}</code>" if worst.name else worst.quantity.kind
    replicas = f"{len(report.differing):,} differ" if report.differing else f"{report.n_replicated:,}"
    return layout, verdict, at, f"{worst.error:.1e}", f"{worst.tolerance:.1e}", replicas


def _yes(right: bool, yes: str, no: str) -> str:
    return yes if right else f'<span class="bad">{no}</span>'
