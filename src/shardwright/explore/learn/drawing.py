"""A small canvas for figures of Learn: boxes, text, arrows and dots that move, as SVG.

A figure is WIDTH units wide, so that its text can be read on a narrow screen. Colours are classes of `learn.css`: k0 to
k11 for ranks. A dot moves by SMIL, has the class `moves`, which reduced motion hides, and is invisible unless
it moves; arrows and words show the same facts without motion.
"""

from collections.abc import Sequence
from html import escape

from markupsafe import Markup

from shardwright.explore.pictures import PagePicture

WIDTH = 360
MOST_RANKS = 8
"""Most ranks that a figure draws."""
COLOURS = 12


class Figure:
    """A drawing with a title and a text that describes it for a screen reader. `name`: unique on the page."""

    def __init__(self, name: str, title: str, text: str, caption: str = "") -> None:
        self.name, self.title, self.text, self.caption = f"figure-{name}", title, text, caption
        self._parts: list[str] = []
        self._moving: list[str] = []  # drawn above all parts
        self._bottom = 0.0

    def box(self, x: float, y: float, width: float, height: float, kind: str = "", words: str = "") -> None:
        """Add a rectangle with words in its middle."""
        sizes = f'x="{_n(x)}" y="{_n(y)}" width="{_n(max(width, 0))}" height="{_n(height)}"'
        self._parts.append(f'<rect class="{kind or "line"}" {sizes}/>')
        self._bottom = max(self._bottom, y + height)
        if words:
            self.words(x + width / 2, y + height / 2 + 4, words, "middle")

    def words(self, x: float, y: float, words: str, anchor: str = "start", kind: str = "") -> None:
        """Add a line of text on the baseline y."""
        attribute = f' class="{kind}"' * bool(kind)
        at = f' text-anchor="{anchor}"' * (anchor != "start")
        self._parts.append(f'<text{attribute} x="{_n(x)}" y="{_n(y)}"{at}>{escape(words)}</text>')
        self._bottom = max(self._bottom, y + 4)

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """Add a line with a head at its end."""
        length = max(((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5, 1e-9)
        ux, uy = (x2 - x1) / length, (y2 - y1) / length
        sides = [(x2 - 5 * ux + side * uy, y2 - 5 * uy - side * ux) for side in (3, -3)]
        head = "".join(f"M{_n(x)} {_n(y)}L{_n(x2)} {_n(y2)}" for x, y in sides)
        self._parts.append(f'<path class="arrow" d="M{_n(x1)} {_n(y1)}L{_n(x2)} {_n(y2)}{head}"/>')
        self._bottom = max(self._bottom, y1, y2)

    def path(self, d: str, kind: str) -> None:
        """Add a path."""
        self._parts.append(f'<path class="{kind}" d="{d}"/>')

    def dot(self, way: Sequence[tuple[float, float]], begin: float, end: float, kind: str, seconds: float = 8) -> None:
        """Add a dot that moves along `way` between two shares of a cycle."""
        d = "M" + "L".join(f"{_n(x)} {_n(y)}" for x, y in way)
        times = f"0;{begin:.3f};{end:.3f};1"
        self._moving.append(
            f'<circle class="moves {kind}" r="4.5" opacity="0">'
            f'<animateMotion path="{d}" dur="{seconds:g}s" keyPoints="0;0;1;1" keyTimes="{times}" calcMode="linear" '
            f'repeatCount="indefinite"/>{_shown(begin, end, seconds)}</circle>'
        )

    def mark(
        self, x: float, y: float, width: float, height: float, begin: float, end: float, seconds: float = 8
    ) -> None:
        """Add a frame that is visible between two shares of a cycle."""
        sizes = f'x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}"'
        self._moving.append(f'<rect class="moves mark" {sizes} opacity="0">{_shown(begin, end, seconds)}</rect>')

    def cursor(self, x1: float, x2: float, top: float, bottom: float, seconds: float = 12) -> None:
        """Add a vertical line that moves from x1 to x2."""
        self._moving.append(
            f'<path class="moves cursor" opacity="0" d="M0 {_n(top)}V{_n(bottom)}"><animateMotion '
            f'path="M{_n(x1)} 0L{_n(x2)} 0" dur="{seconds:g}s" repeatCount="indefinite"/>'
            f'<set attributeName="opacity" to="1"/></path>'
        )

    def picture(self) -> PagePicture:
        """Return the drawing as a picture of a page."""
        names = f'aria-labelledby="{self.name} {self.name}-text"'
        head = f'<title id="{self.name}">{escape(self.title)}</title>'
        head += f'<desc id="{self.name}-text">{escape(self.text)}</desc>'
        size = f'viewBox="0 0 {WIDTH} {_n(self._bottom + 4)}"'
        svg = f'<svg class="drawing" role="img" {names} {size}>{head}{"".join(self._parts + self._moving)}</svg>'
        return PagePicture(self.title, Markup(svg), caption=self.caption)


def colour(at: int) -> str:
    """Return the class of the colour of a rank or a kind."""
    return f"k{at % COLOURS}"


def some(shown: int, total: int, noun: str = "ranks") -> str:
    """Return the words for a drawing of some of many: `8 ranks`, or `8 of 128 ranks`."""
    return f"{total} {noun}" if shown >= total else f"{shown} of {total:,} {noun}"


def _shown(begin: float, end: float, seconds: float) -> str:
    values, times = ("1;0", f"0;{end:.3f}") if begin <= 0 else ("0;1;0", f"0;{begin:.3f};{end:.3f}")
    return (
        f'<animate attributeName="opacity" values="{values}" keyTimes="{times}" calcMode="discrete" '
        f'dur="{seconds:g}s" repeatCount="indefinite"/>'
    )


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
