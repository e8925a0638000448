"""A document as text in a terminal."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.segment import Segments
from rich.table import Table as RichTable
from rich.text import Text

from shardwright.system.console import visible_line
from shardwright.view.document import Code, Fact, Facts, Note, Part, Picture, Section, Table, TextCell, Tone

_BLOCKS = Table | Code | Picture
"""Parts with an empty line before and after them."""
_STYLES: dict[Tone, str] = {"": "", "strong": "bold", "good": "bold green", "bad": "bold red", "quiet": ""}


def print_parts(parts: Sequence[Part], console: Console) -> None:
    """Print parts of a document, except pictures without text and tables that were printed row by row."""
    for renderable in renderables(parts, console.width):
        if isinstance(renderable, RichTable):
            print_table(renderable, console)
        else:
            _print_line(console, renderable)


def renderables(parts: Sequence[Part], width: int) -> Iterator[Text | RichTable]:
    """Yield the lines and tables of parts of a document, and the empty lines between them. `width`: letters of a line
    of the terminal."""
    before: object = None
    for part in parts:
        if (isinstance(part, Picture) and part.text is None) or (isinstance(part, Table) and part.streamed):
            continue
        apart = isinstance(part, Section) or isinstance(before, _BLOCKS)
        if before is not None and (apart or (isinstance(part, _BLOCKS) and not isinstance(before, Section))):
            yield Text()
        match part:
            case Section(title):
                yield Text(title, "bold")
            case Note():
                yield _sentence(part)
            case Facts(rows):
                yield from map(_fact, rows)
            case Code(text):
                yield Text(text)
            case Picture(text=lines) if lines is not None:
                yield lines(width)
            case Table():
                yield from _stacks(part) if part.stacked else [_rows(part)]
                if part.rest:
                    yield Text(part.rest)
        before = part


def _print_line(console: Console, line: Text) -> None:
    console.print(line, soft_wrap=True)


def _sentence(note: Note) -> Text:
    lead = Text(f"{visible_line(note.lead)}: ", _STYLES[note.tone]) if note.lead else Text()
    return lead + Text(note.text, "" if note.lead else _STYLES[note.tone])


def _fact(row: Fact) -> Text:
    # A remark that starts with a number is a fact of its own; other remarks continue the sentence.
    between = "; " if row.remark[:1].isdigit() else " "
    return Text(f"{row.name}:", _STYLES[row.tone]) + Text(f" {row.value}{between}{row.remark}".rstrip())


def _rows(table: Table) -> RichTable:
    named = any(column.name for column in table.columns)
    result = columns(*(column.name for column in table.columns), left=len(table.columns))
    result.show_header = named
    for made, column in zip(result.columns, table.columns, strict=True):
        made.justify = "left" if column.quantity.left else "right"
    for row in table.rows:
        result.add_row(*(_cell_text(cell) for cell in table.cells(row)))
    return result


def _cell_text(cell: TextCell) -> Text:
    """Return a cell as it is printed: a width is measured after escapes, and a newline or tab would break a row."""
    return Text(visible_line(cell.text), _STYLES[cell.tone])


def _stacks(table: Table) -> Iterator[Text]:
    """Yield the first two cells of each row as a line, and each further cell as a line of its own."""
    for row in table.rows:
        name, value, *more = (_cell_text(cell) for cell in table.cells(row))
        yield name + Text(": ") + value
        for cell in more:
            yield Text("  ") + cell


def columns(*names: str, left: int = 0) -> RichTable:
    """Return a table without lines: `left` columns of words, followed by columns of numbers."""
    table = RichTable(*names, box=None, header_style="bold", pad_edge=False)
    for column in table.columns[left:]:
        column.justify = "right"
    return table


def print_table(table: RichTable, console: Console) -> None:
    """Print a table as wide as its content, even on a narrower screen, so that no name in it is truncated."""
    wide = console.options.update(width=100_000)
    fitting = console.options.update(width=console.measure(table, options=wide).maximum)
    console.print(Segments(console.render(table, fitting)), soft_wrap=True, end="")


class TableStream:
    """Printer of the rows of a table, each when it is computed; the columns have widths."""

    def __init__(self, table: Table, console: Console) -> None:
        self._table, self._console = table, console
        self._print([Text(column.name, "bold") for column in table.columns])

    def add(self, row: Sequence[Any]) -> None:
        self._print([_cell_text(cell) for cell in self._table.cells(row)])

    def _print(self, cells: Sequence[Text]) -> None:
        line = Text("  ").join(
            cell + " " * room if column.quantity.left else Text(" " * room) + cell
            for cell, column in zip(cells, self._table.columns, strict=True)
            for room in [max(0, column.width - cell.cell_len)]
        )
        line.rstrip()
        _print_line(self._console, line)
