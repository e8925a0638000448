"""The pages of the explorer, rendered from the documents of `plan`."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

from jinja2 import Environment
from markupsafe import Markup

from shardwright.cost.hardware_file import known_tables
from shardwright.explore import pictures
from shardwright.explore.sliders import AXES, MICRO_BATCH, moved, sliders
from shardwright.explore.state import (
    CHOICES,
    JOB_DEFAULTS,
    JOB_FIELDS,
    LAYOUT_KEYS,
    MOST_KEYS,
    PAGES,
    PIN,
    PageState,
    ParsedState,
    check,
    cluster_words,
    layout_value,
    parse,
    query_of,
)
from shardwright.explore.traffic import groups, message_table, overlap_table, sent_messages
from shardwright.model.presets import PRESETS
from shardwright.planner.diff import diff
from shardwright.planner.run_file import run_file, untrained
from shardwright.planner.search import MARGIN
from shardwright.report.diff_view import memory_table, time_table, time_verdict
from shardwright.report.plan_pictures import ROLES
from shardwright.report.plan_view import explained_document, job_note, layout_parts
from shardwright.system.errors import InputError
from shardwright.system.units import format_bytes, format_seconds
from shardwright.view.document import (
    Column,
    Facts,
    Note,
    Part,
    Picture,
    Table,
    VerbDocument,
)
from shardwright.view.html import fragment, narrow_style, templates_in
from shardwright.view.style import COLOURS, DARK_COLOURS

MOVE, TO = "move", "to"
"""Keys of a query string that ask for a move of a slider: the key, and its new position."""
MOST_SHOWN = 8
"""Most kinds of groups whose mesh is drawn."""


@cache
def templates() -> Environment:
    """Return the templates of the pages."""
    environment = templates_in(PAGES)
    environment.filters["code"] = _code
    environment.globals |= {
        "fragment": lambda parts: Markup(fragment(parts)),
        "title": "Shardwright explorer",
        "here": "",
    }
    environment.globals |= {"static": False, "styles": ("style.css",)}
    return environment


def _code(text: str) -> Markup:
    """Return a text whose parts between backticks are code."""
    parts = [Markup("<code>{}</code>" if at % 2 else "{}").format(part) for at, part in enumerate(text.split("`"))]
    return Markup().join(parts)


def style() -> str:
    """Return the style sheet, with the colours of our pages for light and for dark screens."""
    colours = [
        " ".join(f"--{role}: {colour};" for role, colour in {**common, **ROLES[side]}.items())
        for side, common in enumerate((COLOURS, DARK_COLOURS))
    ]
    dark = f"@media (prefers-color-scheme: dark) {{ :root {{ {colours[1]} }} }}"
    own = (PAGES / "style.css").read_text(encoding="utf-8")
    return f":root {{ {colours[0]} }}\n{dark}\n{own}{narrow_style()}\n"


@dataclass(frozen=True)
class Explorer:
    """The pages. `hardware`: a file of `shardwright measure`; `start`: the query string of an empty address."""

    hardware: Path | None = None
    start: str = ""

    def read(self, query: str) -> ParsedState:
        """Return the state of an address, after a move if it asks for one."""
        query, key, text = _split_move(query or self.start)
        parsed = parse(query, self.hardware)
        if not key:
            return parsed
        if key in LAYOUT_KEYS and parsed.state is not None:
            try:
                return parse(query_of(_moved(parsed.state, key, text)), self.hardware)
            except InputError as error:
                return ParsedState({**parsed.values, key: text}, parsed.job, None, error.problems)
        return parse(urlencode({**parsed.values, key: text}), self.hardware)

    def choices(self) -> dict[str, Sequence[str]]:
        """Return the values of the fields of the job that are lists."""
        known = known_tables(self.hardware)
        chips = sorted([*known.accelerators, *known.clusters])
        return {**CHOICES, "chip": chips, "network": ["", *sorted(known.networks)]}

    def home(self, query: str) -> str:
        """Return the whole page of an address."""
        return templates().get_template("plan.html").render(**self._values(self.read(query)))

    def answers(self, query: str) -> str:
        """Return the form and the answers of an address, without the page around them."""
        return templates().get_template("answers.html").render(**self._values(self.read(query)))

    def _values(self, parsed: ParsedState) -> dict[str, Any]:
        state = parsed.state
        query = urlencode(parsed.values) if state is None else query_of(state)
        values: dict[str, Any] = {
            "here": "plan",
            "parsed": parsed,
            "state": state,
            "query": query,
            "fields": JOB_FIELDS,
            "choices": self.choices(),
            "models": tuple(PRESETS),
            "groups": {},
            "layout_keys": LAYOUT_KEYS,
            "pin": parsed.values.get(PIN, ""),
            "job_query": urlencode({key: parsed.values[key] for key in JOB_DEFAULTS if key in parsed.values}),
        }
        if state is not None:
            values |= {"groups": sliders(state), "answer": answer(state), "command": self.command(state)}
            values |= {"pin_query": f"{query_of(state, False)}&{urlencode({PIN: query_of(state, False)})}"}
            values |= {"bare_query": query_of(state, False), "untrained": untrained(state.job.precision)}
        return values

    def command(self, state: PageState) -> str:
        """Return the command line that prints the same numbers."""
        job = state.job
        cluster, changes = cluster_words(job)
        words = ["shardwright", "plan"]
        plain = (job.optimizer, job.narrow_states, job.compiled) == ("adamw", False, False)
        if plain:
            words += ["--model", state.model, "--global-batch", f"{job.global_batch}", "--seq-len", f"{job.seq_len}"]
            words += ["--precision", job.precision] if job.precision != "bf16" else []
        words += ["--cluster", cluster]
        for name, value in changes.items():
            words += [f"--{name.replace('_', '-')}", value]
        words += ["--hardware", str(self.hardware)] if self.hardware is not None else []
        words += [] if job.document_tokens is None else ["--document-tokens", repr(float(job.document_tokens))]
        words += ["--memory-margin", repr(state.margin)] if state.margin != MARGIN else []
        if state.goal is not None:
            words += ["--budget-tokens", repr(state.goal.tokens)]
            words += [
                word
                for price in state.goal.prices.values()
                for word in ("--price", f"{price:.9f}".rstrip("0").rstrip("."))
            ]
        return shlex.join([*words, "--explain", str(state.choice) if plain else "run.toml"])

    def run_toml(self, state: PageState) -> str:
        """Return the run file of a state. Raises InputError for a precision in which `train` does not compute."""
        goal = None if state.goal is None else state.goal.tokens
        return run_file(state.job, state.model, state.choice, self.command(state), goal)


def _split_move(query: str) -> tuple[str, str, str]:
    """Return the query string without its move, the key that moves, and its new position."""
    try:
        given = parse_qsl(query, keep_blank_values=True, max_num_fields=MOST_KEYS, errors="replace")
    except ValueError:
        return query, "", ""
    move = dict(pair for pair in given if pair[0] in (MOVE, TO))
    return urlencode([pair for pair in given if pair[0] not in move]), move.get(MOVE, ""), move.get(TO, "")


def _moved(state: PageState, key: str, text: str) -> PageState:
    value = layout_value(key, text)[key] if text and "," not in text else None
    if key in (*AXES, MICRO_BATCH):
        value = 1 if value is None else value
        if value < 1:
            raise InputError(f"{key}={value}: a whole number of 1 or more is needed")
    choice = moved(state.job, state.choice, key, value)
    check(state.job, choice)
    return replace(state, choice=choice)


def document(state: PageState) -> VerbDocument:
    """Return the document of `plan --explain` for a state: every number of the page is a number of it."""
    return explained_document(state.priced, state.model, state.limit_bytes, state.goal)


@dataclass(frozen=True)
class PageAnswer:
    """The answers of a page. `status`: the most important numbers in one sentence, which a screen reader announces;
    `first`: the numbers and sentences shown first, `tables`: the others; `overlap`: the exposed and the overlapped time
    of messages."""

    status: str
    fits: bool
    first: list[Part]
    tables: list[Part]
    drawn: list[pictures.PagePicture]
    overlap: list[Part]
    meshes: list[pictures.PagePicture]
    compared: list[Part]


def answer(state: PageState) -> PageAnswer:
    """Return the answers of a state."""
    priced, limit = state.priced, state.limit_bytes
    fits = priced.fits(limit)
    memory = f"{format_bytes(priced.peak_bytes)} of {format_bytes(limit)}"
    drawn = [
        pictures.memory_bar(priced, limit),
        pictures.time_bar(priced),
        pictures.stage_memory(priced, limit),
        pictures.step_memory(priced, limit),
        pictures.schedule_picture(priced),
    ]
    messages = sent_messages(priced)
    parts = [part for part in layout_parts(priced, limit, state.goal) if not isinstance(part, Picture)]
    first = [part for part in parts if isinstance(part, Facts | Note)]
    return PageAnswer(
        f"A step takes {format_seconds(priced.step_s)}; memory {memory}, {'fits' if fits else 'does not fit'}.",
        fits,
        [job_note(state.job, state.model), *first],
        [*(part for part in parts if part not in first), *([message_table(messages)] if messages else [])],
        [picture for picture in drawn if picture is not None],
        [overlap_table(priced, messages)] if messages else [],
        [pictures.mesh(priced, group) for group in groups(priced, messages)[:MOST_SHOWN]],
        [] if state.pinned is None else compared(state.pinned, state),
    )


def compared(pinned: PageState, state: PageState) -> list[Part]:
    """Return the difference from the pinned state, term by term."""
    difference = diff(pinned.priced, state.priced, explained=False)
    verdict = time_verdict(difference.slower, difference.per, "the pinned one", "this layout")
    parts: list[Part] = [Note(f"{verdict}; pinned: {pinned.choice}")]
    changed = [(name, one, other) for name, (one, other) in difference.choices.items()]
    if changed:
        parts.append(Table((Column("choice"), Column("pinned"), Column("now")), changed))
    tables = (time_table, difference.time), (memory_table, difference.memory)
    return parts + [table(difference, ("pinned", "now")) for table, terms in tables if terms]
