"""A document as a page: one HTML file that needs no network, no script and no other file.

`page.html` is the template of a page, `parts.html` of the parts of a document. `narrow.css` is the style of tables on
narrow screens.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from shardwright.system.files import write_whole
from shardwright.system.version import PACKAGE_VERSION
from shardwright.view.document import Part, Picture, Table, VerbDocument
from shardwright.view.style import COLOURS, DARK_COLOURS

if TYPE_CHECKING:
    from jinja2 import Environment

_SHORT = 24
"""The longest text, in letters, of a cell that is never wrapped, such as a number with its unit."""

MOST_SHORT = 32
"""Most short columns of a table whose long cells have lines of their own on a narrow screen; a wider table scrolls."""


class PageCell(NamedTuple):
    """A table cell: its text, escaped unless it is Markup, and its CSS class."""

    text: Any
    kind: str = ""


def templates_in(folder: Path) -> "Environment":
    """Return the templates of a folder of this package. They escape every value that is not Markup."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


@cache
def _templates() -> "Environment":
    result = templates_in(Path(__file__).parent)
    result.filters |= {"kind": lambda part: type(part).__name__, "svg": _svg}
    result.filters |= {"head": _head, "rows": _rows, "long": _long}
    return result


def write_page(document: VerbDocument, path: Path) -> None:
    """Write the page of a document, replacing an existing file. Raises InputError if `path` cannot be written."""
    write_whole(path, page(document).encode("utf-8"))


def page(document: VerbDocument) -> str:
    """Return the page of a document."""
    from markupsafe import Markup

    parts = [*document.parts, *document.page_parts]
    own = [part.roles for part in parts if isinstance(part, Picture)]
    # The dark colours apply to screens only, because paper is white.
    light, dark = (
        Markup(" ".join(f"--{role}: {colour};" for role, colour in {**common, **added}.items()))
        for common, added in (
            (COLOURS, _joined(roles[0] for roles in own)),
            (DARK_COLOURS, _joined(roles[1] for roles in own)),
        )
    )
    template, narrow = _templates().get_template("page.html"), Markup(narrow_style())
    colours = {"light": light, "dark": dark}
    return template.render(colours, title=document.title, parts=parts, narrow=narrow, version=PACKAGE_VERSION) + "\n"


def narrow_style() -> str:
    """Return the style of tables on narrow screens, for style sheets of pages with a `fragment`."""
    columns = " ".join(f".short-{n} {{ --short: {n}; }}" for n in range(1, MOST_SHORT + 1))
    return f"{columns}\n{(Path(__file__).parent / 'narrow.css').read_text(encoding='utf-8')}".rstrip()


def fragment(parts: Sequence[Part]) -> str:
    """Return parts of a document as HTML for another page, such as a notebook. The parts have no picture, because the
    colours of a picture are defined in the style of our pages."""
    return str(_templates().get_template("parts.html").module.document(parts))  # type: ignore[attr-defined]


def _joined(colours: Iterable[Mapping[str, str]]) -> dict[str, str]:
    return {role: colour for palette in colours for role, colour in palette.items()}


def _long(table: Table) -> list[bool]:
    """Return for each column whether it has long texts. On a narrow screen such a cell has a line of its own, below the
    other cells of its row; the first column never has, because it names the row."""
    texts = [[cell.text for cell in table.cells(row)] for row in table.rows]
    are_long = [
        at > 0 and column.quantity.left and any(len(row[at]) > _SHORT for row in texts)
        for at, column in enumerate(table.columns)
    ]
    return are_long if are_long.count(False) <= MOST_SHORT else [False] * len(are_long)


def _head(table: Table) -> list[PageCell]:
    if not any(column.name for column in table.columns):
        return []
    return [
        PageCell(name, _kinds("left" * quantity.left, "long" * long))
        for (name, quantity, _), long in zip(table.columns, _long(table), strict=True)
    ]


def _kinds(*kinds: str) -> str:
    return " ".join(filter(None, kinds))


def _rows(table: Table) -> list[list[PageCell]]:
    from markupsafe import Markup

    longs = _long(table)
    return [
        [
            PageCell(
                Markup("<code>{}</code>").format(cell.text) if cell.quantity.code and cell.text else cell.text,
                _kinds("left" * cell.quantity.left, cell.tone, _short(cell.text), "long" * long),
            )
            for cell, long in zip(table.cells(row), longs, strict=True)
        ]
        for row in table.rows
    ]


def _short(text: str) -> str:
    return "short" if len(text) <= _SHORT and " " in text else ""


def _svg(part: Picture) -> Any:
    from markupsafe import Markup

    svg = _unscaled(part.draw()) if part.own_scale else _scaled(part.draw(), part.name, part.title)
    # A picture that is wider than the page scrolls by itself, so that the page never does.
    return Markup('<div class="wide">\n{}\n</div>').format(Markup(with_roles(svg, part.roles[0]).strip()))


def with_roles(svg: str, roles: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return a picture whose colours are the variables of a style sheet. `roles`: further colours by role."""
    for role, colour in {**COLOURS, **roles}.items():
        svg = svg.replace(colour, f"var(--{role})")
    return svg


def _scaled(svg: str, name: str, title: str) -> str:
    """Return a picture of matplotlib as wide as the page, but on a narrow screen still wide enough to be read. `name`
    is its id, unique on the page, and the prefix of the ids of its parts, which matplotlib gives the same ids in each
    picture."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', rf'<svg \1 role="img" aria-labelledby="{name}">', svg, count=1)
    return svg.replace(">", f'><title id="{name}">{escape(title)}</title>', 1).replace("xlink:href", "href")


def _unscaled(svg: str) -> str:
    """Return a picture of `schedule.draw` as wide as the page, but at least nine tenths of its own width."""
    svg = svg.replace(' xmlns="http://www.w3.org/2000/svg"', "", 1)
    return re.sub(r' width="(\d+)" height="[^"]*"', r' style="min-width: calc(.9 * \1px)"', svg, count=1)
