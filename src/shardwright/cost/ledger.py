"""Records the inputs and results of the formulas of this package while they are evaluated.

An arithmetic formula is a text that `compute` evaluates and records. Other code (groups of ranks, a schedule) computes
its value in Python and calls `note` to record it. Outside of `record` nothing is recorded, at the cost of one check;
within it each call becomes an `Entry`, which `plan --explain` prints and a test evaluates again. Layouts are recorded
one at a time.
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
    """One evaluation of a formula: the quantity `what` of a `section` has `value`, in `unit`.

    `formula`: a Python expression over the names of `inputs` with max, min, sum (over stages), ceil and log2; steps
    before it, `name = expression`, are separated by semicolons. It is empty for a value from a simulation or a table,
    which `source` then names. A name of `inputs` is a symbol of `cost.notation`, or the `identifier` of another entry,
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
    """Context that collects the entries recorded within, in order; equal entries are recorded once."""
    book = _Book()
    token = _BOOK.set(book)
    try:
        yield book.entries
    finally:
        _BOOK.reset(token)


@contextmanager
def section(name: str) -> Iterator[None]:
    """Context whose entries belong to the section `name`."""
    book = _BOOK.get()
    if book is None:
        yield
        return
    before, book.section = book.section, name
    try:
        yield
    finally:
        book.section = before


@contextmanager
def unrecorded() -> Iterator[None]:
    """Context in which nothing is recorded, and many layouts or ranks can be computed at once."""
    token = _BOOK.set(None)
    try:
        yield
    finally:
        _BOOK.reset(token)


def recording() -> bool:
    """Whether entries are recorded: a check before computing expensive inputs of a note."""
    return _BOOK.get() is not None


def note(
    what: str, formula: str, value: ArrayLike, unit: str = "s", source: str = "", at: str = "", /, **inputs: ArrayLike
) -> None:
    """Record an entry in the current section, or in section `at`, with those `inputs` whose names are in `formula`."""
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
    """The sum of entries recorded before, given by their names; recorded if a term is not 0. `value`: the sum, if it is
    computed already."""
    found = value if value is not None else sum(map(np.asarray, terms.values()), np.asarray(0.0))
    if recording():
        there = {identifier(name): value for name, value in terms.items() if np.any(value)}
        if there:
            note(what, " + ".join(there), found, unit, source, **there)
    return found


def compute(what: str, formula: str, unit: str = "s", source: str = "", at: str = "", /, **inputs: ArrayLike) -> Floats:
    """Evaluate and record a formula."""
    found = _evaluated(formula, inputs)
    if recording():
        note(what, formula, found, unit, source, at, **inputs)
    return found


class Formulas:
    """Formulas over the same arrays: `formulas("kept", "T * h * e")` is `compute`, and its value is an input named
    `kept` of later formulas."""

    def __init__(self, values: Inputs, unit: str) -> None:
        self.values, self.unit = values, unit

    def __getitem__(self, name: str) -> Floats:
        return np.asarray(self.values[name])

    def __call__(self, what: str, formula: str, source: str = "") -> Floats:
        found = compute(what, formula, self.unit, source, **self.values)
        self.values[identifier(what)] = found
        return found

    def choose(self, what: str, which: Ints, formulas: Sequence[str], source: str = "") -> Floats:
        """Evaluate for each candidate the formula whose index is in `which`."""
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
    """The compiled steps of a formula, and its compiled value."""
    *steps, value = formula.split("; ")
    named = (step.partition(" = ")[::2] for step in steps)
    compiled = [(name, compile(expression, "<formula>", "eval")) for name, expression in named]
    return compiled, compile(value, "<formula>", "eval")


@cache
def identifier(what: str) -> str:
    """The name of an entry in the formulas of other entries."""
    return re.sub(r"\W+", "_", what).strip("_")


def _number(value: ArrayLike) -> Number:
    """The element of an array of length 1; of an array (n, R, k, v) those of its v stages."""
    array = np.asarray(value, dtype=np.float64)
    if array.ndim == 4:
        array = array[0, 0, 0]
        return tuple(array.tolist())
    assert array.size == 1, f"one layout at a time is recorded, not {array.shape}"
    return float(array.reshape(-1)[0])


def substituted(formula: str, numbers: Mapping[str, str]) -> str:
    """A formula with its symbols replaced by numbers."""
    return _NAME.sub(lambda name: numbers.get(name[0], name[0]), formula)
