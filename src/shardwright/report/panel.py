"""Parts shared by the panels of a picture: lines and their running means, titles with keys, remarks.

matplotlib is imported when something is drawn, not earlier.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardwright.report.run_record import RunRecord
from shardwright.view.style import COLOURS, text_width_pt

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TIMES = "\N{MULTIPLICATION SIGN}"
MANY = 60  # records from which a line is noisy enough to need its mean beside it
_APART_PT = 12
"""The space between a title and the key or note to its right."""
_HANDLE_PT = 27
"""The handle of a label in a key, with the space before and after it, at 9 points (`view.style.SETTINGS`)."""
POINTS = 2000
"""Points of a curve. A picture is about half as many pixels wide, so more records than this are thinned."""


def draw_line(ax: "Axes", run: RunRecord, values: Sequence[float], label: str = "_without entry") -> None:
    """Draw values by step. From `MANY` values on, the line is thin and their running mean is drawn over it."""
    steps, colour = [record.step for record in run.train], COLOURS["curve"]
    if len(values) < MANY:
        ax.plot(*thinned(steps, values), color=colour, label=label, **dots(len(values)))
    else:
        ax.plot(*thinned(steps, values), color=colour, alpha=0.35, linewidth=0.7)
        ax.plot(*running_mean(steps, values), color=colour, label=label)


def thinned(steps: Sequence[float], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return the points of a curve, with NaN for each value that is not finite.

    With more than `POINTS` values, each of `POINTS` / 2 equal intervals keeps its lowest and its highest value, so that
    no spike is lost; an interval without a finite value keeps a gap.
    """
    gaps = [value if math.isfinite(value) else math.nan for value in values]
    if len(gaps) <= POINTS:
        return list(steps), gaps
    kept: list[int] = []
    for interval in range(POINTS // 2):
        first, end = (at * len(gaps) // (POINTS // 2) for at in (interval, interval + 1))
        finite = [at for at in range(first, end) if not math.isnan(gaps[at])] or [first]
        kept += sorted({min(finite, key=gaps.__getitem__), max(finite, key=gaps.__getitem__)})
    return [steps[at] for at in kept], [gaps[at] for at in kept]


def dots(n_points: int) -> dict[str, Any]:
    """Return the style of the markers that are drawn if there are few points: one point alone has no line."""
    return {"marker": "o", "markersize": 3.5, "clip_on": False} if n_points <= 20 else {}


def window(values: Sequence[Any]) -> int:
    return max(3, len(values) // 40) | 1


def running_mean(steps: Sequence[float], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return steps and, for each, the mean of the finite values around it; NaN where the value itself is not finite.

    With more than `POINTS` values, the means are at `POINTS` evenly spaced values that include the first and the last.
    The window shrinks at the beginning, where a loss falls steeply, and is truncated at the end, where it is flat.
    """
    import numpy as np

    array = np.asarray(values, dtype=np.float64)
    finite = np.isfinite(array)
    n_points, half = min(len(values), POINTS), window(values) // 2
    places = [round(point * (len(values) - 1) / max(1, n_points - 1)) for point in range(n_points)]
    means = []
    for at in places:
        around = slice(max(0, at - min(half, at)), at + min(half, at) + 1)
        means.append(float(array[around][finite[around]].mean()) if finite[at] else math.nan)
    return [steps[at] for at in places], means


def first_to_last(values: Sequence[float]) -> str:
    """Return, for example, `6.58 to 3.60`: three digits of each value, trailing zeros included."""
    ends = [values[0], values[-1]] if len(values) > 1 else [values[0]]
    return " to ".join(f"{value:#.3g}".rstrip(".") for value in ends)


def choose_scale(ax: "Axes", values: Sequence[float]) -> bool:
    """Make the axis logarithmic if a linear one would press the values flat. Return whether it is logarithmic."""
    if values and min(values) > 0 and max(values) > 50 * min(values):
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        ax.minorticks_off()
        return True
    return False


def header(ax: "Axes", title: str, key: Sequence[tuple[Any, str]] = (), note: str = "", pad_pt: float = 7) -> None:
    """Draw a title at the left, and the key or else the note at the right. All are above the axes, where no curve runs
    into them. A key or note that does not fit on the title's line is broken into two lines."""
    from matplotlib.transforms import ScaledTranslation

    ax.set_title(title, pad=pad_pt)
    key = key or list(zip(*ax.get_legend_handles_labels(), strict=True))
    width_pt = 72 * ax.get_figure(root=True).get_figwidth() * ax.get_position().width  # type: ignore[union-attr]
    left_pt = width_pt - text_width_pt(title, 10.5, bold=True) - _APART_PT
    if key:
        handles, labels = zip(*key, strict=True)
        key_pt = sum(text_width_pt(label, 9) + _HANDLE_PT for label in labels) - _APART_PT
        lines = 2 if key_pt > left_pt else 1
        above = ScaledTranslation(0, (pad_pt - 1.7) / 72, ax.get_figure(root=True).dpi_scale_trans)  # type: ignore[union-attr]
        ax.legend(
            handles,
            labels,
            ncols=math.ceil(len(labels) / lines),
            loc="lower right",
            bbox_to_anchor=(1, 1),
            bbox_transform=ax.transAxes + above,
        )
    elif note:
        if text_width_pt(note, 9) > left_pt:
            note = _in_two_lines(note)
        ax.set_title(note, loc="right", pad=pad_pt, fontsize=9, fontweight="normal", color=COLOURS["quiet"])


def _in_two_lines(text: str) -> str:
    """Return the text broken at the space nearest to its middle."""
    spaces = [at for at, letter in enumerate(text) if letter == " "]
    if not spaces:
        return text
    middle = min(spaces, key=lambda at: abs(at - len(text) / 2))
    return f"{text[:middle]}\n{text[middle + 1 :]}"


def name_axis(ax: "Axes", name: str, at_top: bool = False) -> None:
    """Draw the name of a horizontal axis, in line with its numbers and left of the first."""
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


def nothing(ax: "Axes", title: str) -> None:
    header(ax, title)
    remark(ax, "no step has been logged")


def remark(ax: "Axes", text: str) -> None:
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", color=COLOURS["quiet"])
    ax.set_yticks([])


def power_of_ten(power: int) -> str:
    return "10" + str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
