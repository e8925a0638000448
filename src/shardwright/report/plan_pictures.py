"""The pictures of a plan: memory by kind, step time by part, speed by number of accelerators, memory by length.

Each is the text of an SVG file for a page, with a transparent background.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwright.planner.alternatives import slower_in_words
from shardwright.planner.choice import PricedLayout
from shardwright.planner.headline import headline
from shardwright.planner.sweep import SweepPoint
from shardwright.system.units import GiB, format_bytes, format_count
from shardwright.view.style import COLOURS, rendered

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# After Tol's muted and bright schemes and Okabe and Ito: neighbours in a stack are far apart in lightness or hue.
# Parameters, gradients and optimizer states are blue and green, activations and temporary buffers yellow to red.
KINDS = (
    ("#2f6fa7", "#4f93d1"),
    ("#8fbbe0", "#2f5f8f"),
    ("#2a8f83", "#38b3a4"),
    ("#9ed3bd", "#3f7d66"),
    ("#6b5b95", "#8f7fc0"),
    ("#e8a33d", "#e0a040"),
    ("#f3d48c", "#a98a3c"),
    ("#c8553d", "#e07258"),
    ("#e5a3a0", "#9c5a58"),
    ("#98a2ad", "#7c8794"),
    ("#c9ced6", "#565f6b"),
    ("#7d8f45", "#a3b764"),
)
"""Colours of the kinds of memory and of work, by their position: on paper, and on a dark screen."""
ROLES = tuple({f"kind-{at}": pair[side] for at, pair in enumerate(KINDS)} for side in (0, 1))
LEAST_SHARE = 0.004
"""Kinds whose share of a picture never exceeds this are not in its key."""
MOST_LIMITS = 3
"""Columns higher than this multiple of the limit are cut."""
MOST_NAMES = 32
KEY_LETTERS = 125
"""Most letters in a line of a key; a patch counts as five."""


def _drawn(
    draw: Callable[["Axes"], None],
    title: str,
    height_in: float,
    *,
    key: Sequence[tuple[Any, str]] = (),
    left: float = 0.06,
    bottom_in: float = 0.5,
) -> str:
    """Return the SVG of one panel, as wide as a page: its title, the content that `draw` draws, and its key below.
    `height_in` is the height with a key of one line, in inches."""
    key_rows = -(-sum(len(name) + 5 for _, name in key) // KEY_LETTERS)
    height_in += 0.2 * (key_rows - 1)

    def compose(figure: "Figure") -> None:
        top_in = 0.46 + 0.2 * key_rows
        ax = figure.add_axes((left, bottom_in / height_in, 0.975 - left, 1 - (bottom_in + top_in) / height_in))
        draw(ax)
        edge = min(left, 0.06) if left < 0.2 else 0.03
        figure.text(edge, 1 - 0.06 / height_in, title, va="top", fontsize=10.5, fontweight="bold")
        if key:
            handles, labels = zip(*key, strict=True)
            columns, at = -(-len(labels) // key_rows), (edge, 1 - 0.3 / height_in)
            figure.legend(handles, labels, ncols=columns, loc="upper left", bbox_to_anchor=at)

    return rendered((10, height_in), compose, "svg", transparent=True).decode("utf-8")


def memory_svg(priced: PricedLayout, limit_bytes: float) -> str:
    """Draw the peak memory of each rank of pp by kind, in GiB, with the limit."""
    kinds = with_allocator(priced)
    n_ranks = len(next(iter(kinds.values())))

    def draw(ax: "Axes") -> None:
        if n_ranks == 1:
            _bars(ax, [({kind: per_rank[0] / GiB for kind, per_rank in kinds.items()}, "")])
            limit = limit_bytes / GiB
            ax.axvline(limit, color=COLOURS["limit"], linewidth=1.4, linestyle=(0, (5, 3)))
            ax.text(
                limit, 0.55, f"limit {format_bytes(limit_bytes)} ", ha="right", fontsize=8.5, color=COLOURS["limit"]
            )
            ax.set_ylim(0.7, -0.55)
            ax.set_xlim(0, 1.03 * max(limit, priced.peak_bytes / GiB))
        else:
            _columns(ax, kinds, limit_bytes, [str(rank) for rank in range(n_ranks)])
            ax.set_xlabel("pp rank", color=COLOURS["quiet"])

    if n_ranks == 1:
        return _drawn(draw, "Memory, GiB", 1.75, key=_key(kinds), left=0.03, bottom_in=0.3)
    return _drawn(draw, "Memory of each pp rank, GiB", 3.6, key=_key(kinds))


def _columns(ax: "Axes", kinds: Mapping[str, Sequence[float]], limit_bytes: float, names: Sequence[str]) -> None:
    """Draw vertical stacked columns with their names, and the limit. A column far above it is cut and labelled."""
    places = np.arange(len(names))
    below = np.zeros(len(names))
    for colour, n_bytes in zip(_colours(), kinds.values(), strict=False):
        gib = np.asarray(n_bytes) / GiB
        ax.bar(places, gib, bottom=below, width=0.78, color=colour, linewidth=0)
        below = below + gib
    _limit(ax, limit_bytes / GiB)
    ax.set_xlim(-0.6, len(names) - 0.4)
    top = min(1.08 * max(limit_bytes / GiB, below.max()), MOST_LIMITS * limit_bytes / GiB)
    ax.set_ylim(0, top)
    for at in np.nonzero(below > top)[0]:
        ax.text(float(at), 0.97 * top, f"{below[at]:,.0f}", ha="center", va="top", fontsize=9, color=COLOURS["ink"])
    step = -(-len(names) // MOST_NAMES)
    ax.set_xticks(places[::step], names[::step])


def time_svg(rows: Sequence[tuple[str, Mapping[str, float], float]]) -> str:
    """Draw the seconds of a step by kind of work: a bar for each (name, seconds by kind, seconds), fastest first."""
    kinds = list(dict.fromkeys(kind for _, parts_s, _ in rows for kind in parts_s))
    spent = {kind: [parts_s.get(kind, 0.0) for _, parts_s, _ in rows] for kind in kinds}

    def draw(ax: "Axes") -> None:
        _bars(ax, [({kind: parts_s.get(kind, 0.0) for kind in kinds}, name) for name, parts_s, _ in rows])
        for at, (_, _, seconds) in enumerate(rows):
            label = f"{seconds:.4g} s" + (f", {slower_in_words(seconds / rows[0][2] - 1)}" if at else "")
            place: Any = {"textcoords": "offset points", "va": "center", "fontsize": 8.5, "color": COLOURS["quiet"]}
            ax.annotate(label, (seconds, at), (4, 0), **place)
        ax.set_xlim(0, 1.17 * max(seconds for _, _, seconds in rows))

    return _drawn(draw, "Time of a step, s", 1.0 + 0.27 * len(rows), key=_key(spent), left=0.29, bottom_in=0.3)


def _bars(ax: "Axes", bars: Sequence[tuple[Mapping[str, float], str]]) -> None:
    """Draw horizontal stacked bars with their names, the first on top. Negative parts are drawn as nothing."""
    for at, (parts, _) in enumerate(bars):
        left = 0.0
        for colour, value in zip(_colours(), parts.values(), strict=False):
            ax.barh(at, max(value, 0.0), left=left, height=0.7, color=colour, linewidth=0)
            left += max(value, 0.0)
    ax.set_yticks(range(len(bars)), [name for _, name in bars])
    ax.tick_params(axis="y", labelcolor=COLOURS["ink"])
    ax.set_ylim(len(bars) - 0.45, -0.55)
    ax.grid(visible=False, axis="y")
    ax.grid(visible=True, axis="x")
    ax.spines["left"].set_visible(False)


def scaling_svg(points: Sequence[SweepPoint], chosen: int) -> str:
    """Draw the best layout's tokens per second over the number of accelerators, next to perfect scaling from the
    smallest cluster."""
    fitting = [(point.size, point.priced) for point in points if point.priced is not None]

    def draw(ax: "Axes") -> None:
        sizes = [size for size, _ in fitting]
        speeds = [priced.job.tokens / priced.step_s for _, priced in fitting]
        ideal = [speeds[0] / sizes[0] * size for size in sizes]
        ax.plot(sizes, ideal, color=COLOURS["quiet"], linewidth=1, linestyle=(0, (2, 2)), label="in proportion")
        ax.plot(sizes, speeds, color=COLOURS["curve"], marker="o", markersize=4.5, label="best layout that fits")
        for size, speed, (_, priced) in zip(sizes, speeds, fitting, strict=True):
            ax.annotate(
                f"{format_count(speed)}/s, MFU {headline(priced).mfu_full:.0%}",
                (size, speed),
                (6, -4),
                textcoords="offset points",
                va="top",
                fontsize=8.5,
                color=COLOURS["ink"] if size == chosen else COLOURS["quiet"],
                fontweight="bold" if size == chosen else "normal",
            )
        ax.set_xscale("log", base=2)
        ax.set_yscale("log", base=2)
        # Room at the right for the text at the last point.
        ax.set_xlim(sizes[0] / 1.15, sizes[-1] * max(1.6, (sizes[-1] / sizes[0]) ** 0.19))
        ax.set_ylim(min(speeds) / 1.6, max(ideal) * 1.2)
        ax.set_xticks(sizes, [f"{size:,}" for size in sizes])
        ax.yaxis.set_major_formatter(lambda value, _: format_count(value))
        ax.minorticks_off()
        ax.set_xlabel("accelerators", color=COLOURS["quiet"])
        ax.legend(loc="upper left", borderaxespad=0.6)

    return _drawn(draw, "Tokens per second", 3.4)


def length_svg(points: Sequence[PricedLayout], chosen: int, limit_bytes: float) -> str:
    """Draw the memory of the fullest rank by kind, in GiB, over the sequence length, with the limit."""
    per_point = [point.fullest_kinds for point in points]
    kinds = {kind: [n_bytes[kind] for n_bytes in per_point] for kind in per_point[0]}

    def draw(ax: "Axes") -> None:
        _columns(ax, kinds, limit_bytes, [f"{point.job.seq_len:,}" for point in points])
        for label, point in zip(ax.get_xticklabels(), points, strict=False):
            label.set_fontweight("bold" if point.job.seq_len == chosen else "normal")
        ax.set_xlabel("tokens of a sequence", color=COLOURS["quiet"])

    return _drawn(draw, "Memory of the fullest rank, GiB", 3.6, key=_key(kinds))


def with_allocator(priced: PricedLayout) -> dict[str, list[float]]:
    """Return the bytes of each rank by kind, including the bytes that the allocator cannot use."""
    memory = priced.memory
    kinds = {kind: np.asarray(n_bytes)[0].tolist() for kind, n_bytes in memory.kinds.items()}
    kinds["allocator"] = memory.lost_bytes[0].tolist()
    return kinds


def _limit(ax: "Axes", gib: float) -> None:
    ax.axhline(gib, color=COLOURS["limit"], linewidth=1.4, linestyle=(0, (5, 3)), zorder=3)
    ax.annotate(
        f"limit {format_bytes(gib * GiB)}",
        (0, gib),
        (4, 3),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        fontsize=8.5,
        color=COLOURS["limit"],
    )


def _colours() -> list[str]:
    return [light for light, _ in KINDS]


def _key(kinds: Mapping[str, Sequence[float]]) -> list[tuple[Any, str]]:
    """Return a patch and a name for each kind that is large enough to be seen."""
    from matplotlib.patches import Patch

    whole = max(sum(values) for values in zip(*kinds.values(), strict=True)) or 1.0
    pairs = zip(_colours(), kinds.items(), strict=False)
    return [(Patch(color=colour), kind) for colour, (kind, values) in pairs if max(values) > LEAST_SHARE * whole]
