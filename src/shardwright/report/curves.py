"""The curves of a run in one picture: loss, learning rate, gradient norm, speed, the time of each phase and, in two
panels, the load of experts.
"""

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.report.headline import headline, title_of
from shardwright.report.panel import (
    MANY,
    TIMES,
    choose_scale,
    dots,
    draw_line,
    first_to_last,
    header,
    name_axis,
    nothing,
    power_of_ten,
    remark,
    running_mean,
    thinned,
    window,
)
from shardwright.report.run_record import RunRecord
from shardwright.report.words import learning_rate_in_words
from shardwright.runs.folder import PHASES
from shardwright.runs.records import TrainRecord
from shardwright.system.errors import InputError
from shardwright.system.files import suffix_problem, write_whole
from shardwright.system.units import format_bytes, format_count, format_seconds, percent
from shardwright.view.style import COLOURS, rendered

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".png", ".svg")
_PHASE_WORDS = {"data": "data", "forward_backward": "fwd + bwd", "optimizer": "optimizer"}
_LEFT = 0.06
_ROW_IN = 1.986  # one more row of panels, with the space above it
_INTERVALS = 400  # each a pixel or two wide; more than that are averaged before they are drawn


def draw_curves(run: RunRecord, path: str | Path) -> None:
    """Write the curves of a run as one picture to `path`, replacing an existing file.

    The suffix of `path` selects PNG or SVG. Raises InputError for another suffix, or if `path` cannot be written.
    """
    write_whole(Path(path), _render(run, kind_of(path)))


def kind_of(path: str | Path) -> str:
    """Return `png` or `svg`, the suffix of a picture's path. Raises InputError for another suffix."""
    if (problem := suffix_problem(Path(path), *SUFFIXES)) is not None:
        raise InputError(problem)
    return Path(path).suffix.lower()[1:]


def curves_svg(run: RunRecord) -> str:
    """Return the curves of a run as the text of an SVG file for a page, without a title and with no background."""
    return _render(run, "svg", in_page=True).decode("utf-8")


def _render(run: RunRecord, kind: str, in_page: bool = False) -> bytes:
    def compose(figure: "Figure") -> None:
        _compose(figure, run)
        if not in_page:
            _title(figure, run)

    height_in = (7.75 if in_page else 8.4) + _ROW_IN * has_experts(run)
    return rendered((10, height_in), compose, kind, transparent=in_page)


def _compose(figure: "Figure", run: RunRecord) -> None:
    from matplotlib.ticker import MaxNLocator

    inch = 1 / figure.get_figheight()
    experts = has_experts(run)
    rows: list[list[Any]] = [["loss", "loss"], ["rate", "norm"], ["speed", "split"]]
    if experts:
        rows.append(["load", "dropped" if drops(run) else "load"])
    axes = figure.subplot_mosaic(
        rows,
        height_ratios=[2.2] + [1] * (len(rows) - 1),
        gridspec_kw={"left": _LEFT, "right": 0.975, "hspace": 0.388 if experts else 0.36, "wspace": 0.17},
    )
    figure.subplots_adjust(bottom=0.34 * inch, top=(7.22 + _ROW_IN * experts) * inch)
    _loss(axes["loss"], run)
    _rate(axes["rate"], run)
    _norm(axes["norm"], run)
    _speed(axes["speed"], run)
    _split(axes["split"], run)
    if experts:
        load_panel(axes["load"], run)
    if "dropped" in axes:
        dropped_panel(axes["dropped"], run)
    first, last = run.edges[0], max(run.last_step, run.edges[0] + 1)
    for name, ax in axes.items():
        ax.set_xlim(first - 0.006 * (last - first), last + 0.006 * (last - first))
        most = 10 if ax.get_position().width > 0.5 else 5
        ax.xaxis.set_major_locator(MaxNLocator(most, steps=[1, 2, 2.5, 5, 10], integer=True))
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        ax.tick_params(labelbottom=name in ("loss", *rows[-1]))
    name_axis(axes["loss"], "tokens", at_top=True)
    name_axis(axes["loss"], "step")
    name_axis(axes[rows[-1][0]], "step")


