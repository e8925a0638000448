"""The load of experts over a run: two panels of the curves picture."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardwright.report.panel import MANY, TIMES, dots, draw_line, first_to_last, header, running_mean, thinned, window
from shardwright.report.run_record import RunRecord
from shardwright.report.style import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def has_experts(run: RunRecord) -> bool:
    return any(record.load_by_layer for record in run.train)


def drops(run: RunRecord) -> bool:
    return any(record.dropped_fraction is not None for record in run.train)


def load_panel(ax: "Axes", run: RunRecord) -> None:
    """Draw the busiest expert's load over the mean load: the mean over layers, and a band that spans all layers."""
    told = [record for record in run.train if record.load_by_layer]
    many = len(told) >= MANY
    steps: Sequence[float] = [record.step for record in told]
    values = (
        [record.load_max_over_mean or math.nan for record in told],
        [min(record.load_by_layer) for record in told],
        [max(record.load_by_layer) for record in told],
    )
    curves = [(running_mean if many else thinned)(steps, each) for each in values]
    (steps, means), (_, least), (_, most) = curves
    n_layers, narrow = len(told[-1].load_by_layer), drops(run)
    smooth = f", mean of {window(told)} records" if many and not narrow else ""
    if n_layers > 1:
        label = f"{n_layers} layers" if narrow else f"{n_layers} layers: at the end {least[-1]:.3g} to {most[-1]:.3g}"
        ax.fill_between(steps, least, most, color=COLOURS["forward-backward"], alpha=0.6, linewidth=0, label=label)
    whose = "one layer" if n_layers == 1 else "mean" if narrow else "their mean"
    label = f"{whose}{smooth}: {first_to_last(means)}"
    ax.plot(steps, means, color=COLOURS["curve"], label=label, **dots(len(told)))
    ax.axhline(1, color=COLOURS["quiet"], linewidth=0.9, linestyle=(0, (2, 2)))
    top = max((value for value in most if math.isfinite(value)), default=1)
    ax.set_ylim(1 - 0.04 * max(top - 1, 0.25), 1 + 1.1 * max(top - 1, 0.25))
    header(ax, f"Busiest expert, {TIMES} mean")


def dropped_panel(ax: "Axes", run: RunRecord) -> None:
    """Draw the share of (token, expert) pairs that were dropped because the expert was full."""
    shares = [100 * (record.dropped_fraction or 0.0) for record in run.train]
    draw_line(ax, run, shares)
    ax.set_ylim(0, 1.12 * max(shares) or 1)
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}%")
    header(ax, "Dropped pairs of token and expert", note=f"{first_to_last(shares)}%")
