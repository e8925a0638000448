"""The computing time of each rank over a run, as a heat map of ranks and steps."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardwright.report.panel import header, name_axis
from shardwright.report.run_record import RunRecord
from shardwright.runs.records import TrainRecord
from shardwright.view.style import rendered

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INTERVALS = 400
"""Most columns of the picture; if there are more records, a column is a mean of several."""
LEAST, MOST = 0.7, 1.3
"""Ends of the colour scale: a rank's own time / the median over all ranks."""


def has_ranks(run: RunRecord) -> bool:
    """Return whether the own time of each rank is recorded."""
    return any(record.own_s_by_rank for record in run.train)


def ranks_svg(run: RunRecord) -> str:
    """Return the heat map as the text of an SVG file for a page."""
    edges, ratios = ratios_of(run)
    height_in = min(1.1 + 0.16 * len(ratios[0]), 6.0)

    def compose(figure: "Figure") -> None:
        ax = figure.subplots()
        figure.subplots_adjust(left=0.06, right=0.985, bottom=0.45 / height_in, top=1 - 0.35 / height_in)
        _draw(figure, ax, edges, ratios)

    return rendered((10, height_in), compose, "svg", transparent=True).decode("utf-8")


def ratios_of(run: RunRecord) -> tuple[list[int], list[list[float]]]:
    """Return the edges of intervals of steps and, for each interval and rank, the rank's own time / the median over all
    ranks. NaN: not known, because the rank was not in the run."""
    size = math.ceil(len(run.train) / _INTERVALS)
    groups = [run.train[at : at + size] for at in range(0, len(run.train), size)]
    n_ranks = max(len(record.own_s_by_rank) for record in run.train)
    return [run.edges[0], *(group[-1].step for group in groups)], [_mean(group, n_ranks) for group in groups]


def _mean(records: Sequence[TrainRecord], n_ranks: int) -> list[float]:
    ratios: list[list[float]] = [[] for _ in range(n_ranks)]
    for record in records:
        own_s = record.own_s_by_rank
        middle = sorted(own_s)[(len(own_s) - 1) // 2] if own_s else 0.0
        for rank, seconds in enumerate(own_s):
            if middle > 0:
                ratios[rank].append(seconds / middle)
    return [sum(values) / len(values) if values else math.nan for values in ratios]


def _draw(figure: "Figure", ax: "Axes", edges: list[int], ratios: list[list[float]]) -> None:
    import numpy as np
    from matplotlib.ticker import MaxNLocator

    n_ranks = len(ratios[0])
    by_rank: Any = np.array(ratios).T
    colours = ax.pcolormesh(
        edges, np.arange(n_ranks + 1) - 0.5, by_rank, cmap="cividis", vmin=LEAST, vmax=MOST, rasterized=True
    )
    ax.grid(False)
    ax.set_ylim(n_ranks - 0.5, -0.5)
    ax.yaxis.set_major_locator(MaxNLocator(min(n_ranks, 12), integer=True))
    ax.xaxis.set_major_locator(MaxNLocator(10, steps=[1, 2, 2.5, 5, 10], integer=True))
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    bar = figure.colorbar(colours, ax=ax, pad=0.015, fraction=0.03, ticks=[LEAST, 1.0, MOST], extend="both")
    bar.outline.set_visible(False)
    header(ax, "Time that each rank computes, over the median of all ranks")
    name_axis(ax, "step")
