"""The document of `plan diff`: two run files, and the terms of time and memory in which they differ."""

import math
from collections.abc import Iterator, Sequence

from shardwright.planner.choice import PricedLayout
from shardwright.planner.diff import DiffTerm, PlanDifference
from shardwright.system.units import GiB, format_bytes, format_seconds
from shardwright.view.document import Code, Column, Marked, Note, Part, Quantity, Section, Table, Tone, VerbDocument

SHOWN = 4
"""Number of the most different terms, whose formulas are shown."""
ROUNDING = 1e-6
"""Share of the larger total below which the terms that are equal in both are not a row."""
NOT_COLOURED = 1e-4
"""Share of the larger total below which a difference has no tone."""


def diff_view(difference: PlanDifference, names: tuple[str, str]) -> VerbDocument:
    """Return the document of a difference. `names`: the run files."""
    a, b = difference.a, difference.b
    parts: list[Part] = [
        Note(_side(priced, path), lead=letter)
        for letter, path, priced in zip("AB", names, (a, b), strict=True)
    ]  # fmt: skip
    if difference.choices:
        changes = ", ".join(f"{name} {one} -> {other}" for name, (one, other) in difference.choices.items())
        parts.append(Note(f"differ in {changes}"))
    parts.append(Section("Step time"))
    if difference.time:
        parts.append(Note(time_verdict(difference.slower, difference.per), tone="strong"))
        parts += [time_table(difference), *_formulas(difference.time)]
    else:
        parts.append(Note("both take the same time"))
    parts.append(Section("Memory"))
    if difference.memory:
        parts.append(memory_table(difference))
    else:
        parts.append(Note("both need the same memory"))
    return VerbDocument(f"{names[0]} and {names[1]}: the difference", difference.as_json(), parts)


def _side(priced: PricedLayout, path: str) -> str:
    step, peak = format_seconds(priced.step_s), format_bytes(priced.peak_bytes)
    return f"{path}: {priced.choice} on {priced.job.cluster.name}: {step} a step, {peak}"


def time_verdict(slower: float, per: str, a: str = "A", b: str = "B") -> str:
    """Return how much longer `b` takes than `a`, in words. `per`: "a step" or "a token"."""
    if abs(slower) < 5e-4:
        return f"{b} takes as long as {a} for {per}"
    return f"{b} takes {abs(slower):.1%} {'longer' if slower > 0 else 'less time'} than {a} for {per}"


def time_table(difference: PlanDifference, names: tuple[str, str] = ("A", "B")) -> Table:
    """Return the terms of the step time that differ. `names`: of the two layouts."""
    totals = difference.a.step_s, difference.b.step_s
    return _table("time", "s", difference.time, 1.0, totals, names, coloured=difference.per == "a step")


def memory_table(difference: PlanDifference, names: tuple[str, str] = ("A", "B")) -> Table:
    """Return the kinds of memory of the fullest rank that differ. `names`: of the two layouts."""
    totals = difference.a.peak_bytes, difference.b.peak_bytes
    return _table("memory of the fullest rank", "GiB", difference.memory, GiB, totals, names)


def _table(
    title: str,
    unit: str,
    terms: Sequence[DiffTerm],
    one: float,
    totals: tuple[float, float],
    names: tuple[str, str],
    coloured: bool = True,
) -> Table:
    """Return the table of the terms. `one`: a unit in seconds or bytes; `totals`: of both layouts. `coloured`: whether
    more is worse, which it is not in steps of different numbers of tokens."""
    value, more = Quantity(lambda n: f"{n / one:.4g}"), Quantity(lambda n: f"{n / one:+.4g}")
    a, b = names
    first, second = totals
    least = NOT_COLOURED * max(totals) if coloured else math.inf

    def tone(more: float) -> Tone:
        return "" if abs(more) < least else "bad" if more > 0 else "good"

    columns = Column(title), Column(f"{a} {unit}", value), Column(f"{b} {unit}", value), Column(f"{b} - {a}", more)
    rows: list[Sequence[object]] = [(term.name, term.a, term.b, Marked(term.more, tone(term.more))) for term in terms]
    equal = first - sum(term.a for term in terms)
    if equal > ROUNDING * max(totals):
        rows.append(("equal in both", equal, equal, None))
    rows.append((Marked("all", "strong"), first, second, Marked(second - first, tone(second - first) or "strong")))
    return Table(columns, rows)


def _formulas(terms: Sequence[DiffTerm]) -> Iterator[Part]:
    for term in terms[:SHOWN]:
        if term.why:
            formula, *inputs = term.why
            yield Code("\n".join((f"{term.name}: {formula}", *(f"  {line}" for line in inputs))))
