"""The pictures of a page, as SVG without scripts and without style attributes.

Bars have widths in percent, so that they follow the page while their text keeps its size. Colours are variables of the
style sheet.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from shardwright.cost.collectives import PricedMessage
from shardwright.cost.job import Floats
from shardwright.cost.memory import curve
from shardwright.cost.step import StagePasses
from shardwright.cost.traffic import step_messages
from shardwright.planner.choice import PricedLayout
from shardwright.report.plan_pictures import KINDS, LEAST_SHARE, with_allocator
from shardwright.schedule.draw import planned, svg
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
    """A line of the key of a picture: the number of its colour, its name and its value as text."""

    colour: int
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


def _rects(values: Iterable[tuple[int, str, float]], whole: float, top: int, height: int, left: float = 0.0) -> Markup:
    """Return the parts of a horizontal bar; each has a colour, a title and a value."""
    parts = Markup()
    for colour, title, value in values:
        if value > 0:
            parts += Markup('<rect x="{:.3f}%" y="{}" width="{:.3f}%" height="{}" fill="var(--kind-{})">').format(
                100 * left / whole, top, 100 * value / whole, height, colour % len(KINDS)
            ) + Markup("<title>{}</title></rect>").format(title)
            left += value
    return parts


def _svg(height: int, label: str, *parts: Markup, box: str = "") -> Markup:
    view = Markup(' viewBox="{}" preserveAspectRatio="none"').format(box) if box else Markup()
    return Markup('<svg width="100%" height="{}"{} role="img" aria-label="{}">{}</svg>').format(
        height, view, label, Markup().join(parts)
    )


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Markup:
    return Markup('<line class="{}" x1="{:.3f}%" y1="{:.1f}" x2="{:.3f}%" y2="{:.1f}"/>').format(kind, x1, y1, x2, y2)


def _key(kinds: Mapping[str, float], text: Mapping[str, str], whole: float) -> list[KeyEntry]:
    return [
        KeyEntry(at % len(KINDS), name, text[name])
        for at, (name, value) in enumerate(kinds.items())
        if value > LEAST_SHARE * whole
    ]


def memory_bar(priced: PricedLayout, limit_bytes: float) -> PagePicture:
    """Return the memory of the fullest rank by kind against the limit."""
    rank = priced.memory.fullest_rank
    kinds = priced.fullest_kinds
    whole = 1.02 * max(limit_bytes, priced.peak_bytes)
    text = {kind: format_bytes(value) for kind, value in kinds.items()}
    bars = _rects([(at, f"{kind}: {text[kind]}", kinds[kind]) for at, kind in enumerate(kinds)], whole, 4, 34)
    at = 100 * limit_bytes / whole
    label = f"memory of the fullest rank: {format_bytes(priced.peak_bytes)} of {format_bytes(limit_bytes)}"
    picture = _svg(42, label, bars, _line(at, 0, at, 42, "limit"))
    where = f", pp rank {rank}" if priced.layout.pp > 1 else ""
    fits = "it fits" if priced.peak_bytes <= limit_bytes else "it does not fit"
    caption = f"{format_bytes(priced.peak_bytes)} of {format_bytes(limit_bytes)} that a layout may use (line): {fits}"
    return PagePicture(f"Memory of the fullest rank{where}", picture, _key(kinds, text, whole), caption)


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
        for at, (kind, held) in enumerate(kinds.items()):
            if held[rank] > LEAST_SHARE * top:
                title = f"pp rank {rank}, {kind}: {format_bytes(held[rank])}"
                parts += Markup(
                    '<rect x="{:.3f}%" y="{:.1f}" width="{:.3f}%" height="{:.1f}" fill="var(--kind-{})">'
                    "<title>{}</title></rect>"
                ).format(
                    *(rank * step + 0.06 * step, height * (1 - (below + held[rank]) / top)),
                    *(0.88 * step, height * held[rank] / top, at % len(KINDS), title),
                )
            below += held[rank]
        if rank % max(1, n // 16) == 0:
            parts += Markup('<text x="{:.3f}%" y="{:.0f}" text-anchor="middle">{}</text>').format(
                (rank + 0.5) * step, height + 15, rank
            )
    y = height * (1 - limit_bytes / top)
    label = "memory of each pp rank: " + ", ".join(
        format_bytes(sum(held[rank] for held in kinds.values())) for rank in range(n)
    )
    caption = f"One column for each rank of pp; the line is {format_bytes(limit_bytes)}."
    picture = _svg(170, label, parts, _line(0, y, 100, y, "limit"))
    return PagePicture("Memory of each pipeline rank", picture, caption=caption)


def step_memory(priced: PricedLayout, limit_bytes: float) -> PagePicture:
    """Return the memory of the fullest rank over a step by kind."""
    found = curve(priced.job, priced.candidates, priced.memory.fullest_rank)
    n = len(found.labels)
    bins = np.arange(0, n, -(-n // MOST_POINTS))
    top = 1.04 * max(limit_bytes, float(found.total_bytes.max()))
    below, parts = np.zeros(len(bins)), Markup()
    for at, (kind, held) in enumerate(found.kinds.items()):
        above = below + np.maximum.reduceat(held, bins)
        if above.max() > below.max() or (above > below).any():
            d = step_area(range(len(bins) + 1), 1000 * (1 - above / top), 1000 * (1 - below / top), digits=0)
            parts += Markup('<path d="{}" fill="var(--kind-{})"><title>{}</title></path>').format(
                d, at % len(KINDS), f"{kind}: at most {format_bytes(float(held.max()))}"
            )
        below = above
    y = 1000 * (1 - limit_bytes / top)
    line = Markup('<line class="limit" x1="0" y1="{0:.0f}" x2="{1}" y2="{0:.0f}"/>').format(y, len(bins))
    peak = found.labels[int(found.total_bytes.argmax())]
    label = f"memory over a step, from {found.labels[0]} to {found.labels[-1]}, highest at {peak}"
    caption = (
        f"{n:,} moments from the first forward pass (left) to the optimizer (right), without the allocator; highest at "
        f"{peak}. F, B, I and W are passes: stage, pass, micro-batch."
    )
    picture = _svg(130, label, parts, line, box=f"0 0 {len(bins)} 1000")
    return PagePicture("Memory over one step", picture, caption=caption)


def step_area(edges: Sequence[float], above: Floats, below: Floats, digits: int) -> str:
    """Return the path of the area between two step functions of n steps, which have the n + 1 `edges`; coordinates are
    of the picture, with `digits` decimals."""
    there = _stairs(above, edges[1:], digits)
    back = _stairs(below[::-1], edges[-2::-1], digits)
    return f"M{edges[0]:.{digits}f} {below[0]:.{digits}f}{there}{back}Z"


def _stairs(heights: Floats, ends: Iterable[float], digits: int) -> str:
    """Return steps of these heights, each until its end; equal neighbours are one step."""
    found: list[tuple[str, str]] = []
    for y, x in zip(heights, ends, strict=True):
        height = f"{y:.{digits}f}"
        if found and found[-1][0] == height:
            found.pop()
        found.append((height, f"{x:.{digits}f}"))
    return "".join(f"V{height}H{end}" for height, end in found)


def time_bar(priced: PricedLayout) -> PagePicture:
    """Return the seconds of a step by kind of work."""
    kinds = {kind: max(seconds, 0.0) for kind, seconds in priced.parts_s.items()}
    whole = sum(kinds.values())
    text = {kind: f"{format_seconds(value)}, {value / whole:.1%}" for kind, value in kinds.items()}
    bars = _rects([(at, f"{kind}: {text[kind]}", kinds[kind]) for at, kind in enumerate(kinds)], whole, 2, 34)
    label = f"time of a step: {format_seconds(priced.step_s)}"
    caption = (
        "Work of the busiest rank. Communication counts only with the time by which it makes the step longer; the rest "
        "of it is overlapped. “pipeline” is the bubble."
    )
    return PagePicture("Time of a step", _svg(38, label, bars), _key(kinds, text, whole), caption)


def schedule_picture(priced: PricedLayout) -> PagePicture | None:
    """Return the schedule with the times of this layout's stages; a long step with fewer micro-batches. None without a
    pipeline."""
    job, layout = priced.job, priced.layout
    if layout.pp == 1:
        return None
    of = ScheduleInputs.from_layout(job.model, layout, job.seq_len)
    m = int(priced.candidates.microbatches(job.global_batch)[0])
    most = max(layout.pp, MOST_BOXES // (2 * layout.pp * layout.virtual_stages))
    shown = m if m <= most else next((n for n in _shorter(layout.pp, most) if not schedule_problems(layout, n)), 0)
    title = f"Schedule: {layout.pp_schedule}"
    share = priced.parts_s.get("pipeline", 0.0) / priced.step_s
    bubble = f"The busiest rank waits {share:.1%} of the step of {m:,} micro-batches."
    if not shown or layout.pp > MOST_ROWS:
        return PagePicture(title, Markup(), caption=f"{bubble} {layout.pp} ranks are too many to be drawn here.")
    times = StagePasses(job, priced.candidates).times()
    stages = [tuple((1e3 * each[0]).tolist()) for each in (times.forward, times.backward_input, times.weight)]
    forward, backward, weight = stages
    simulation = simulate(of.schedule(shown), Times(forward, backward, weight, 1e3 * float(times.message[0])))
    timeline = replace(planned(simulation), note=f"bubble {simulation.bubble_rate:.1%}", unit="ms")
    drawn = with_roles(svg([timeline], curves=False).replace(' xmlns="http://www.w3.org/2000/svg"', ""))
    some = "" if shown == m else f" Drawn with {shown} micro-batches, so the drawn bubble is larger."
    return PagePicture(title, Markup(drawn), caption=bubble + some, wide=True)


def _shorter(pp: int, most: int) -> Sequence[int]:
    return [rounds * pp for rounds in range(max(2, most // pp), 0, -1)]


@dataclass(frozen=True)
class GroupTraffic:
    """The messages of the ranks of one kind of group in a step. `seconds`: of all calls, one after another."""

    size: int
    stride: int
    name: str
    link: str
    n_bytes: float
    seconds: float
    rows: Sequence[tuple[str, float, float, float]]


def traffic(priced: PricedLayout) -> list[GroupTraffic]:
    """Return the messages of the fullest rank of pp in a step by kind of group, the slowest first."""
    job = priced.job
    found: dict[tuple[int, int], list[PricedMessage]] = {}
    for message in step_messages(job, priced.candidates, priced.memory.fullest_rank):
        found.setdefault((int(np.ravel(message.size)[0]), int(np.ravel(message.stride)[0])), []).append(message)
    result = []
    for (size, stride), messages in found.items():
        rows = [
            (each.what, calls, n_bytes, float(np.ravel(each.seconds(job.cluster))[0]))
            for each in messages
            for calls, n_bytes in [(float(np.ravel(each.calls)[0]), float(np.ravel(each.n_bytes)[0]))]
        ]
        inside = size * stride <= job.cluster.node_size or (size == 2 and stride < job.cluster.node_size)
        link = "links inside a node" if inside else f"network between nodes ({job.cluster.across.name})"
        total = sum(calls * n_bytes for _, calls, n_bytes, _ in rows)
        seconds = sum(row[3] for row in rows)
        result.append(GroupTraffic(size, stride, _group_name(priced, size, stride), link, total, seconds, rows))
    return sorted(result, key=lambda each: -each.seconds)


def _group_name(priced: PricedLayout, size: int, stride: int) -> str:
    """Return the axes whose ranks form groups of `size` ranks, `stride` apart."""
    layout = priced.layout
    strides, at = {}, 1
    for axis in ("tp", "cp", "dp_shard", "dp_replicate", "pp"):
        strides[axis] = at
        at *= layout.degree(axis)
    names = {
        (layout.ep, 1): "ep",
        (layout.expert_dp_shard, layout.ep): "dp of experts",
        (layout.dp_shard * layout.cp * layout.dp_replicate, layout.tp): "dp and cp",
        (layout.dp_shard * layout.cp, layout.tp): "dp_shard and cp" if layout.cp > 1 else "dp_shard",
        (2, strides["pp"]): "pp, to the next stage",
    }
    if layout.tp > priced.job.model.n_kv_heads:
        names[layout.tp // priced.job.model.n_kv_heads, 1] = "replicas of kv heads in tp"
    names |= {(layout.degree(axis), first): axis for axis, first in strides.items() if layout.degree(axis) > 1}
    return names.get((size, stride), f"{size} ranks")


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
        squares += Markup('<path class="{}" d="{}" fill="var(--kind-{})"><title>{}</title></path>').format(
            "mine" if number == 0 else "other", "".join(boxes), number % len(KINDS), title
        )
    wide, tall = across * (width + 10), -(-len(nodes) // across) * (height + 10)
    picture = Markup('<svg viewBox="0 0 {0} {1}" width="{0}" role="img" aria-label="{2}">{3}</svg>').format(
        wide, tall, f"{group.name}: groups of {size} ranks, {stride} apart, over {group.link}", frames + squares
    )
    spans = len({rank * stride // cluster.node_size for rank in range(size)})
    caption = (
        f"{size} ranks, {stride} apart, over {spans} {'node' if spans == 1 else 'nodes'}: {group.link}; "
        f"{format_bytes(group.n_bytes)} and {format_seconds(group.seconds)} of messages a step, if nothing overlapped. "
        f"{len(nodes)} of {cluster.nodes:,} nodes; one colour is one group, the group of rank 0 is outlined."
    )
    return PagePicture(group.name, picture, caption=caption, wide=True)
