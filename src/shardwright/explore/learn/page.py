"""A page of Learn as an HTML fragment: text, figures, formulas with numbers, messages and questions.

The template is `topic.html`. The fragment has no script and no style attribute; its style is `style.css` with
`learn.css`. Live links lead to `/` and `/learn/TOPIC` of the server.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from shardwright.cost.ledger import NOTATION, LedgerEntry, substituted
from shardwright.explore.learn import charts, figures
from shardwright.explore.learn.drawing import Figure
from shardwright.explore.learn.topics import (
    ALL_TOPICS,
    SERVED,
    TOPICS,
    LearnQuestion,
    LearnTopic,
    TriedState,
    ledger_of,
    matching,
    tried,
)
from shardwright.explore.page import templates
from shardwright.explore.pictures import PagePicture
from shardwright.explore.state import PageState, query_of
from shardwright.explore.traffic import message_table, sent_messages
from shardwright.planner.explain import number, value_text
from shardwright.system.errors import InputError, nearest
from shardwright.system.units import format_bytes, format_count, format_seconds, percent
from shardwright.view.document import Column, Table


@dataclass(frozen=True)
class ShownFormula:
    """An entry of the ledger: its name, the steps of its formula, the same with numbers, its value and its source."""

    what: str
    formula: Sequence[str]
    numbers: Sequence[str]
    value: str
    source: str


class ShownAnswer(NamedTuple):
    """A question with the states that answer it, and a table with a row for each."""

    question: LearnQuestion
    tried: Sequence[TriedState]
    table: Table


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
    formulas, pictures = list(matching(entries, page.entries)), list(drawings(page, shown, hardware))
    values: dict[str, Any] = {
        "page": page,
        "topics": TOPICS,
        "static": static,
        "query": query_of(state),
        "example": "" if shown is state else query_of(shown),
        "name": f"{shown.model} on {shown.job.cluster.name}",
        "choice": str(shown.choice),
        "pictures": pictures,
        "moves": any("<animate" in picture.svg for picture in pictures),
        "formulas": [_formula(entry) for entry in formulas],
        "messages": message_table(sent_messages(shown.priced) if page.messages else [], page.messages),
        "symbols": _symbols(formulas),
        "answers": [_answer(page, question, shown, hardware) for question in page.questions],
    }
    return templates().get_template("topic.html").render(values)


def drawings(page: LearnTopic, state: PageState, hardware: Path | None = None) -> Iterator[PagePicture]:
    """Yield each figure, or the reason why there is none below the title of the page."""
    drawn = [getattr(figures, name, None) or getattr(charts, name) for name in page.figures]
    if page.bars is not None:
        drawn.append(lambda state: charts.tried_bars(state, page.bars, hardware))
    for draw in drawn:
        try:
            drawing = draw(state)
        except InputError as error:
            drawing = PagePicture(page.title, Markup(), caption=str(error))
        yield drawing.picture() if isinstance(drawing, Figure) else drawing


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


def _answer(page: LearnTopic, question: LearnQuestion, state: PageState, hardware: Path | None) -> ShownAnswer:
    states = tried(question.base or query_of(state, pinned=False), question.tries, hardware)
    fits = [] if page.slug == SERVED else [Column("memory")]
    rows: list[list[str | None]] = []
    for trial in states:
        cells: list[str | None] = [None] * (len(question.show) + len(fits))
        if trial.state is None:
            cells[0] = trial.problem
        else:
            entries = ledger_of(trial.state, page)
            cells[: len(question.show)] = [_shown(entries, name) for name in question.show]
            if fits:
                cells[-1] = "fits" if trial.state.priced.fits(trial.state.limit_bytes) else "does not fit"
        rows.append([trial.words, *cells])
    shown = [Column(name.replace("*", "")) for name in question.show]
    return ShownAnswer(question, states, Table((Column("layout"), *shown, *fits), rows))


def _shown(entries: Sequence[LedgerEntry], name: str) -> str:
    """Return the value of an entry, or the ratio of two, as text; a dash if the layout has no such entry."""
    matches = [next(matching(entries, [part]), None) for part in name.split(" / ")]
    if matches[0] is None:
        return "none"
    if len(matches) == 1:
        return _short(matches[0])
    part, whole = (entry.value if entry is not None else None for entry in matches)
    return percent(part / whole) if isinstance(part, float) and isinstance(whole, float) else "none"


def _short(entry: LedgerEntry) -> str:
    """Return the value of an entry with three digits where its unit has such a format."""
    form = {"B": format_bytes, "s": format_seconds, "": format_count, "1/s": format_count}.get(entry.unit)
    return form(entry.value) if form and isinstance(entry.value, float) else value_text(entry.value, entry.unit)
