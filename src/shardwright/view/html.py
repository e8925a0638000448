"""A document as a page. A page is one HTML file that needs no network, no script and no other file.

`page.html` is the template of all pages. Pages that have no VerbDocument give their own HTML as its body.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shardwright.system.files import write_whole
from shardwright.system.version import PACKAGE_VERSION
from shardwright.view.document import Fact, Picture, Table, VerbDocument
from shardwright.view.style import COLOURS, DARK_COLOURS

if TYPE_CHECKING:
    from jinja2 import Environment

Roles = tuple[Mapping[str, str], Mapping[str, str]]
"""Colours by role, for light and for dark screens."""
_SHORT = 24
"""The longest text, in letters, of a cell that is never wrapped, such as a number with its unit."""


class PageCell(NamedTuple):
    """A table cell: its text, escaped unless it is Markup, and its CSS class."""

    text: Any
    kind: str = ""


@cache
def _templates() -> "Environment":
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    result = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    result.filters |= {"kind": lambda part: type(part).__name__, "head": _head, "rows": _rows, "svg": _svg}
    return result


def write_page(document: VerbDocument, path: Path) -> None:
    """Write the page of a document, replacing an existing file. Raises InputError if `path` cannot be written."""
    write_whole(path, page(document).encode("utf-8"))


def page(document: VerbDocument) -> str:
    """Return the page of a document."""
    roles: Roles = ({}, {})
    for part in document.parts:
        if isinstance(part, Picture):
            roles = ({**roles[0], **part.roles[0]}, {**roles[1], **part.roles[1]})
    header = f"<header>\n<h1>{escape(document.title)}</h1>\n</header>"
    return _page(document.title, header, document.parts, "", roles)


def document(title: str, body: str, style: str = "", colours: Roles = ({}, {})) -> str:
    """Return a whole page. `title` is plain text, `body` is HTML. `style`: CSS rules added to the common ones;
    `colours`: colours by role added to the common ones."""
    return _page(title, body, (), style, colours)


def _page(title: str, body: str, parts: Sequence[object], style: str, roles: Roles) -> str:
    from markupsafe import Markup

    # The dark colours apply to screens only, because paper is white.
    light, dark = (
        Markup(" ".join(f"--{role}: {colour};" for role, colour in {**common, **own}.items()))
        for common, own in zip((COLOURS, DARK_COLOURS), roles, strict=True)
    )
    return (
        _templates()
        .get_template("page.html")
        .render(
            title=title,
            body=Markup(body),
            parts=parts,
            style=Markup(style),
            light=light,
            dark=dark,
            version=PACKAGE_VERSION,
        )
        + "\n"
    )


def _head(table: Table) -> list[PageCell]:
    named = any(column.name for column in table.columns)
    return [PageCell(name, "left" * quantity.left) for name, quantity, _ in table.columns] if named else []


def _rows(table: Table) -> list[list[PageCell]]:
    from markupsafe import Markup

    return [
        [
            PageCell(
                Markup("<code>{}</code>").format(cell.text) if cell.quantity.code and cell.text else cell.text,
                " ".join(filter(None, ("left" * cell.quantity.left, cell.tone, _short(cell.text)))),
            )
            for cell in table.cells(row)
        ]
        for row in table.rows
    ]


def _short(text: str) -> str:
    return "short" if len(text) <= _SHORT and " " in text else ""


def _svg(part: Picture) -> Any:
    from markupsafe import Markup

    return Markup(picture(part.draw(), part.name, part.title, part.roles[0]))


def picture(svg: str, name: str, title: str, colours: Mapping[str, str] | None = None) -> str:
    """Return a matplotlib picture as a part of a page. It is as wide as the page, but on a narrow screen still wide
    enough to be read. `name` is its id, unique on the page, and the prefix of the ids of its parts, which matplotlib
    gives the same ids in each picture."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', rf'<svg \1 role="img" aria-labelledby="{name}">', svg, count=1)
    svg = svg.replace(">", f'><title id="{name}">{escape(title)}</title>', 1)
    return scrolling(in_roles(svg.replace("xlink:href", "href"), colours))


def scrolling(content: str) -> str:
    """Return content that scrolls by itself if it is wider than the page, so that the page never does."""
    return f'<div class="wide">\n{content}\n</div>'


def in_roles(svg: str, colours: Mapping[str, str] | None = None) -> str:
    """Return a picture with each colour replaced by the page's CSS variable for its role."""
    for role, colour in {**COLOURS, **(colours or {})}.items():
        svg = svg.replace(colour, f"var(--{role})")
    return svg.strip()


def facts(rows: Iterable[tuple[str, str, str]]) -> str:
    """Return numbers in large type. A row has a name, a value and a remark that may be empty, all plain text."""
    return str(_parts().facts([Fact(*row) for row in rows]))


def table(names: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """Return a table of HTML cells, with a heading if there are `names`; `kind`: its CSS class. Long cells are wrapped
    if the table is wider than the page or, on a narrow screen, wider than a picture."""
    from markupsafe import Markup

    cells = [[PageCell(Markup(cell), _short(cell)) for cell in row] for row in rows]
    return str(_parts().table([PageCell(Markup(name)) for name in names], cells, kind))


def _parts() -> Any:
    return _templates().get_template("parts.html").module
