"""The document of a verb: each fact once, for the terminal, for `--json` and for a page.

A verb builds one VerbDocument. `view.terminal` prints its parts, `view.html` writes them as a page, and `--json` prints
`data`. A column of a table has a Quantity, which formats its values; no other code does.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from shardwright.system.units import format_bytes, format_seconds

Tone = Literal["", "strong", "good", "bad", "quiet"]


@dataclass(frozen=True)
class Quantity:
    """A kind of value: its text, and whether a column of it is aligned left and, on a page, set as code."""

    text: Callable[[Any], str] = str
    left: bool = False
    code: bool = False


WORDS = Quantity(left=True)
CODE = Quantity(left=True, code=True)
NUMBER = Quantity()
"""Any value, aligned right."""
COUNT = Quantity("{:,}".format)
BYTES = Quantity(format_bytes)
SECONDS = Quantity(format_seconds)
ERROR = Quantity("{:.1e}".format)
ROUNDED = Quantity("{:,.0f}".format)
FOUR_DIGITS = Quantity("{:.4g}".format)
SHARE = Quantity("{:.1%}".format)
WHOLE_SHARE = Quantity("{:.0%}".format)
CHANGE = Quantity("{:+.1%}".format)


class Column(NamedTuple):
    """A column of a table. `width`: its letters in a terminal, for a table that is printed row by row."""

    name: str
    quantity: Quantity = WORDS
    width: int = 0


class Marked(NamedTuple):
    """A value of a table that stands out."""

    value: Any
    tone: Tone


class TextCell(NamedTuple):
    """A cell of a table as text; empty for None."""

    text: str
    tone: Tone
    quantity: Quantity


@dataclass(frozen=True)
class Section:
    """A heading."""

    title: str


@dataclass(frozen=True)
class Note:
    """A sentence. `lead`: a word before it, which has the tone; without one, the sentence has it."""

    text: str
    lead: str = ""
    tone: Tone = ""


class Fact(NamedTuple):
    """A number with its name, and the rest of the sentence."""

    name: str
    value: str
    remark: str = ""
    tone: Tone = ""


@dataclass(frozen=True)
class Facts:
    """The numbers that a reader looks for first."""

    rows: Sequence[Fact]


@dataclass(frozen=True)
class Table:
    """A table of values. `rest`: a line below it. `streamed`: a terminal has printed the rows when they were computed
    (`view.terminal.TableStream`). `stacked`: rows are too long for a terminal, which prints the cells of a row below
    each other."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]
    rest: str = ""
    streamed: bool = False
    stacked: bool = False

    def cells(self, row: Sequence[Any]) -> Iterator[TextCell]:
        """Yield the cells of a row as text."""
        for column, value in zip(self.columns, row, strict=True):
            plain, tone = value if isinstance(value, Marked) else Marked(value, "")
            yield TextCell("" if plain is None else column.quantity.text(plain), tone, column.quantity)


@dataclass(frozen=True)
class Picture:
    """A picture, which a page has. `draw` returns it as SVG; `roles`: its colours by role, for light and for dark
    screens, in addition to the colours of `view.style`. `own_scale`: the picture is not fitted to the page, because its
    text would be too small; it scrolls. `text`: returns a rich.text.Text that replaces the picture in a terminal with
    lines of the given number of letters; without it a terminal has nothing for the picture."""

    name: str
    title: str
    draw: Callable[[], str]
    caption: str
    roles: tuple[Mapping[str, str], Mapping[str, str]] = ({}, {})
    own_scale: bool = False
    text: Callable[[int], Any] | None = None


@dataclass(frozen=True)
class Code:
    """Text whose lines are kept as they are. `narrow`: its lines are short, so that a wide page sets two columns."""

    text: str
    narrow: bool = False


Part = Section | Note | Facts | Table | Picture | Code


@dataclass(frozen=True)
class VerbDocument:
    """The result of a verb. `title`: of its page; `data`: its JSON document; `page_parts`: parts that only a page has,
    after the others."""

    title: str
    data: Any
    parts: Sequence[Part]
    page_parts: Sequence[Part] = ()
