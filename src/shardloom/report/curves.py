"""The curves of a run in one picture: loss, learning rate, gradient norm, speed, and where the time goes.

matplotlib is imported when something is drawn and not before, so that this module costs nothing to import.
It is used through its objects alone: nothing outside the picture changes, and no display is needed.
"""

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardloom.errors import InputError
from shardloom.files import write_whole
from shardloom.report.headline import PHASES, headline, layout_in_words, model_in_words, percent
from shardloom.report.run import Logged, RunRecord
from shardloom.report.style import COLOURS, SETTINGS
from shardloom.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")
TIMES = "\N{MULTIPLICATION SIGN}"
_PHASE_WORDS = {"data": "data", "forward_backward": "fwd + bwd", "optimizer": "optimizer"}
_LEFT = 0.06
_MANY = 60  # records from which a line is noisy enough to need its mean beside it
_INTERVALS = 400  # each a pixel or two wide; more than that are averaged before they are drawn


def draw_curves(run: RunRecord, path: str | Path) -> None:
    """Write the picture of a run, PNG or SVG by the suffix of `path`, in place of what is there.

    Raises InputError for another suffix, and for a place that cannot be written.
    """
    target = Path(path)
    suffix = target.suffix.lower()
    if suffix not in SUFFIXES:
        raise InputError(f"{target}: a picture is named {' or '.join('*' + each for each in SUFFIXES)}")
    write_whole(target, _render(run, suffix[1:]))


def curves_svg(run: RunRecord) -> str:
    """The same as the text of an SVG file, to be part of a page: no title, and nothing behind it."""
    return _render(run, "svg", in_page=True).decode("utf-8")


def _render(run: RunRecord, kind: str, in_page: bool = False) -> bytes:
    import matplotlib
    from matplotlib.figure import Figure

    # A figure made without pyplot has Agg's canvas; what a user has set for their own pictures is put aside.
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(SETTINGS)
        figure = Figure(figsize=(10, 7.75 if in_page else 8.4))
        _compose(figure, run)
        if not in_page:
            _title(figure, run)
        content = io.BytesIO()
        metadata = {"Date": None} if kind == "svg" else None
        figure.savefig(content, format=kind, dpi=200, transparent=in_page, metadata=metadata)
    return content.getvalue()


def _compose(figure: "Figure", run: RunRecord) -> None:
    from matplotlib.ticker import MaxNLocator

    inch = 1 / figure.get_figheight()
    axes = figure.subplot_mosaic(
        [["loss", "loss"], ["rate", "norm"], ["speed", "split"]],
        height_ratios=[2.2, 1, 1],
        gridspec_kw={"left": _LEFT, "right": 0.975, "hspace": 0.36, "wspace": 0.17},
    )
    figure.subplots_adjust(bottom=0.34 * inch, top=7.22 * inch)
    _loss(axes["loss"], run)
    _rate(axes["rate"], run)
    _norm(axes["norm"], run)
    _speed(axes["speed"], run)
    _split(axes["split"], run)
    first, last = run.edges[0], max(run.last_step, run.edges[0] + 1)
    for name, ax in axes.items():
        ax.set_xlim(first - 0.006 * (last - first), last + 0.006 * (last - first))
        most = 10 if name == "loss" else 5
        ax.xaxis.set_major_locator(MaxNLocator(most, steps=[1, 2, 2.5, 5, 10], integer=True))
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        ax.tick_params(labelbottom=name not in ("rate", "norm"))
    _name_axis(axes["loss"], "tokens", at_top=True)
    _name_axis(axes["loss"], "step")
    _name_axis(axes["speed"], "step")


def _title(figure: "Figure", run: RunRecord) -> None:
    inch = 1 / figure.get_figheight()
    title = f"{model_in_words(run)}, on {layout_in_words(run.config.layout.layout())}"
    figure.text(_LEFT, 1 - 0.29 * inch, title, fontsize=min(14, 14 * 76 / len(title)), fontweight="bold", va="center")
    figure.text(_LEFT, 1 - 0.55 * inch, _subtitle(run), color=COLOURS["quiet"], va="center")


def _subtitle(run: RunRecord) -> str:
    told, batch, precision = headline(run), run.config.batch, run.config.precision
    whole = told.steps >= told.planned_steps
    parts = [
        f"{told.steps:,} steps" if whole else f"step {told.steps:,} of {told.planned_steps:,}",
        f"{format_count(told.tokens)} tokens",
        f"{batch.global_batch:,} {TIMES} {batch.seq_len:,} tokens a step",
        precision.compute + (", compiled" if precision.compile else ""),
    ]
    if told.training_s is not None:
        parts.append(f"{format_seconds(told.training_s)} in steps")
    if told.peak_memory_bytes is not None:
        parts.append(_memory(run.train, told.peak_memory_bytes))
    return "  ·  ".join(parts)


