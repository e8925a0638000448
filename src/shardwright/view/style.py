"""The style of our pictures: one set of colours by role, matplotlib's settings, a drawing as the bytes of a file,
and lines on two logarithmic axes.

`schedule/draw.py` writes the SVG of pipeline timelines itself; matplotlib draws every other picture.
"""

import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from shardwright.schedule.draw import IDLE, INK, PAPER, QUIET
from shardwright.system.units import format_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# After Okabe and Ito: colours that readers with any common colour blindness can distinguish. On a dark screen the page
# gives each role another colour, and finds the role by its value here, so no two values may be equal.
COLOURS = {
    "paper": PAPER,
    "ink": INK,
    "quiet": QUIET,
    "grid": IDLE,
    "curve": "#0072b2",
    "validation": "#d55e00",
    "limit": "#b3356b",
    "data": "#e69f00",
    "forward-backward": "#a6d1ee",
    "optimizer": "#009e73",
}
DARK_COLOURS = {
    "paper": "#14171c",
    "ink": "#e8eaee",
    "quiet": "#98a1b0",
    "grid": "#2a2f38",
    "curve": "#58b4ec",
    "validation": "#ff8a3d",
    "limit": "#ec7fab",
    "data": "#f0b429",
    "forward-backward": "#2c5a7a",
    "optimizer": "#2bbf95",
}
SETTINGS: Any = {
    "font.family": "sans-serif",
    "font.size": 9.5,
    "text.color": COLOURS["ink"],
    # The name of a folder or a preset may contain a dollar sign; it does not start a formula.
    "text.parse_math": False,
    "axes.edgecolor": COLOURS["quiet"],
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "grid.color": COLOURS["grid"],
    "grid.linewidth": 0.8,
    "xtick.color": COLOURS["quiet"],
    "ytick.color": COLOURS["quiet"],
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "legend.handlelength": 1.3,
    "legend.handletextpad": 0.5,
    "legend.columnspacing": 1.2,
    "legend.borderaxespad": 0.0,
    "legend.borderpad": 0.0,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
    # Text stays text, so that a page can be searched and read aloud. The fixed salt makes equal runs give equal files.
    "svg.fonttype": "none",
    "svg.hashsalt": "shardwright",
}


def rendered(
    size_in: tuple[float, float], compose: Callable[["Figure"], None], kind: str, transparent: bool = False
) -> bytes:
    """Return a file (`kind` png or svg) of the drawing that `compose` makes on a figure of `size_in`, width and height.

    matplotlib is imported here, not earlier. The user's own matplotlib settings are ignored. The figure is made without
    pyplot, so no display is needed. `size_in` is in inches.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(SETTINGS)
        compose(figure := Figure(figsize=size_in))
        content = io.BytesIO()
        metadata = {"Date": None} if kind == "svg" else None
        figure.savefig(content, format=kind, dpi=200, transparent=transparent, metadata=metadata)
    return content.getvalue()


def text_width_pt(text: str, size_pt: float, *, bold: bool = False) -> float:
    """Return the width of a line of text in points, in matplotlib's font; the fonts of browsers are narrower."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    font = FontProperties(family="sans-serif", weight="bold" if bold else "normal")
    return float(TextPath((0, 0), text, size=size_pt, prop=font).get_extents().width) if text.strip() else 0.0


def plain_log_ticks(ax: "Axes") -> None:
    """Write the ticks of two logarithmic axes as numbers: 1, 2, 5, 10, ... matplotlib's own labels are formulas, which
    are not rendered here (`text.parse_math` is off)."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: format_count(float(value))))
        axis.set_minor_formatter(NullFormatter())


Line = tuple[str, Sequence[float], Sequence[float]]
"""The name of a line, and the x and y of its points."""
LINE_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#e69f00", "#b3356b", "#6b5b95")


class FittedBand(NamedTuple):
    """A fitted curve with its interval: x, and the middle, lowest and highest y at each x."""

    name: str
    x: Sequence[float]
    middle: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


def log_lines_svg(
    lines: Sequence[Line],
    *,
    x_label: str = "",
    y_label: str = "",
    ticks: Sequence[float] = (),
    joined: bool = True,
    fit: FittedBand | None = None,
    kind: str = "svg",
) -> bytes:
    """Return a picture (`kind` svg or png) of lines, with a key at its right. `ticks`: the x that are written, if not
    1, 2, 5, 10, ... Without `joined` only points are drawn; they are not joined either where two have one x."""

    def compose(figure: "Figure") -> None:
        ax = figure.add_axes((0.07, 0.15, 0.73, 0.8))
        if fit is not None:
            ax.fill_between(fit.x, fit.low, fit.high, color=COLOURS["grid"], linewidth=0)
            ax.plot(fit.x, fit.middle, color=COLOURS["quiet"], linewidth=1, linestyle=(0, (5, 3)), label=fit.name)
        for at, (name, x, y) in enumerate(lines):
            style = "-" if joined and len(set(x)) == len(x) else ""
            ax.plot(x, y, f"o{style}", ms=3, lw=1, color=LINE_COLOURS[at % len(LINE_COLOURS)], label=name)
        ax.set_xscale("log")
        ax.set_yscale("log")
        plain_log_ticks(ax)
        if ticks:
            ax.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        ax.grid(True, which="major", lw=0.4)
        ax.set_xlabel(x_label, color=COLOURS["quiet"])
        ax.set_ylabel(y_label, color=COLOURS["quiet"])
        figure.legend(*ax.get_legend_handles_labels(), loc="upper left", bbox_to_anchor=(0.81, 0.95))

    return rendered((10, 3.4), compose, kind, transparent=kind == "svg")
