"""A picture of lines on two logarithmic axes, with the points of each."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from shardwright.view.style import COLOURS, plain_log_ticks, rendered

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