def _memory(train: Sequence[Logged], peak_bytes: int) -> str:
    """The peak; if it still rose after the first quarter of the run, which may be a leak, that is said."""
    early = train[len(train) // 4].memory_bytes
    rise = f"{format_bytes(early)} rising to" if peak_bytes > 1.1 * early else "at most"
    return f"memory {rise} {format_bytes(peak_bytes)}"


def _loss(ax: "Axes", run: RunRecord) -> None:
    losses = [record.loss for record in run.train]
    finite = [loss for loss in losses if math.isfinite(loss)]
    if finite:
        many = len(losses) >= _MANY
        mean = f", mean of {_window(losses)} records" if many else ""
        ends = [value for value in _running_mean(losses) if math.isfinite(value)] if many else finite
        _line(ax, run, losses, f"training{mean}: {_ends(ends)}")
    held_out = [record for record in run.held_out if math.isfinite(record.loss)]
    if held_out:
        ax.plot(
            [record.step for record in held_out],
            [record.loss for record in held_out],
            color=COLOURS["held-out"],
            linewidth=1,
            linestyle=(0, (1, 2)),
            marker="o",
            markersize=6,
            markeredgecolor=COLOURS["paper"],
            clip_on=False,
            zorder=4,
            label=f"held out: {_ends([record.loss for record in held_out])}",
        )
    lost = [step for step, loss in run.losses if not math.isfinite(loss)]
    if lost:
        ax.plot(
            lost,
            [0.985] * len(lost),
            transform=ax.get_xaxis_transform(),
            color=COLOURS["limit"],
            linestyle="none",
            marker="x",
            markersize=5,
            label=f"not finite: {len(lost)} of {len(run.losses)} records, first at step {lost[0]:,}",
        )
    shown = finite + [record.loss for record in held_out]
    _choose_scale(ax, shown)
    if not shown:
        _remark(ax, "no finite loss was logged")
    _header(ax, "Loss, nats a token", pad_pt=20)
    per_step: Any = run.tokens_per_step
    tokens = ax.secondary_xaxis("top", functions=(lambda step: step * per_step, lambda token: token / per_step))
    tokens.xaxis.set_major_formatter(lambda value, _: format_count(value))
    tokens.spines["top"].set_visible(False)
    tokens.tick_params(length=0, pad=4)


def _rate(ax: "Axes", run: RunRecord) -> None:
    rates = [record.lr for record in run.train]
    if not rates:
        return _nothing(ax, "Learning rate")
    power = math.floor(math.log10(max(rates))) if max(rates) > 0 else 0
    steps = [record.step for record in run.train]
    ax.plot(steps, [rate / 10.0**power for rate in rates], color=COLOURS["curve"], **_dots(len(rates)))
    ax.set_ylim(0, 1.12 * max(rates) / 10.0**power or 1)
    schedule = run.config.schedule
    warmup = f" after {schedule.warmup_steps:,} steps of warm-up" if schedule.warmup_steps else ""
    _header(ax, f"Learning rate, {TIMES} {_power_of_ten(power)}", note=f"{schedule.shape}{warmup}")


def _norm(ax: "Axes", run: RunRecord) -> None:
    norms, clip = [record.grad_norm for record in run.train], run.config.optimizer.clip_norm
    if not norms:
        return _nothing(ax, "Gradient norm")
    finite = [norm for norm in norms if math.isfinite(norm)]
    _line(ax, run, norms)
    # Far above every norm, a line at the limit would only press the curve flat.
    near = 0 < clip <= 5 * max(finite, default=0)
    shown = finite + [clip] * near
    if not _choose_scale(ax, shown):
        ax.set_ylim(0, 1.12 * max(shown, default=1) or 1)
    over = sum(norm > clip for norm in norms)
    note = f"clipped at {clip:g}: {over} of {len(norms)} records" if clip else "never clipped"
    if near:
        ax.axhline(clip, color=COLOURS["limit"], linewidth=1.2, linestyle=(0, (5, 3)), zorder=3, label=note)
    if not finite:
        _remark(ax, "no finite norm was logged")
    _header(ax, "Gradient norm", note=note)


def _speed(ax: "Axes", run: RunRecord) -> None:
    told = headline(run)
    if told.median_tokens_per_s is None:
        return _nothing(ax, "Tokens per second")
    edges, seconds = _intervals(run)
    per_s = [run.tokens_per_step / s if s > 0 else math.nan for s in seconds["step"]]
    ax.stairs(per_s, edges, baseline=None, color=COLOURS["curve"], linewidth=1.2)
    mfu = "" if told.median_mfu is None else f", MFU {told.median_mfu:.1%}"
    ax.axhline(
        told.median_tokens_per_s,
        color=COLOURS["quiet"],
        linewidth=0.9,
        linestyle=(0, (2, 2)),
        label=f"median {format_count(told.median_tokens_per_s)}{mfu}",
    )
    ax.set_ylim(0, 1.12 * max((value for value in per_s if math.isfinite(value)), default=1))
    ax.yaxis.set_major_formatter(lambda value, _: format_count(value))
    _header(ax, "Tokens per second")


def _split(ax: "Axes", run: RunRecord) -> None:
    share = headline(run).time_share
    if share is None:
        return _nothing(ax, "Time")
    edges, seconds = _intervals(run)
    whole = [sum(parts) or 1.0 for parts in zip(*(seconds[phase] for phase in PHASES), strict=True)]
    # What should be small lies at the edges of the stack, where its height can be read.
    below, drawn = [0.0] * len(whole), {}
    for phase in ("optimizer", "forward_backward", "data"):
        above = [b + 100 * s / w for b, s, w in zip(below, seconds[phase], whole, strict=True)]
        colour = COLOURS[phase.replace("_", "-")]
        drawn[phase] = ax.stairs(above, edges, baseline=below, fill=True, color=colour, linewidth=0)
        below = above
    ax.set_ylim(0, 100)
    ax.grid(False)
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0f}%")
    _header(ax, "Time", [(drawn[phase], f"{_PHASE_WORDS[phase]} {percent(share[phase])}") for phase in PHASES])


