"""The picture of a comparison: its errors by layer and step, as the text of an SVG file for a page."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from shardwright.verification.compare import ReportRow
from shardwright.view.style import COLOURS, rendered

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class ErrorClass(NamedTuple):
    """A class of errors, up to `most` times their tolerance, with its colour on paper and on a dark screen."""

    most: float
    words: str
    paper: str
    dark: str


# Blue is equal and orange is not equal, which readers with any common colour blindness can distinguish. A stronger
# colour is a larger error. Colours are light on paper and dark on a dark screen, so that numbers in cells are legible.
CLASSES = (
    ErrorClass(1e-3, "to a thousandth of the tolerance", "#e3edf6", "#1c2c3b"),
    ErrorClass(1.0, "to the tolerance: equal", "#a5c9e7", "#2b557a"),
    ErrorClass(1e3, "to a thousand tolerances: not equal", "#f7c48f", "#8a5216"),
    ErrorClass(math.inf, "more, or not a number", "#e9824c", "#b8451a"),
)
ROLES = (
    {f"error-{at}": error_class.paper for at, error_class in enumerate(CLASSES)},
    {f"error-{at}": error_class.dark for at, error_class in enumerate(CLASSES)},
)
_FIRST, _LAST = ("embedding", "position_embedding"), ("norm", "head")
_MOST_NUMBERS = 20
"""Most columns for which the cells contain numbers."""
_MOST_NAMES = 64
_CELL_IN, _NAMES_IN, _TITLE_IN, _GAP_IN, _WIDTH_IN = 0.24, 1.45, 1.5, 0.3, 10.0

Cells = Mapping[tuple[str, int], float]
"""The largest error of each layer and step, in multiples of its tolerance."""


def cells_by_panel(rows: Iterable[ReportRow]) -> dict[str, Cells]:
    """Return the panels of each training: gradients, and parameters with their initial values as step 0."""
    panels: dict[str, dict[tuple[str, int], float]] = {}
    for row in rows:
        kind = {"initial": "parameter"}.get(row.quantity.kind, row.quantity.kind)
        if kind not in ("gradient", "parameter") or not row.name:
            continue
        cells = panels.setdefault(f"{kind}, {row.quantity.training}", {})
        at = (layer_of(row.name), row.quantity.step)
        cells[at] = max(cells.get(at, 0.0), row.excess)
    return {name: panels[name] for name in sorted(panels, key=lambda name: not name.startswith("gradient"))}


def layer_of(name: str) -> str:
    """Return the part of the model that a parameter belongs to: `layer 3`, `embedding`, `norm`."""
    layer = re.match(r"layers\.(\d+)\.", name)
    return f"layer {layer[1]}" if layer else name.partition(".")[0]


def in_order(layers: Iterable[str]) -> list[str]:
    """Return parts of the model in the order of the forward pass."""

    def place(layer: str) -> tuple[int, int, str]:
        if layer in _FIRST:
            return 0, _FIRST.index(layer), ""
        if layer.startswith("layer "):
            return 1, int(layer.removeprefix("layer ")), ""
        return 2, _LAST.index(layer) if layer in _LAST else -1, layer

    return sorted(set(layers), key=place)


def class_of(excess: float) -> int:
    """Return the class of an error, given in multiples of its tolerance, as an index into CLASSES."""
    return next((at for at, error_class in enumerate(CLASSES) if excess <= error_class.most), len(CLASSES) - 1)


def errors_svg(rows: Sequence[ReportRow]) -> str:
    """Draw a row for each layer and a column for each step; panels are next to each other."""
    panels = cells_by_panel(rows)
    layers = in_order(layer for cells in panels.values() for layer, _ in cells)
    steps = {name: sorted({step for _, step in cells}) for name, cells in panels.items()}
    n_columns = sum(map(len, steps.values()))
    room_in = _WIDTH_IN - _NAMES_IN - 0.1 - _GAP_IN * (len(panels) - 1)
    # A panel of one column is as wide as its title needs.
    widths = {name: max(len(steps[name]), _TITLE_IN / room_in * n_columns) for name in panels}
    height_in = 0.82 + 0.45 + _CELL_IN * len(layers)

    def compose(figure: "Figure") -> None:
        left_in = _NAMES_IN
        for name, cells in panels.items():
            width_in = room_in * widths[name] / sum(widths.values())
            ax = figure.add_axes(
                (
                    left_in / _WIDTH_IN,
                    0.45 / height_in,
                    width_in / _WIDTH_IN,
                    _CELL_IN * len(layers) / height_in,
                )
            )
            _draw(ax, name, cells, layers, steps[name], n_columns <= _MOST_NUMBERS, left_in == _NAMES_IN)
            left_in += width_in + _GAP_IN
        _key(figure, height_in)

    return rendered((_WIDTH_IN, height_in), compose, "svg", transparent=True).decode("utf-8")


def _draw(
    ax: "Axes", title: str, cells: Cells, layers: Sequence[str], steps: Sequence[int], numbers: bool, names: bool
) -> None:
    from matplotlib.collections import PolyCollection

    column, line = ({name: at for at, name in enumerate(some)} for some in (steps, layers))
    boxes: list[list[tuple[tuple[float, float], ...]]] = [[] for _ in CLASSES]
    for (layer, step), excess in cells.items():
        x, y = column[step], line[layer]
        ends = (x + 0.02, x + 0.98), (y + 0.06, y + 0.94)
        corners = tuple((ends[0][right], ends[1][down]) for right, down in ((0, 0), (1, 0), (1, 1), (0, 1)))
        boxes[class_of(excess)].append(corners)
        if numbers:
            ax.text(
                x + 0.5,
                y + 0.53,
                short(excess),
                ha="center",
                va="center",
                fontsize=8,
                color=COLOURS["ink"],
                fontweight="normal" if excess <= 1 else "bold",
            )
    for error_class, some in zip(CLASSES, boxes, strict=True):
        ax.add_collection(PolyCollection(some, facecolors=error_class.paper, edgecolors="none"))
    ax.set(xlim=(0, len(steps)), ylim=(len(layers), 0))
    ax.set_title(title, fontsize=9.5)
    apart = -(-len(steps) // 8)
    ax.set_xticks([at + 0.5 for at in range(0, len(steps), apart)], [str(step) for step in steps[::apart]])
    ax.set_xlabel("step", color=COLOURS["quiet"])
    rest = -(-len(layers) // _MOST_NAMES)
    shown = range(0, len(layers), rest) if names else ()
    ax.set_yticks([at + 0.5 for at in shown], [layers[at].replace("_", " ") for at in shown])
    ax.tick_params(length=0)
    ax.grid(False)
    for spine in ax.spines.values():
        spine.set_visible(False)


def _key(figure: "Figure", height_in: float) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(facecolor=error_class.paper, label=error_class.words) for error_class in CLASSES]
    figure.legend(handles=patches, ncols=len(patches), loc="upper left", bbox_to_anchor=(0.03, 1 - 0.3 / height_in))
    title = "Largest error of a layer's tensors, in multiples of its tolerance"
    figure.text(0.03, 1 - 0.06 / height_in, title, va="top", fontsize=10.5, fontweight="bold")


def short(excess: float) -> str:
    """Return a multiple of a tolerance in a few letters: 0, 2e-5, 0.3, 40, 5e9, inf."""
    if not math.isfinite(excess) or not excess:
        return f"{excess:g}"
    if 0.01 <= excess < 1000:
        return f"{excess:.1g}" if excess < 10 else f"{excess:.0f}"
    digits, power = f"{excess:.0e}".split("e")
    return f"{digits}e{int(power)}"
