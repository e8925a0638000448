"""The pictures of a page, as SVG without scripts and without style attributes.

Bars have widths in percent, so that they follow the page while their text keeps its size. Colours are variables of the
style sheet.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from shardwright.cost.job import Floats
from shardwright.cost.memory import curve
from shardwright.cost.step import StagePasses
from shardwright.explore.traffic import GroupTraffic
from shardwright.planner.choice import PricedLayout
from shardwright.report.plan_pictures import KINDS, LEAST_SHARE, with_allocator
from shardwright.schedule import draw
from shardwright.schedule.simulate import Times, simulate
from shardwright.split.stages import ScheduleInputs, schedule_problems
from shardwright.system.units import format_bytes, format_seconds
from shardwright.view.html import with_roles

MOST_POINTS = 240
"""Most moments of the memory of a step; a longer step shows the largest of several."""
MOST_STAGES = 64
MOST_ROWS = 32
MOST_BOXES = 2400
"""Most ranks and about the most passes of a drawn schedule."""
MOST_NODES = 8
MOST_DRAWN = 144
"""Most accelerators of a drawn mesh: two racks of 72."""


class KeyEntry(NamedTuple):
    """A line of the key of a picture: the role of its colour, its name and its value as text."""

    colour: str
    name: str
    value: str


@dataclass(frozen=True)
class PagePicture:
    """A picture with its title, the lines of its key, and a sentence below it."""

    title: str
    svg: Markup
    key: Sequence[KeyEntry] = ()
    caption: str = ""
    wide: bool = False


def stacked_bars(
    title: str,
    label: str,
    rows: Sequence[tuple[str, Mapping[str, float], str]],
    text: Callable[[float], str],
    limit: float = 0.0,
    caption: str = "",
) -> PagePicture:
    """Return horizontal stacked bars, (name, value by kind, words after the name), with a limit unless that is 0.

    `label`: the description for a screen reader; `text`: formats a value. The key has the values of a picture of one
    bar."""
    kinds = list(dict.fromkeys(kind for _, values, _ in rows for kind in values))
    whole = 1.02 * max(limit, *(sum(values.values()) for _, values, _ in rows)) or 1.0
    pitch = 34 if len(rows) == 1 else 44
    parts, y = Markup(), 4
    for name, values, end in rows:
        if name:
            parts += Markup('<text x="0" y="{}">{}: {}</text>').format(y + 10, name, end)
        left, top = 0.0, y + 16 * bool(name)
        for kind, value in values.items():
            if value > 0:
                parts += Markup(
                    '<rect x="{:.3f}%" y="{}" width="{:.3f}%" height="{}" fill="var(--{})"><title>{}</title></rect>'
                ).format(
                    *(100 * left / whole, top, 100 * value / whole, 34 - 16 * bool(name)),
                    *(kind_role(kinds.index(kind)), f"{kind}: {text(value)}"),
                )
                left += value
        y += pitch
    at = 100 * limit / whole
    line = Markup() if not limit else _line(at, 0, at, y + 4, "limit")
    most = {kind: max(values.get(kind, 0.0) for _, values, _ in rows) for kind in kinds}
    key = [
        KeyEntry(kind_role(at), kind, text(most[kind]) if len(rows) == 1 else "")
        for at, kind in enumerate(kinds)
        if most[kind] > LEAST_SHARE * whole
    ]
    return PagePicture(title, _svg(y + 4, label, parts, line), key, caption)


def kind_role(at: int) -> str:
    """Return the role of the colour of a kind of memory or work, by its position."""
    return f"kind-{at % len(KINDS)}"


def _svg(height: int, label: str, *parts: Markup, box: str = "") -> Markup:
    view = Markup(' viewBox="{}" preserveAspectRatio="none"').format(box) if box else Markup()
    return Markup('<svg width="100%" height="{}"{} role="img" aria-label="{}">{}</svg>').format(
        height, view, label, Markup().join(parts)
    )


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Markup:
    return Markup('<line class="{}" x1="{:.3f}%" y1="{:.1f}" x2="{:.3f}%" y2="{:.1f}"/>').format(kind, x1, y1, x2, y2)


def memory_bar(priced: PricedLayout, limit_bytes: float) -> PagePicture:
    """Return the memory of the fullest rank by kind against the limit."""
    used = f"{format_bytes(priced.peak_bytes)} of {format_bytes(limit_bytes)}"
    where = f", pp rank {priced.memory.fullest_rank}" if priced.layout.pp > 1 else ""
    fits = "it fits" if priced.peak_bytes <= limit_bytes else "it does not fit"
    return stacked_bars(
        f"Memory of the fullest rank{where}",
        f"memory of the fullest rank: {used}",
        [("", priced.fullest_kinds, "")],
        format_bytes,
        limit_bytes,
        f"{used} that a layout may use (line): {fits}",
    )


def stage_memory(priced: PricedLayout, limit_bytes: float) -> PagePicture | None:
    """Return the memory of each rank of pp by kind; None without a pipeline, or with too many ranks."""
    kinds = with_allocator(priced)
    n = priced.layout.pp
    if n == 1 or n > MOST_STAGES:
        return None
    top = 1.04 * max(limit_bytes, priced.peak_bytes)
    height, step = 150.0, 100 / n
    parts = Markup()
    for rank in range(n):
        below = 0.0
        for at, (kind, n_bytes) in enumerate(kinds.items()):
            if n_bytes[rank] > LEAST_SHARE * top:
                title = f"pp rank {rank}, {kind}: {format_bytes(n_bytes[rank])}"
                parts += Markup(
                    '<rect x="{:.3f}%" y="{:.1f}" width="{:.3f}%" height="{:.1f}" fill="var(--{})">'
                    "<title>{}</title></rect>"
                ).format(
                    *(rank * step + 0.06 * step, height * (1 - (below + n_bytes[rank]) / top)),
                    *(0.88 * step, height * n_bytes[rank] / top, kind_role(at), title),
                )
            below += n_bytes[rank]
        if rank % max(1, n // 16) == 0:
            parts += Markup('<text x="{:.3f}%" y="{:.0f}" text-anchor="middle">{}</text>').format(
                (rank + 0.5) * step, height + 15, rank
            )
    y = height * (1 - limit_bytes / top)
    label = "memory of each pp rank: " + ", ".join(
        format_bytes(sum(n_bytes[rank] for n_bytes in kinds.values())) for rank in range(n)
    )
    caption = f"One column for each rank of pp; the line is {format_bytes(limit_bytes)}."
    picture = _svg(170, label, parts, _line(0, y, 100, y, "limit"))
    return PagePicture("Memory of each pipeline rank", picture, caption=caption)


def step_memory(priced: PricedLayout, limit_bytes: float, *, moves: bool = False) -> PagePicture:
    """Return the memory of the fullest rank over a step by kind. `moves`: a line moves over the step."""
    step_curve = curve(priced.job, priced.candidates, priced.memory.fullest_rank)
    n = len(step_curve.labels)
    bins = np.arange(0, n, -(-n // MOST_POINTS))
    top = 1.04 * max(limit_bytes, float(step_curve.total_bytes.max()))
    below, parts, key = np.zeros(len(bins)), Markup(), []
    for at, (kind, n_bytes) in enumerate(step_curve.kinds.items()):
        above = below + np.maximum.reduceat(n_bytes, bins)
        if (most := float(n_bytes.max())) > 0:
            d = f"M0 {1000 * (1 - below[0] / top):.0f}{_stairs(above / top, 1)}{_stairs(below[::-1] / top, -1)}Z"
            title = f"{kind}: at most {format_bytes(most)}"
            parts += Markup('<path d="{}" fill="var(--{})"><title>{}</title></path>').format(d, kind_role(at), title)
            if most > LEAST_SHARE * top:
                key.append(KeyEntry(kind_role(at), kind, ""))
        below = above
    y = 1000 * (1 - limit_bytes / top)
    line = Markup('<line class="limit" x1="0" y1="{0:.0f}" x2="{1}" y2="{0:.0f}"/>').format(y, len(bins))
    cursor = Markup(
        '<path class="moves cursor" opacity="0" d="M0 0V1000"><animateMotion path="M0 0L{} 0" dur="12s" '
        'repeatCount="indefinite"/><set attributeName="opacity" to="1"/></path>'
    ).format(len(bins))
    peak = step_curve.labels[int(step_curve.total_bytes.argmax())]
    highest = f"highest at {peak}, {format_bytes(float(step_curve.total_bytes.max()))}"
    label = f"memory over a step, from {step_curve.labels[0]} to {step_curve.labels[-1]}, {highest}"
    caption = (
        f"{n:,} moments from the first forward pass (left) to the optimizer (right), without the allocator; {highest}; "
        f"the line is {format_bytes(limit_bytes)}. F, B, I and W are passes: stage, pass, micro-batch."
    )
    picture = _svg(130, label, parts, line, cursor if moves else Markup(), box=f"0 0 {len(bins)} 1000")
    return PagePicture("Memory over one step", picture, key, caption)


def _stairs(heights: Floats, width: int) -> str:
    """Return steps of these heights, as shares of the picture, each as wide as `width`; equal neighbours are one
    step."""
    stairs: list[tuple[str, int]] = []
    for height in heights:
        y = f"{1000 * (1 - height):.0f}"
        wide = stairs.pop()[1] if stairs and stairs[-1][0] == y else 0
        stairs.append((y, wide + width))
    return "".join(f"V{y}h{wide}" for y, wide in stairs)


def time_bar(priced: PricedLayout) -> PagePicture:
    """Return the seconds of a step by kind of work."""
    kinds = {kind: max(seconds, 0.0) for kind, seconds in priced.parts_s.items()}
    whole = sum(kinds.values())
    return stacked_bars(
        "Time of a step",
        f"time of a step: {format_seconds(priced.step_s)}",
        [("", kinds, "")],
        lambda value: f"{format_seconds(value)}, {value / whole:.1%}",
        caption="Work of the busiest rank. Communication counts only with the time by which it makes the step longer. "
        "“pipeline” is the bubble.",
    )


def schedule_picture(priced: PricedLayout) -> PagePicture | None:
    """Return the schedule with the times of this layout's stages; a long step with fewer micro-batches. None without a
    pipeline."""
    job, layout = priced.job, priced.layout
    if layout.pp == 1:
        return None
    inputs = ScheduleInputs.from_layout(job.model, layout, job.seq_len)
    m = int(priced.candidates.microbatches(job.global_batch)[0])
    most = max(layout.pp, MOST_BOXES // (2 * layout.pp * layout.virtual_stages))
    shown = m if m <= most else next((n for n in _shorter(layout.pp, most) if not schedule_problems(layout, n)), 0)
    title = f"Schedule: {layout.pp_schedule}"
    share = priced.parts_s.get("pipeline", 0.0) / priced.step_s
    bubble = f"The busiest rank waits {share:.1%} of the step of {m:,} micro-batches."
    if not shown or layout.pp > MOST_ROWS:
        return PagePicture(title, Markup(), caption=f"{bubble} {layout.pp} ranks are too many to be drawn here.")
    times = StagePasses(job, priced.candidates).times()
    stages = [tuple((1e3 * durations[0]).tolist()) for durations in (times.forward, times.backward_input, times.weight)]
    forward, backward, weight = stages
    simulation = simulate(inputs.schedule(shown), Times(forward, backward, weight, 1e3 * float(times.message[0])))
    timeline = replace(draw.planned(simulation), note=f"bubble {simulation.bubble_rate:.1%}", unit="ms")
    some = "" if shown == m else f" Drawn with {shown} micro-batches, so the drawn bubble is larger."
    return PagePicture(title, timeline_svg(timeline), caption=bubble + some, wide=True)


def timeline_svg(timeline: draw.ScheduleTimeline, *, moves: bool = False) -> Markup:
    """Return the timeline of a schedule with the colours of the style sheet. `moves`: a line moves over the step."""
    svg = with_roles(draw.svg([timeline], curves=False).replace(' xmlns="http://www.w3.org/2000/svg"', ""))
    if not moves:
        return Markup(svg)
    width, height = map(int, re.findall(r'width="(\d+)" height="(\d+)', svg)[0])
    top, bottom = draw.MARGIN + draw.HEADING, height - draw.LEGEND - draw.AXIS
    cursor = (
        f'<path class="moves cursor" opacity="0" d="M0 {top}V{bottom}">'
        f'<animateMotion path="M{draw.LEFT} 0L{width - draw.RIGHT} 0" dur="24s" repeatCount="indefinite"/>'
        '<set attributeName="opacity" to="1"/></path>'
    )
    return Markup(svg.replace("</svg>", f"{cursor}</svg>"))


def _shorter(pp: int, most: int) -> Sequence[int]:
    return [rounds * pp for rounds in range(max(2, most // pp), 0, -1)]


def mesh(priced: PricedLayout, group: GroupTraffic) -> PagePicture:
    """Return nodes and accelerators, coloured by the group that they belong to. First come the nodes of the
    group of rank 0, then other nodes."""
    cluster, size, stride = priced.job.cluster, group.size, group.stride
    per_node = min(cluster.node_size, MOST_DRAWN // 2)
    most = min(MOST_NODES, max(1, MOST_DRAWN // per_node), cluster.nodes)
    nodes = list(dict.fromkeys([*(rank * stride // cluster.node_size for rank in range(size)), *range(most)]))[:most]
    columns = min(per_node, 8 if per_node <= 64 else 12)
    rows = -(-per_node // columns)
    width, height = 22 * columns + 10, 22 * rows + 24
    across = max(1, min(len(nodes), 960 // (width + 10)))
    paths: dict[int, list[str]] = {}
    frames = Markup()
    for place, node in enumerate(nodes):
        left, top = (place % across) * (width + 10), (place // across) * (height + 10)
        frames += Markup('<rect class="node" x="{}" y="{}" width="{}" height="{}" rx="5"/>').format(
            left, top, width, height
        ) + Markup('<text x="{}" y="{}">node {}</text>').format(left + 6, top + 14, node)
        for slot in range(per_node):
            rank = node * cluster.node_size + slot
            box = f"M{left + 6 + 22 * (slot % columns)} {top + 20 + 22 * (slot // columns)}h18v18h-18z"
            paths.setdefault(rank // (stride * size) * stride + rank % stride, []).append(box)
    squares = Markup()
    for number, boxes in paths.items():
        title = f"{group.name}: group {number} of {size} ranks, {stride} apart; {format_bytes(group.n_bytes)} a step"
        squares += Markup('<path class="{}" d="{}" fill="var(--{})"><title>{}</title></path>').format(
            "mine" if number == 0 else "other", "".join(boxes), kind_role(number), title
        )
    wide, tall = across * (width + 10), -(-len(nodes) // across) * (height + 10)
    picture = Markup('<svg viewBox="0 0 {0} {1}" width="{0}" role="img" aria-label="{2}">{3}</svg>').format(
        wide, tall, f"{group.name}: groups of {size} ranks, {stride} apart, over {group.link}", frames + squares
    )
    spans = len({rank * stride // cluster.node_size for rank in range(size)})
    caption = (
        f"{size} ranks, {stride} apart, over {spans} {'node' if spans == 1 else 'nodes'}: {group.link}; "
        f"{format_bytes(group.n_bytes)} and {format_seconds(group.seconds)} of messages a step, one after another. "
        f"{len(nodes)} of {cluster.nodes:,} nodes; one colour is one group, the group of rank 0 is outlined."
    )
    return PagePicture(group.name, picture, caption=caption, wide=True)
