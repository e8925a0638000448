"""A page of Learn as an HTML fragment: text, figures, formulas with numbers, messages and questions.

The templates are `topic.html` and, for files that a browser opens without a server, `site.html`. The fragment has no
script and no style attribute; its style is `learn.css`. Live links lead to `/` and `/learn/TOPIC` of the server.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from shardwright.cost.ledger import NOTATION, LedgerEntry, substituted
from shardwright.explore.learn import charts, figures
from shardwright.explore.learn.drawing import Figure
from shardwright.explore.learn.topics import (
    ALL_TOPICS,
    SERVED,
    TOPICS,
    LearnQuestion,
    LearnTopic,
    ledger_of,
    matching,
    tried,
)
from shardwright.explore.state import PageState, query_of
from shardwright.planner.explain import number, value_text
from shardwright.system.errors import InputError, nearest
from shardwright.system.units import format_bytes, format_count, format_seconds, percent
from shardwright.view.html import templates_in

if TYPE_CHECKING:
    from jinja2 import Environment

MOST_MESSAGES = 12


@dataclass(frozen=True)
class ShownFormula:
    """An entry of the ledger: its name, the steps of its formula, the same with numbers, its value and its source."""

    what: str
    formula: Sequence[str]
    numbers: Sequence[str]
    value: str
    source: str


@dataclass(frozen=True)
class ShownAnswer:
    """A question with a row for each tried state: its words, its link, its cells, and whether it fits."""

    question: LearnQuestion
    rows: Sequence[tuple[str, str, Sequence[str]]]


@cache
def templates() -> "Environment":
    """Return the templates of this folder."""
    result = templates_in(Path(__file__).parent)
    result.filters["code"] = _code
    return result


def learn_page(topic: str, state: PageState, *, static: bool = False, hardware: Path | None = None) -> str:
    """Return the page of a topic as an HTML fragment. `static`: links lead to files next to it, not to a server.
    `hardware`: the file of hardware with which the state was read.

    Raises InputError for a topic that does not exist.
    """
    if topic not in ALL_TOPICS:
        raise InputError(f"{topic}: there is no such page; {nearest(topic, TOPICS)}")
    page = ALL_TOPICS[topic]
    shown = page.shown(state)
    entries = ledger_of(shown, page)
    formulas, drawn = list(matching(entries, page.entries)), list(drawings(page, shown, hardware))
    values: dict[str, Any] = {
        "page": page,
        "verdict": page.slug != SERVED,
        "topics": TOPICS,
        "static": static,
        "query": query_of(state),
        "example": "" if shown is state else query_of(shown),
        "name": f"{shown.model} on {shown.job.cluster.name}",
        "choice": str(shown.choice),
        "drawings": drawn,
        "moves": any("<animate" in svg for svg, _, _ in drawn),
        "formulas": [_formula(entry) for entry in formulas],
        "messages": list(_messages(page, shown)),
        "symbols": _symbols(formulas),
        "answers": [_answer(page, question, shown, hardware) for question in page.questions],
    }
    return templates().get_template("topic.html").render(values)


def drawings(page: LearnTopic, state: PageState, hardware: Path | None = None) -> Iterator[tuple[Markup, str, str]]:
    """Yield each figure: its SVG, its class and its caption; or no SVG, and the reason as the caption."""
    drawn = [(each, getattr(figures, each, None) or getattr(charts, each)) for each in page.figures]
    if page.bars is not None:
        drawn.append(("bars", lambda state: charts.tried_bars(state, page.bars, hardware)))
    for name, draw in drawn:
        try:
            found = draw(state)
        except InputError as error:
            yield Markup(""), "none", str(error)
            continue
        if isinstance(found, Figure):
            yield found.svg(), "figure", f"{found.title}. {found.caption}".removesuffix(" ")
        else:
            yield found, "wide", f"The {name} of this layout; the line moves over the step."


def _formula(entry: LedgerEntry) -> ShownFormula:
    inputs = {name: number(value) for name, value in entry.inputs.items()}
    steps = entry.formula.split("; ") if entry.formula else []
    numbers = [substituted(step, inputs) for step in steps] if entry.formula not in inputs else []
    numbers = [] if numbers == steps else numbers
    return ShownFormula(entry.what, steps, numbers, value_text(entry.value, entry.unit), entry.source)


def _symbols(entries: Sequence[LedgerEntry]) -> list[tuple[str, str]]:
    """Return the symbols of formulas with their meanings, as `plan --explain` lists them."""
    used = {name for entry in entries for name in entry.inputs}
    rows = dict.fromkeys(NOTATION[name] for name in NOTATION if name in used)
    return [(", ".join(names.split()), meaning + (f" ({unit})" if unit else "")) for unit, meaning, names in rows]


def _messages(page: LearnTopic, state: PageState) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield the messages of the topic: name, kind, ranks, bytes of a call, calls in a step."""
    found = figures.messages(state) if page.messages else []
    mine = [each for each in found if any(fnmatchcase(each.what, pattern) for pattern in page.messages)]
    rows: dict[tuple[str, str, str, str], float] = {}
    for each in mine:
        kind = each.collective.__name__.replace("_", "-")
        row = each.what, kind, f"{figures.first(each.size):.0f}", figures.bytes_of(each)
        rows[row] = rows.get(row, 0) + figures.first(each.calls)
    for row, calls in list(rows.items())[:MOST_MESSAGES]:
        yield *row, f"{calls:,.0f}"


def _answer(page: LearnTopic, question: LearnQuestion, state: PageState, hardware: Path | None) -> ShownAnswer:
    base = question.base or query_of(state, pinned=False)
    rows: list[tuple[str, str, Sequence[str]]] = []
    for each in tried(base, question.tries, hardware):
        if each.state is None:
            rows.append((each.words, each.query, [each.problem]))
            continue
        entries = ledger_of(each.state, page)
        cells = [_shown(entries, name) for name in question.show]
        if page.slug != SERVED:
            cells.append("fits" if each.state.priced.fits(each.state.limit_bytes) else "does not fit")
        rows.append((each.words, each.query, cells))
    return ShownAnswer(question, rows)


def _shown(entries: Sequence[LedgerEntry], name: str) -> str:
    """Return the value of an entry, or the ratio of two, as text; a dash if the layout has no such entry."""
    found = [next(matching(entries, [part]), None) for part in name.split(" / ")]
    if found[0] is None:
        return "none"
    if len(found) == 1:
        return _short(found[0])
    part, whole = (entry.value if entry is not None else None for entry in found)
    return percent(part / whole) if isinstance(part, float) and isinstance(whole, float) else "none"


def _short(entry: LedgerEntry) -> str:
    """Return the value of an entry with three digits where its unit has such a format."""
    form = {"B": format_bytes, "s": format_seconds, "": format_count, "1/s": format_count}.get(entry.unit)
    return form(entry.value) if form and isinstance(entry.value, float) else value_text(entry.value, entry.unit)


def _code(text: str) -> Markup:
    """Return a text whose parts between backticks are code."""
    parts = text.split("`")
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if at % 2 else escape(part) for at, part in enumerate(parts)
    )
