"""The document that compares several runs: a picture of their losses and a table of their headline numbers."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.report.curves import kind_of
from shardwright.report.headline import RunHeadline, headline, title_of
from shardwright.report.panel import MANY, choose_scale, name_axis, remark, running_mean, thinned
from shardwright.report.run_record import RunRecord
from shardwright.system.files import real_path, write_whole
from shardwright.system.units import format_bytes, format_count, format_seconds
from shardwright.view.document import NUMBER, Column, Note, Part, Picture, Table, VerbDocument
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


def comparison_document(runs: Sequence[RunRecord], files: Mapping[str, Path]) -> VerbDocument:
    """Return the document of several runs. `files`: the paths of the files that `report` writes, by their keys in the
    JSON document."""
    names = _names(runs)
    numbers = [headline(run) for run in runs]
    each_run = [
        {"run": str(run.folder), **dataclasses.asdict(of_run)} for run, of_run in zip(runs, numbers, strict=True)
    ]
    averaged = any(of_run.average_loss is not None for of_run in numbers)
    rows = [row for row in zip(_QUANTITIES, *map(_values, numbers), strict=True) if averaged or row[0] != _OF_AVERAGE]
    parts: list[Part] = [
        *(Note(title_of(run), name) for name, run in zip(names, runs, strict=True)),
        Picture(
            "losses",
            "Loss",
            lambda: _render(runs, "svg", in_page=True).decode("utf-8"),
            f"Training loss as a line (of {MANY} records or more the running mean), validation loss as dots.",
            (RUN_COLOURS, DARK_RUN_COLOURS),
        ),
        Table(
            (Column(""), *(Column(name, NUMBER) for name in names)),
            rows,
            rest="Speed and MFU are medians of the steps, of a run on several layouts the mean speed.",
        ),
    ]
    data = {"runs": each_run, **{key: str(path) for key, path in files.items()}}
    return VerbDocument(f"{len(runs)} runs: {', '.join(names)}", data, parts)


def draw_losses(runs: Sequence[RunRecord], path: str | Path) -> None:
    """Write the losses of several runs as one picture to `path`, replacing an existing file.

    The suffix of `path` selects PNG or SVG. Raises InputError for another suffix, or if `path` cannot be written.
    """
    write_whole(Path(path), _render(runs, kind_of(path)))


def _names(runs: Sequence[RunRecord]) -> list[str]:
    """Return the name of each run's folder, or its path if two folders have the same name."""
    names = [real_path(run.folder).name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.folder) for run in runs]


_OF_AVERAGE = "of the average"
_QUANTITIES = (
    *("steps", "tokens", "training loss", "validation loss", _OF_AVERAGE, "perplexity"),
    *("tokens/s", "MFU", "peak memory", "time in steps"),
)


def _values(numbers: RunHeadline) -> tuple[str, ...]:
    """Return the values of `_QUANTITIES`, as text."""

    def text(value: float | None, form: Callable[[float], str]) -> str:
        return "n/a" if value is None else form(value)

    speed, mfu = numbers.median_tokens_per_s, numbers.median_mfu
    if len(numbers.segments) > 1:
        speed, mfu = numbers.tokens / numbers.training_s if numbers.training_s else None, None
    of_planned = "" if numbers.steps >= numbers.planned_steps else f" of {numbers.planned_steps:,}"
    return (
        f"{numbers.steps:,}{of_planned}",
        format_count(numbers.tokens),
        text(numbers.train_loss, "{:.4f}".format),
        text(numbers.validation_loss, "{:.4f}".format),
        text(numbers.average_loss, "{:.4f}".format),
        text(numbers.validation_perplexity, "{:,.4g}".format),
        text(speed, format_count),
        text(mfu, "{:.1%}".format),
        text(numbers.peak_memory_bytes, format_bytes),
        text(numbers.training_s, format_seconds),
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
            [run.tokens(record.step) for record in run.train], losses
        )
        ax.plot(tokens, gaps, linestyle=line_style, label=name, color=colour)
        evaluated = [record for record in run.validation if math.isfinite(record.loss)]
        ax.plot(
            [run.tokens(record.step) for record in evaluated],
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
    units = dict.fromkeys(run.config.preference.loss_unit for run in runs)
    ax.set_title(f"Loss, {' or '.join(units)}", pad=7)
    handles, labels = ax.get_legend_handles_labels()
    ax.legend(handles, labels, ncols=4, loc="lower right", bbox_to_anchor=(1, 1.02))
