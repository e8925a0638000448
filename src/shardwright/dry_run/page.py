"""A dry run as one self-contained HTML page: the memory of a step, its peak, and the messages by axis."""

from collections.abc import Sequence
from html import escape
from math import radians, sin
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shardwright.dry_run.document import LARGEST, TRAFFIC, largest_rows, traffic_rows
from shardwright.dry_run.planned import PlannedRank
from shardwright.dry_run.record import KINDS, RankRecord
from shardwright.dry_run.run import DryRun
from shardwright.report.plan_pictures import KINDS as COLOURS_OF_KINDS
from shardwright.report.plan_pictures import ROLES
from shardwright.system.files import write_whole
from shardwright.system.units import GiB, format_bytes, format_count
from shardwright.view.html import document, facts, picture, table
from shardwright.view.style import COLOURS, rendered, text_width_pt

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_NAMES = 24
"""Maximum number of actions whose names are written below the plot, evenly selected."""
_NAMES_AT = 60
"""Rotation of these names in degrees."""
_SIZE_IN = (10.0, 3.6)


def write_page(found: DryRun, path: Path) -> None:
    """Write the page and replace an existing file. Raises InputError for a path that cannot be written."""
    write_whole(path, _page(found).encode("utf-8"))


def _page(found: DryRun) -> str:
    record, layout = found.fullest, found.config.layout.layout()
    title = f"Dry run of rank {record.rank} of {layout.world_size:,}"
    verdict = "fits" if found.fits else "does not fit"
    body = f"""<header>
<h1>{escape(title)}: it {verdict}</h1>
<p class="quiet">{escape(str(layout))}</p>
</header>
{facts(_numbers(found, record))}
<h2>Memory over the step</h2>
<figure>
{picture(_memory_svg(record), "memory", "Memory by kind over the actions of a step", ROLES[0])}
<figcaption>For each action of the step, in order, the moment with the most bytes. Tensors alone: the verdict adds
workspace of libraries and what the allocator cannot use.</figcaption>
</figure>
{table(("kinds", "dry run", "plan"), _beside_plan(found, record))}
<h2>The largest tensors at the peak</h2>
{table(("kind", *LARGEST), _escaped(largest_rows(record)), "words")}
<h2>Collectives and messages</h2>
{table(TRAFFIC, _escaped(traffic_rows(found, record)), "words")}
{_ranks(found)}{_disagreements(found)}"""
    return document(title, body, _STYLE, (ROLES[0], ROLES[1]))


_STYLE = """table.words td, table.words th { text-align: left; vertical-align: top; }
"""


def _numbers(found: DryRun, record: RankRecord) -> list[tuple[str, str, str]]:
    needed, limit = found.needed_bytes(record), found.how.limit_bytes
    calls = sum(sums.calls for sums in record.sent.values())
    where = record.peak.action + (f", {record.peak.module}" if record.peak.module else "")
    return [
        ("needed", format_bytes(needed), f"{needed / limit:.1%} of {format_bytes(limit)}"),
        ("peak of tensors", format_bytes(record.peak.n_bytes), f"in {where}"),
        ("messages a step", f"{calls:,}", format_bytes(sum(sums.n_bytes for sums in record.sent.values()))),
        ("FLOPs a step", format_count(float(sum(record.flops.values()))), "matmuls and attention"),
    ]


def _memory_svg(record: RankRecord) -> str:
    curve = record.curve
    places = np.arange(len(curve))
    colours = [light for light, _ in COLOURS_OF_KINDS]

    def compose(figure: "Figure") -> None:
        step = -(-len(curve) // _MOST_NAMES)
        names = [moment.action for moment in curve]
        longest_pt = max(text_width_pt(name, 9) for name in names[::step])
        bottom = (longest_pt * sin(radians(_NAMES_AT)) + 14) / (72 * _SIZE_IN[1])
        ax = figure.add_axes((0.06, bottom, 0.92, 0.82 - bottom))
        below = np.zeros(len(curve))
        for colour, kind in zip(colours, KINDS, strict=False):
            held = np.array([moment.kinds[kind] for moment in curve]) / GiB
            ax.bar(places, held, bottom=below, width=1.0, color=colour, linewidth=0, label=kind)
            below = below + held
        ax.set_xticks(places[::step], names[::step], rotation=_NAMES_AT, ha="right", rotation_mode="anchor")
        ax.set_xlim(-0.6, len(curve) - 0.4)
        figure.text(0.06, 0.98, "Memory, GiB", va="top", fontsize=10.5, fontweight="bold", color=COLOURS["ink"])
        figure.legend(ncols=len(KINDS), loc="upper left", bbox_to_anchor=(0.06, 0.92))

    return rendered(_SIZE_IN, compose, "svg", transparent=True).decode("utf-8")


def _beside_plan(found: DryRun, record: RankRecord) -> list[Sequence[str]]:
    plan = found.plans[record.rank]
    rows: list[Sequence[str]] = [
        (escape(name), format_bytes(dry), "" if by_plan is None else format_bytes(by_plan))
        for name, dry, by_plan in found.groups(record)
    ]
    whole = format_bytes(plan.peak_bytes) if isinstance(plan, PlannedRank) else escape(plan)
    return [*rows, ("<b>peak</b>", format_bytes(record.peak.n_bytes), whole)]


def _escaped(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    return [[escape(cell) for cell in row] for row in rows]


def _ranks(found: DryRun) -> str:
    if len(found.records) == 1:
        return ""
    rows = [(str(each.rank), format_bytes(each.peak.n_bytes), each.peak.action) for each in found.records]
    return f"<h2>Ranks that were run</h2>\n{table(('rank', 'peak', 'in'), rows)}\n"


def _disagreements(found: DryRun) -> str:
    return "\n".join(f'<p class="bad">Ranks do not agree: {escape(each.sentence)}</p>' for each in found.disagreements)
