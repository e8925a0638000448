"""What our pages have in common: one HTML file that needs nothing else: no network, no script, no other file."""

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from shardwright.report.style import COLOURS, DARK_COLOURS
from shardwright.system.version import PACKAGE_VERSION

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
    """A whole page. `title` is plain text, `body` HTML; `style`: rules of CSS beside the house's own; `colours`: by
    role, light and dark, likewise."""
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
    """The colours by role. Paper is white and printers have no dark mode, so dark is for screens alone."""
    both = ({**COLOURS, **light}, {**DARK_COLOURS, **dark})
    on_paper, on_screen = (" ".join(f"--{role}: {colour};" for role, colour in colours.items()) for colours in both)
    return f"\n:root {{ {on_paper} }}\n@media screen and (prefers-color-scheme: dark) {{ :root {{ {on_screen} }} }}"


def picture(svg: str, name: str, title: str, colours: Mapping[str, str] | None = None) -> str:
    """A picture of matplotlib as a part of a page, as wide as the page, and on a narrow screen wide enough to be read.
    `name` is its id there, one on a page, with which the ids of its parts begin: matplotlib gives the parts of each
    picture the same."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', rf'<svg \1 role="img" aria-labelledby="{name}">', svg, count=1)
    svg = svg.replace(">", f'><title id="{name}">{escape(title)}</title>', 1)
    return scrolling(in_roles(svg.replace("xlink:href", "href"), colours))


def scrolling(content: str) -> str:
    """Content that scrolls by itself where it is wider than the page, so that the page never does."""
    return f'<div class="wide">\n{content}\n</div>'


def in_roles(svg: str, colours: Mapping[str, str] | None = None) -> str:
    """A picture whose colours are those of the page's roles."""
    for role, colour in {**COLOURS, **(colours or {})}.items():
        svg = svg.replace(colour, f"var(--{role})")
    return svg.strip()


def facts(rows: Iterable[tuple[str, str, str]]) -> str:
    """Numbers in large type: name, value and a remark under it, which may be empty; plain text."""
    cells = "\n".join(
        f"<div><dt>{name}</dt><dd>{value}{f'<small>{escape(remark)}</small>' if remark else ''}</dd></div>"
        for name, value, remark in rows
    )
    return f"<dl>\n{cells}\n</dl>"


_SHORT = 24
"""Letters of a cell that is not wrapped, such as a number with its unit."""


def _cell(content: str) -> str:
    """A cell of HTML."""
    return f'<td class="short">{content}</td>' if len(content) <= _SHORT and " " in content else f"<td>{content}</td>"


def table(names: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """A table of cells of HTML, with a heading if there are `names`; `kind`: its class. Long cells are
    wrapped where it is wider than the page, and on a narrow screen than a picture."""
    head = f"<thead><tr>{''.join(f'<th>{name}</th>' for name in names)}</tr></thead>\n" if names else ""
    body = "\n".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    opening = f'<table class="{kind}">' if kind else "<table>"
    return scrolling(f"{opening}\n{head}<tbody>\n{body}\n</tbody>\n</table>")
