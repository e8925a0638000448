"""Checks of what a browser would show: no text of a picture is cut or lies over another, and no page scrolls."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text


def problems(figure: Figure) -> list[str]:
    """Return the texts of a figure that it cuts, and the pairs of texts that overlap."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    axes = [each for ax in figure.axes for each in (ax, *ax.child_axes)]
    beyond = {id(label) for ax in axes for axis in (ax.xaxis, ax.yaxis) for label in _beyond(axis)}
    texts = [text for text in figure.findobj(Text) if isinstance(text, Text) and id(text) not in beyond]
    boxes = [
        (text.get_text(), text.get_window_extent(canvas.get_renderer()))
        for text in texts
        if text.get_visible() and text.get_text().strip()
    ]
    width, height = figure.bbox.width, figure.bbox.height
    found = [
        f"cut: {name!r}"
        for name, box in boxes
        if box.x0 < -1 or box.y0 < -1 or box.x1 > width + 1 or box.y1 > height + 1
    ]
    for (one, a), (other, b) in combinations(boxes, 2):
        wide, high = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
        # Boxes of turned names of ticks overlap, and the names do not.
        turned = a.height > a.width or b.height > b.width
        if wide > 1.5 and high > 0.35 * min(a.height, b.height) and not turned:
            found.append(f"overlap: {one!r} and {other!r}")
    return found


def _beyond(axis: Any) -> list[Text]:
    """Return the labels of ticks beyond the limits of an axis, which matplotlib keeps and does not draw."""
    low, high = sorted(axis.get_view_interval())
    ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
    return [label for tick in ticks if not low <= tick.get_loc() <= high for label in (tick.label1, tick.label2)]


@contextmanager
def readable_pictures(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Figure]]:
    """Check each picture that is made meanwhile; yields their list."""
    seen: list[Figure] = []
    save = Figure.savefig

    def checked(figure: Figure, *arguments: Any, **options: Any) -> None:
        found = problems(figure)
        assert not found, found
        seen.append(figure)
        save(figure, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Figure, "savefig", checked)
        yield seen
    assert seen, "no picture was made"


def assert_page_never_scrolls(page: str) -> None:
    """Every picture and every table stands in a box that scrolls by itself where it is wider than the page."""
    wide = re.findall(r'(<div class="wide">\s*)?<(?:svg|table)\b', page)
    assert wide
    assert all(wide)