def _title(figure: "Figure", run: RunRecord) -> None:
    inch = 1 / figure.get_figheight()
    title = title_of(run)
    figure.text(_LEFT, 1 - 0.29 * inch, title, fontsize=min(14, 14 * 76 / len(title)), fontweight="bold", va="center")
    figure.text(_LEFT, 1 - 0.55 * inch, _subtitle(run), color=COLOURS["quiet"], va="center")


def _subtitle(run: RunRecord) -> str:
    summary, precision = headline(run), run.config.precision
    batches = [f"{stage.global_batch:,} {TIMES} {stage.seq_len:,}" for stage in run.config.batch.schedule.stages]
    whole = summary.steps >= summary.planned_steps
    parts = [
        f"{summary.steps:,} steps" if whole else f"step {summary.steps:,} of {summary.planned_steps:,}",
        f"{format_count(summary.tokens)} tokens",
        f"{', then '.join(batches)} tokens a step",
        precision.in_words + (", compiled" if precision.compile else ""),
    ]
    if summary.training_s is not None:
        parts.append(f"{format_seconds(summary.training_s)} in steps")
    if summary.peak_memory_bytes is not None:
        parts.append(_memory(run.train, summary.peak_memory_bytes))
    return "  ·  ".join(parts)


def _memory(train: Sequence[TrainRecord], peak_bytes: int) -> str:
    """Return the peak memory as text, with a remark if it still rose after a quarter of the run (a possible leak)."""
    early = train[len(train) // 4].memory_bytes
    rise = f"{format_bytes(early)} rising to" if peak_bytes > 1.1 * early else "at most"
    return f"memory {rise} {format_bytes(peak_bytes)}"


def _loss(ax: "Axes", run: RunRecord) -> None:
    losses = [record.loss for record in run.train]
    finite = [loss for loss in losses if math.isfinite(loss)]
    if finite:
        many = len(losses) >= MANY
        mean = f", mean of {window(losses)} records" if many else ""
        smooth = running_mean(range(len(losses)), losses)[1] if many else finite
        ends = [value for value in smooth if math.isfinite(value)]
        draw_line(ax, run, losses, f"training{mean}: {first_to_last(ends)}")
    validation = [record for record in run.validation if math.isfinite(record.loss)]
    if validation:
        ax.plot(
            [record.step for record in validation],
            [record.loss for record in validation],
            color=COLOURS["validation"],
            linewidth=1,
            linestyle=(0, (1, 2)),
            marker="o",
            markersize=6,
            markeredgecolor=COLOURS["paper"],
            clip_on=False,
            zorder=4,
            label=f"validation: {first_to_last([record.loss for record in validation])}",
        )
    averaged = run.average_losses
    if averaged:
        steps, of_average = zip(*averaged, strict=True)
        label = f"validation, average of the weights: {first_to_last(of_average)}"
        ax.plot(*thinned(steps, of_average), color=COLOURS["validation"], linewidth=1.2, label=label, zorder=4)
    ahead = [(record.step, record.mtp_loss) for record in run.train if math.isfinite(record.mtp_loss or math.nan)]
    if ahead:
        steps, of_modules = zip(*ahead, strict=True)
        label = f"multi-token prediction: {first_to_last(of_modules)}"
        ax.plot(*thinned(steps, of_modules), color=COLOURS["quiet"], linewidth=1, label=label)
    lost = [step for step, loss in run.losses if not math.isfinite(loss)]
    if lost:
        shown_at, _ = thinned(lost, lost)
        ax.plot(
            shown_at,
            [0.985] * len(shown_at),
            transform=ax.get_xaxis_transform(),
            color=COLOURS["limit"],
            linestyle="none",
            marker="x",
            markersize=5,
            label=f"not finite: {len(lost)} of {len(run.losses)} records, first at step {lost[0]:,}",
        )
    shown = [
        *finite,
        *(record.loss for record in validation),
        *(loss for _, loss in [*ahead, *averaged] if loss is not None),
    ]
    choose_scale(ax, shown)
    if not shown:
        remark(ax, "no finite loss was logged")
    header(ax, f"Loss, {run.config.preference.loss_unit}", pad_pt=20)
    _token_axis(ax, run)


def _token_axis(ax: "Axes", run: RunRecord) -> None:
    """Add an axis of tokens above the steps."""
    import numpy as np  # matplotlib needs it, and reading a run does not

    knots = [stage.from_step for stage in run.config.batch.schedule.stages]
    knots.append(knots[-1] + 10 * max(run.config.steps, run.last_step))
    totals = list(map(run.tokens, knots))
    knots, totals = [-knots[-1], *knots], [-knots[-1] * run.tokens(1), *totals]
    tokens = ax.secondary_xaxis(
        "top", functions=(partial(np.interp, xp=knots, fp=totals), partial(np.interp, xp=totals, fp=knots))
    )
    tokens.xaxis.set_major_formatter(lambda value, _: format_count(value))
    tokens.spines["top"].set_visible(False)
    tokens.tick_params(length=0, pad=4)


def _rate(ax: "Axes", run: RunRecord) -> None:
    rates = [record.lr for record in run.train]
    if not rates:
        return nothing(ax, "Learning rate")
    power = math.floor(math.log10(max(rates))) if max(rates) > 0 else 0
    steps = [record.step for record in run.train]
    ax.plot(*thinned(steps, [rate / 10.0**power for rate in rates]), color=COLOURS["curve"], **dots(len(rates)))
    ax.set_ylim(0, 1.12 * max(rates) / 10.0**power or 1)
    newest = run.starts[-1].lr_schedule if run.starts else learning_rate_in_words(run.config)
    others = [at for at, start in enumerate(run.starts) if start.lr_schedule != newest]
    changed = f"from step {run.starts[others[-1] + 1].step + 1:,}: " if others else ""
    header(ax, f"Learning rate, {TIMES} {power_of_ten(power)}", note=f"{changed}{newest}")


def _norm(ax: "Axes", run: RunRecord) -> None:
    norms, clip = [record.grad_norm for record in run.train], run.config.optimizer.clip_norm
    if not norms:
        return nothing(ax, "Gradient norm")
    finite = [norm for norm in norms if math.isfinite(norm)]
    draw_line(ax, run, norms)
    # A line at a limit far above every norm would only press the curve flat.
    near = 0 < clip <= 5 * max(finite, default=0)
    shown = finite + [clip] * near
    if not choose_scale(ax, shown):
        ax.set_ylim(0, 1.12 * max(shown, default=1) or 1)
    over = sum(norm > clip for norm in norms)
    note = f"clipped at {clip:g}: {over} of {len(norms)} records" if clip else "never clipped"
    if near:
        ax.axhline(clip, color=COLOURS["limit"], linewidth=1.2, linestyle=(0, (5, 3)), zorder=3, label=note)
    if not finite:
        remark(ax, "no finite norm was logged")
    header(ax, "Gradient norm", note=note)


def _speed(ax: "Axes", run: RunRecord) -> None:
    summary = headline(run)
    if summary.median_tokens_per_s is None:
        return nothing(ax, "Tokens per second")
    edges, seconds = _intervals(run)
    spans = [(run.tokens(end) - run.tokens(first)) / (end - first) for first, end in pairwise(edges)]
    per_s = [tokens / s if s > 0 else math.nan for tokens, s in zip(spans, seconds["step"], strict=True)]
    ax.stairs(per_s, edges, baseline=None, color=COLOURS["curve"], linewidth=1.2)
    mfu = "" if summary.median_mfu is None else f", MFU {summary.median_mfu:.1%}"
    medians = [
        (numbers.median_tokens_per_s, segment.first_step, segment.last_step)
        for segment, numbers in zip(run.segments, summary.segments, strict=True)
        if numbers.median_tokens_per_s is not None
    ]
    label = f"median {format_count(summary.median_tokens_per_s)}{mfu}"
    dotted: Any = {"color": COLOURS["quiet"], "linewidth": 0.9, "linestyle": (0, (2, 2)), "label": label}
    ax.hlines(*zip(*medians[-_INTERVALS:], strict=True), **dotted)
    ax.set_ylim(0, 1.12 * max((value for value in per_s if math.isfinite(value)), default=1))
    ax.yaxis.set_major_formatter(lambda value, _: format_count(value))
    header(ax, "Tokens per second")


def _split(ax: "Axes", run: RunRecord) -> None:
    share = headline(run).time_share
    if share is None:
        return nothing(ax, "Time")
    edges, seconds = _intervals(run)
    whole = [sum(parts) or 1.0 for parts in zip(*(seconds[phase] for phase in PHASES), strict=True)]
    # Phases that should be short are at the edges of the stack, where their height can be read.
    below, drawn = [0.0] * len(whole), {}
    for phase in ("optimizer", "forward_backward", "data"):
        above = [b + 100 * s / w for b, s, w in zip(below, seconds[phase], whole, strict=True)]
        colour = COLOURS[phase.replace("_", "-")]
        drawn[phase] = ax.stairs(above, edges, baseline=below, fill=True, color=colour, linewidth=0)
        below = above
    ax.set_ylim(0, 100)
    ax.grid(False)
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0f}%")
    header(ax, "Time", [(drawn[phase], f"{_PHASE_WORDS[phase]} {percent(share[phase])}") for phase in PHASES])


