"""What the panels of a picture have in common: lines and their means, titles with keys, remarks.

matplotlib is imported when something is drawn and not before.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardwright.report.run_record import RunRecord
from shardwright.report.style import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TIMES = "\N{MULTIPLICATION SIGN}"
MANY = 60  # records from which a line is noisy enough to need its mean beside it


def draw_line(ax: "Axes", run: RunRecord, values: Sequence[float], label: str = "_without entry") -> None:
    """Values by step; where there are many, thinly, with their running mean over them."""
    steps, colour = [record.step for record in run.train], COLOURS["curve"]
    gaps = [value if math.isfinite(value) else math.nan for value in values]
    if len(values) < MANY:
        ax.plot(steps, gaps, color=colour, label=label, **dots(len(values)))
    else:
        ax.plot(steps, gaps, color=colour, alpha=0.35, linewidth=0.7)
        ax.plot(steps, running_mean(values), color=colour, label=label)


def dots(n_points: int) -> dict[str, Any]:
    """A few records are shown as points too, and one is nothing but a point."""
    return {"marker": "o", "markersize": 3.5, "clip_on": False} if n_points <= 20 else {}


def window(values: Sequence[float]) -> int:
    return max(3, len(values) // 40) | 1


def running_mean(values: Sequence[float]) -> list[float]:
    """The mean of the finite values around each; a gap where the value itself is not finite.

    The window shrinks at the beginning, where a loss falls steeply, and is truncated at the end, where it is flat.
    """
    means = []
    for at, value in enumerate(values):
        half = min(window(values) // 2, at)
        around = [v for v in values[at - half : at + half + 1] if math.isfinite(v)]
        means.append(sum(around) / len(around) if math.isfinite(value) else math.nan)
    return means


def first_to_last(values: Sequence[float]) -> str:
    """`6.58 to 3.60`: three digits of each, zeros at the end included."""
    ends = [values[0], values[-1]] if len(values) > 1 else [values[0]]
    return " to ".join(f"{value:#.3g}".rstrip(".") for value in ends)


def choose_scale(ax: "Axes", values: Sequence[float]) -> bool:
    """A logarithmic axis for values that a linear one would press flat; returns whether it is one."""
    if values and min(values) > 0 and max(values) > 50 * min(values):
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        ax.minorticks_off()
        return True
    return False


def header(ax: "Axes", title: str, key: Sequence[tuple[Any, str]] = (), note: str = "", pad_pt: float = 7) -> None:
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


def name_axis(ax: "Axes", name: str, at_top: bool = False) -> None:
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


def nothing(ax: "Axes", title: str) -> None:
    header(ax, title)
    remark(ax, "no step has been logged")


def remark(ax: "Axes", text: str) -> None:
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", color=COLOURS["quiet"])
    ax.set_yticks([])


def power_of_ten(power: int) -> str:
    return "10" + str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
