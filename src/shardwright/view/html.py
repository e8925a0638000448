"""Parts shared by all pages. A page is one HTML file that needs no network, no script and no other file."""

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from shardwright.system.version import PACKAGE_VERSION
from shardwright.view.style import COLOURS, DARK_COLOURS

_STYLE = """
body { margin: 0 auto; max-width: 62rem; padding: 2rem 1.25rem 3rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0; text-wrap: balance; }
h2 { font-size: 1.05rem; margin: 2.25rem 0 .5rem; }
p { margin: .4rem 0; max-width: 46rem; }
.quiet, dt, figcaption, footer { color: var(--quiet); font-size: .875rem; }
.bad { color: var(--limit); font-weight: 600; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(11.5rem, 1fr)); gap: 1.1rem 1.25rem;
  margin: 1.5rem 0; padding: 1.1rem 0; border: solid var(--grid); border-width: 1px 0; }
dd { margin: 0; font-size: 1.3rem; font-weight: 600; font-variant-numeric: tabular-nums; }
dd small { display: block; font-size: .8125rem; font-weight: 400; color: var(--quiet); }
figure { margin: 1.5rem 0; }
figure svg { display: block; width: 100%; min-width: 44rem; height: auto; }
div.wide { overflow-x: auto; }
table { border-collapse: collapse; width: max-content; max-width: max(100%, 44rem);
  font-variant-numeric: tabular-nums; }
td.short { white-space: nowrap; }
th, td { padding: .2rem 1.5rem .2rem 0; text-align: right; font-weight: 400; }
th { color: var(--quiet); font-size: .875rem; border-bottom: 1px solid var(--grid); }
code, pre { font: .875rem/1.5 ui-monospace, monospace; }
pre { margin: .5rem 0; padding: .8rem 1rem; border: 1px solid var(--grid); border-radius: 6px; overflow-x: auto; }
pre.file { columns: 20rem 2; column-gap: 2rem; white-space: pre-wrap; }
ul { margin: .4rem 0; padding-left: 1.25rem; }
footer { margin-top: 3rem; }
@media print { body { max-width: none; padding: 0; font-size: 10pt; } pre { white-space: pre-wrap; }
  code, pre { font-size: 8.5pt; }
  figure svg { min-width: 0 !important; }
  dl, figure, pre, table { break-inside: avoid; } h2 { break-after: avoid; } }
"""


def document(
    title: str, body: str, style: str = "", colours: tuple[Mapping[str, str], Mapping[str, str]] = ({}, {})
) -> str:
    """Return a whole page. `title` is plain text, `body` is HTML. `style`: CSS rules added to the common ones;
    `colours`: colours by role added to the common ones, for light and for dark screens."""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>{_variables(*colours)}{_STYLE}{style}</style>
</head>
<body>
{body}
<footer>Written by shardwright {escape(PACKAGE_VERSION)}.</footer>
</body>
</html>
"""


def _variables(light: Mapping[str, str], dark: Mapping[str, str]) -> str:
    """Return the colours by role as CSS variables. The dark ones apply to screens only, because paper is white."""
    both = ({**COLOURS, **light}, {**DARK_COLOURS, **dark})
    on_paper, on_screen = (" ".join(f"--{role}: {colour};" for role, colour in colours.items()) for colours in both)
    return f"\n:root {{ {on_paper} }}\n@media screen and (prefers-color-scheme: dark) {{ :root {{ {on_screen} }} }}"


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
    cells = "\n".join(
        f"<div><dt>{name}</dt><dd>{value}{f'<small>{remark}</small>' if remark else ''}</dd></div>"
        for name, value, remark in (map(escape, row) for row in rows)
    )
    return f"<dl>\n{cells}\n</dl>"


_SHORT = 24
"""The longest text, in letters, of a cell that is never wrapped, such as a number with its unit."""


def _cell(content: str) -> str:
    """Return a table cell around `content`, which is HTML."""
    return f'<td class="short">{content}</td>' if len(content) <= _SHORT and " " in content else f"<td>{content}</td>"


def table(names: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """Return a table of HTML cells, with a heading if there are `names`; `kind`: its CSS class. Long cells are wrapped
    if the table is wider than the page or, on a narrow screen, wider than a picture."""
    head = f"<thead><tr>{''.join(f'<th>{name}</th>' for name in names)}</tr></thead>\n" if names else ""
    body = "\n".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    opening = f'<table class="{kind}">' if kind else "<table>"
    return scrolling(f"{opening}\n{head}<tbody>\n{body}\n</tbody>\n</table>")