def _intervals(run: RunRecord) -> tuple[list[int], dict[str, list[float]]]:
    """Edges of steps, and between each two of them the mean seconds of a step and of its phases."""
    size = math.ceil(len(run.train) / _INTERVALS)
    groups = [run.train[at : at + size] for at in range(0, len(run.train), size)]
    means = {
        name: [sum(getattr(record, f"{name}_s") for record in group) / len(group) for group in groups]
        for name in ("step", *PHASES)
    }
    return [run.edges[0], *(group[-1].step for group in groups)], means


def _line(ax: "Axes", run: RunRecord, values: Sequence[float], label: str = "_without entry") -> None:
    """Values by step; where there are many, thinly, with their running mean over them."""
    steps, colour = [record.step for record in run.train], COLOURS["curve"]
    gaps = [value if math.isfinite(value) else math.nan for value in values]
    if len(values) < _MANY:
        ax.plot(steps, gaps, color=colour, label=label, **_dots(len(values)))
    else:
        ax.plot(steps, gaps, color=colour, alpha=0.35, linewidth=0.7)
        ax.plot(steps, _running_mean(values), color=colour, label=label)


def _dots(n_points: int) -> dict[str, Any]:
    """A few records are shown as points too, and one is nothing but a point."""
    return {"marker": "o", "markersize": 3.5} if n_points <= 20 else {}


def _window(values: Sequence[float]) -> int:
    return max(3, len(values) // 40) | 1


def _running_mean(values: Sequence[float]) -> list[float]:
    """The mean of the finite values around each; a gap where the value itself is not finite.

    The window shrinks at the beginning, where a loss falls steeply, and is cut at the end, where it is flat.
    """
    means = []
    for at, value in enumerate(values):
        half = min(_window(values) // 2, at)
        around = [v for v in values[at - half : at + half + 1] if math.isfinite(v)]
        means.append(sum(around) / len(around) if math.isfinite(value) else math.nan)
    return means


def _ends(values: Sequence[float]) -> str:
    return f"{values[0]:.3g} to {values[-1]:.3g}" if len(values) > 1 else f"{values[0]:.3g}"


def _choose_scale(ax: "Axes", values: Sequence[float]) -> bool:
    """A logarithmic axis for values that a linear one would press flat; returns whether it is one."""
    if values and min(values) > 0 and max(values) > 50 * min(values):
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        ax.minorticks_off()
        return True
    return False


def _header(ax: "Axes", title: str, key: Sequence[tuple[Any, str]] = (), note: str = "", pad_pt: float = 7) -> None:
    """A title at the left; at the right the key, or else a note: above the axes, where no curve runs into them."""
    from matplotlib.transforms import ScaledTranslation

    ax.set_title(title, pad=pad_pt)
    key = key or list(zip(*ax.get_legend_handles_labels(), strict=True))
    if key:
        handles, labels = zip(*key, strict=True)
        above = ScaledTranslation(0, (pad_pt - 1.7) / 72, ax.get_figure(root=True).dpi_scale_trans)  # type: ignore[union-attr]
        ax.legend(
            handles,
            labels,
            ncols=len(labels),
            loc="lower right",
            bbox_to_anchor=(1, 1),
            bbox_transform=ax.transAxes + above,
        )
    elif note:
        ax.set_title(note, loc="right", pad=pad_pt, fontsize=9, fontweight="normal", color=COLOURS["quiet"])


def _name_axis(ax: "Axes", name: str, at_top: bool = False) -> None:
    """The name of a horizontal axis, in line with its numbers and left of the first."""
    ax.annotate(
        name,
        (0, 1 if at_top else 0),
        (-9, 4.5 if at_top else -4.5),
        xycoords="axes fraction",
        textcoords="offset points",
        ha="right",
        va="bottom" if at_top else "top",
        fontsize=9,
        fontstyle="italic",
        color=COLOURS["quiet"],
    )


def _nothing(ax: "Axes", title: str) -> None:
    _header(ax, title)
    _remark(ax, "no step has been logged")


def _remark(ax: "Axes", text: str) -> None:
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", color=COLOURS["quiet"])
    ax.set_yticks([])


def _power_of_ten(power: int) -> str:
    return "10" + str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
