"""What the formulas of this package are given and what they give, recorded while they compute.

A formula that is arithmetic is a text that `compute` evaluates; one that needs more (groups of ranks, a schedule) calls
`note` beside the line that computes it. Outside of `record` noting is one look at a variable; within, the call becomes
an `Entry`, which `plan --explain` prints and a test evaluates again. Layouts are recorded one at a time.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, reduce
from types import CodeType

import numpy as np
from numpy.typing import ArrayLike

from shardwright.cost.job import Floats, Ints

Inputs = dict[str, ArrayLike]
Number = float | tuple[float, ...]


@dataclass(frozen=True)
class Entry:
    """One evaluation of a formula: `what` of a `section` is `value`, in `unit`.

    `formula`: a Python expression over the names of `inputs` with max, min, sum (over stages), ceil and log2; steps
    before it, `name = expression`, are separated by semicolons. Empty for what comes from a simulation or a table;
    `source` then names it. A name of `inputs` is a symbol of `cost.notation`, or the `identifier` of another entry,
    whose value it has.
    """

    section: str
    what: str
    formula: str
    inputs: Mapping[str, Number]
    value: Number
    unit: str
    source: str


@dataclass
class _Book:
    entries: list[Entry] = field(default_factory=list)
    section: str = ""


_BOOK: ContextVar[_Book | None] = ContextVar("_BOOK", default=None)
_NAME = re.compile(r"[A-Za-z_]\w*")


@contextmanager
def record() -> Iterator[list[Entry]]:
    """Collect what is noted within, in order; what is noted twice counts once."""
    book = _Book()
    token = _BOOK.set(book)
    try:
        yield book.entries
    finally:
        _BOOK.reset(token)


@contextmanager
def section(name: str) -> Iterator[None]:
    """What is noted within belongs to a section of this name."""
    book = _BOOK.get()
    if book is None:
        yield
        return
    before, book.section = book.section, name
    try:
        yield
    finally:
        book.section = before


def recording() -> bool:
    """Whether a ledger is open: for inputs of a note that cost something to work out."""
    return _BOOK.get() is not None


def note(
    what: str, formula: str, value: ArrayLike, unit: str = "s", source: str = "", at: str = "", /, **inputs: ArrayLike
) -> None:
    """Record an entry, in the open section or that named by `at`; of `inputs` those whose names stand in `formula`."""
    book = _BOOK.get()
    if book is None:
        return
    names = set(_NAME.findall(formula))
    given = {name: _number(each) for name, each in inputs.items() if name in names}
    entry = Entry(at or book.section, what, formula, given, _number(value), unit, source)
    if entry not in book.entries:
        book.entries.append(entry)


def total(
    what: str, terms: Mapping[str, ArrayLike], unit: str = "s", source: str = "", value: Floats | None = None
) -> Floats:
    """The sum of entries that were noted before, by their names; recorded where there is anything to add. `value`: the
    sum, where it is there already."""
    found = value if value is not None else sum(map(np.asarray, terms.values()), np.asarray(0.0))
    if recording():
        there = {identifier(name): value for name, value in terms.items() if np.any(value)}
        if there:
            note(what, " + ".join(there), found, unit, source, **there)
    return found


def compute(what: str, formula: str, unit: str = "s", source: str = "", at: str = "", /, **inputs: ArrayLike) -> Floats:
    """The value of a formula, recorded. So one that has no more to it than arithmetic is written once."""
    found = _evaluated(formula, inputs)
    if recording():
        note(what, formula, found, unit, source, at, **inputs)
    return found


class Formulas:
    """Formulas over the same arrays: `of("kept", "T * h * e")` is `compute`, and later formulas know it as `kept`."""

    def __init__(self, values: Inputs, unit: str) -> None:
        self.values, self.unit = values, unit

    def __getitem__(self, name: str) -> Floats:
        return np.asarray(self.values[name])

    def __call__(self, what: str, formula: str, source: str = "") -> Floats:
        found = compute(what, formula, self.unit, source, **self.values)
        self.values[identifier(what)] = found
        return found

    def choose(self, what: str, which: Ints, formulas: Sequence[str], source: str = "") -> Floats:
        """For each candidate the formula of its number in `which`."""
        there = np.unique(which)
        if len(there) == 1:
            return self(what, formulas[int(there[0])], source)
        found = np.select(
            [which == each for each in there], [_evaluated(formulas[each], self.values) for each in there]
        )
        self.values[identifier(what)] = found
        return found


_FUNCTIONS = {
    "max": lambda *args: reduce(np.maximum, args) if len(args) > 1 else np.max(args[0], axis=-1),
    "min": lambda *args: reduce(np.minimum, args),
    "sum": lambda terms: np.sum(terms, axis=-1),
    "log2": np.log2,
    "ceil": np.ceil,
    "__builtins__": {},
}


def _evaluated(formula: str, inputs: Inputs) -> Floats:
    steps, value = _compiled(formula)
    if steps:
        inputs = dict(inputs)
        for name, code in steps:
            inputs[name] = eval(code, _FUNCTIONS, inputs)
    return np.asarray(eval(value, _FUNCTIONS, inputs))


@cache
def _compiled(formula: str) -> tuple[list[tuple[str, CodeType]], CodeType]:
    """The steps of a formula, and its value."""
    *steps, value = formula.split("; ")
    named = (step.partition(" = ")[::2] for step in steps)
    compiled = [(name, compile(expression, "<formula>", "eval")) for name, expression in named]
    return compiled, compile(value, "<formula>", "eval")


@cache
def identifier(what: str) -> str:
    """The name under which an entry stands in the formula of another."""
    return re.sub(r"\W+", "_", what).strip("_")


def _number(value: ArrayLike) -> Number:
    """The element of an array of one; of an array (n, R, k, v) those of its v stages."""
    array = np.asarray(value, dtype=np.float64)
    if array.ndim == 4:
        array = array[0, 0, 0]
        return tuple(array.tolist())
    assert array.size == 1, f"one layout at a time is recorded, not {array.shape}"
    return float(array.reshape(-1)[0])


def substituted(formula: str, numbers: Mapping[str, str]) -> str:
    """A formula with numbers in the place of its symbols."""
    return _NAME.sub(lambda name: numbers.get(name[0], name[0]), formula)
