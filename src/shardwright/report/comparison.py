"""Comparison of several runs on one HTML page: a picture of their losses and a table of their headline numbers."""

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.report.curves import kind_of
from shardwright.report.headline import headline, title_of
from shardwright.report.panel import MANY, choose_scale, name_axis, remark, running_mean, thinned
from shardwright.report.run_record import RunRecord
from shardwright.system.files import write_whole
from shardwright.system.units import format_bytes, format_count, format_seconds
from shardwright.view.html import document, picture, table
from shardwright.view.style import COLOURS, rendered

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# After Okabe and Ito; by role, for paper or a light screen, and for a dark screen. No value may be equal to a value in
# `style.COLOURS`, because a page finds the roles by these values.
RUN_COLOURS = {
    "run-0": "#0173b2",
    "run-1": "#de5f01",
    "run-2": "#029e74",
    "run-3": "#cc79a7",
    "run-4": "#e6a001",
    "run-5": "#56b4e9",
    "run-6": "#7a5c3e",
    "run-7": "#5b6270",
}
DARK_RUN_COLOURS = {
    "run-0": "#58b4ed",
    "run-1": "#ff8a3e",
    "run-2": "#2bbf96",
    "run-3": "#e79ac6",
    "run-4": "#f0b42a",
    "run-5": "#8fd0f5",
    "run-6": "#b89878",
    "run-7": "#98a1b1",
}
_LINE_STYLES = ("-", "--", ":", "-.")
_NAMES = (
    *("run", "model and layout", "steps", "tokens", "training loss", "validation loss", "perplexity"),
    *("tokens/s", "MFU", "peak memory", "time in steps"),
)


def write_comparison(runs: Sequence[RunRecord], path: str | Path) -> None:
    """Write the page that compares several runs to `path`, replacing an existing file.

    Raises InputError if `path` cannot be written.
    """
    names = _names(runs)
    drawing = _render(runs, "svg", in_page=True).decode("utf-8")
    rows = [[escape(cell) for cell in _row(name, run)] for name, run in zip(names, runs, strict=True)]
    body = f"""<header>
<h1>{len(runs)} runs</h1>
</header>
<figure>
{picture(drawing, "losses", "Losses of the runs", RUN_COLOURS)}
<figcaption>Training loss as a line (of {MANY} records or more the running mean), validation loss as dots.</figcaption>
</figure>
{table(_NAMES, rows, "words")}
<p class="quiet">Speed and MFU are medians of the steps on the last layout of a run.</p>"""
    style = "table.words td:first-child, table.words td:nth-child(2) { text-align: left; }\n"
    page = document(f"{len(runs)} runs: {', '.join(names)}", body, style, (RUN_COLOURS, DARK_RUN_COLOURS))
    write_whole(Path(path), page.encode("utf-8"))


def draw_losses(runs: Sequence[RunRecord], path: str | Path) -> None:
    """Write the losses of several runs as one picture to `path`, replacing an existing file.

    The suffix of `path` selects PNG or SVG. Raises InputError for another suffix, or if `path` cannot be written.
    """
    write_whole(Path(path), _render(runs, kind_of(path)))


def comparison_rows(runs: Sequence[RunRecord]) -> list[dict[str, str]]:
    """Return the headline numbers of each run as they are in the page's table, name -> text."""
    return [dict(zip(_NAMES, _row(name, run), strict=True)) for name, run in zip(_names(runs), runs, strict=True)]


def _names(runs: Sequence[RunRecord]) -> list[str]:
    """Return the name of each run's folder, or its path if two folders have the same name."""
    names = [run.folder.resolve().name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.folder) for run in runs]


def _row(name: str, run: RunRecord) -> tuple[str, ...]:
    told = headline(run)

    def text(value: float | None, form: str) -> str:
        return "n/a" if value is None else format(value, form)

    memory, seconds = told.peak_memory_bytes, told.training_s
    speed, mfu = told.median_tokens_per_s, told.median_mfu
    if len(told.segments) > 1:  # with several layouts, take the speed of the whole run
        speed, mfu = told.tokens / seconds if seconds else None, None
    return (
        name,
        title_of(run),
        f"{told.steps:,}" if told.steps >= told.planned_steps else f"{told.steps:,} of {told.planned_steps:,}",
        format_count(told.tokens),
        text(told.train_loss, ".4f"),
        text(told.validation_loss, ".4f"),
        text(told.validation_perplexity, ",.4g"),
        "n/a" if speed is None else format_count(speed),
        text(mfu, ".1%"),
        "n/a" if memory is None else format_bytes(memory),
        "n/a" if seconds is None else format_seconds(seconds),
    )


def _render(runs: Sequence[RunRecord], kind: str, in_page: bool = False) -> bytes:
    def compose(figure: "Figure") -> None:
        _losses(figure.subplots(), runs)
        figure.subplots_adjust(left=0.06, right=0.975, bottom=0.08, top=0.9 - 0.04 * ((len(runs) - 1) // 4))

    return rendered((10, 5), compose, kind, transparent=in_page)


def _losses(ax: "Axes", runs: Sequence[RunRecord]) -> None:
    shown: list[float] = []
    for at, (name, run) in enumerate(zip(_names(runs), runs, strict=True)):
        colour = list(RUN_COLOURS.values())[at % len(RUN_COLOURS)]
        line_style = _LINE_STYLES[at // len(RUN_COLOURS) % len(_LINE_STYLES)]
        losses = [record.loss for record in run.train]
        tokens, gaps = (running_mean if len(losses) >= MANY else thinned)(
            [record.step * run.tokens_per_step for record in run.train], losses
        )
        ax.plot(tokens, gaps, linestyle=line_style, label=name, color=colour)
        evaluated = [record for record in run.validation if math.isfinite(record.loss)]
        ax.plot(
            [record.step * run.tokens_per_step for record in evaluated],
            [record.loss for record in evaluated],
            linestyle="none",
            marker="o",
            markersize=5,
            markeredgecolor=COLOURS["paper"],
            color=colour,
        )
        shown += [value for value in gaps if math.isfinite(value)] + [record.loss for record in evaluated]
    choose_scale(ax, shown)
    if not shown:
        remark(ax, "no finite loss was logged")
    ax.xaxis.set_major_formatter(lambda value, _: format_count(value))
    name_axis(ax, "tokens")
    ax.set_title("Loss, nats a token", pad=7)
    handles, labels = ax.get_legend_handles_labels()
    ax.legend(handles, labels, ncols=4, loc="lower right", bbox_to_anchor=(1, 1.02))