def _intervals(run: RunRecord) -> tuple[list[int], dict[str, list[float]]]:
    """Return the edges of intervals of steps and, by phase, the mean seconds of a step in each interval."""
    size = math.ceil(len(run.train) / _INTERVALS)
    groups = [run.train[at : at + size] for at in range(0, len(run.train), size)]
    means = {
        name: [sum(getattr(record, f"{name}_s") for record in group) / len(group) for group in groups]
        for name in ("step", *PHASES)
    }
    return [run.edges[0], *(group[-1].step for group in groups)], means


def has_experts(run: RunRecord) -> bool:
    return any(record.load_by_layer for record in run.train)


def drops(run: RunRecord) -> bool:
    return any(record.dropped_fraction is not None for record in run.train)


def load_panel(ax: "Axes", run: RunRecord) -> None:
    """Draw the busiest expert's load over the mean load: the mean over layers, and a band that spans all layers."""
    records = [record for record in run.train if record.load_by_layer]
    many = len(records) >= MANY
    steps: Sequence[float] = [record.step for record in records]
    values = (
        [record.load_max_over_mean or math.nan for record in records],
        [min(record.load_by_layer) for record in records],
        [max(record.load_by_layer) for record in records],
    )
    curves = [(running_mean if many else thinned)(steps, series) for series in values]
    (steps, means), (_, least), (_, most) = curves
    n_layers, narrow = len(records[-1].load_by_layer), drops(run)
    smooth = f", mean of {window(records)} records" if many and not narrow else ""
    if n_layers > 1:
        label = f"{n_layers} layers" if narrow else f"{n_layers} layers: at the end {least[-1]:.3g} to {most[-1]:.3g}"
        ax.fill_between(steps, least, most, color=COLOURS["forward-backward"], alpha=0.6, linewidth=0, label=label)
    whose = "one layer" if n_layers == 1 else "mean" if narrow else "their mean"
    label = f"{whose}{smooth}: {first_to_last(means)}"
    ax.plot(steps, means, color=COLOURS["curve"], label=label, **dots(len(records)))
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
