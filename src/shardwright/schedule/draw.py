"""Draws timelines of pipelines as an SVG file: a row for each rank, a box for each action, and below each row the
activations that the rank holds.

It draws both planned timelines, in units of the simulator, and measured ones, in seconds. The SVG is written directly,
not by matplotlib: boxes of one colour are one path, so that 32 ranks of 256 micro-batches take a second and a few
hundred KB, and text remains text.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path

from shardwright.schedule.actions import OPS, Action, Op
from shardwright.schedule.simulate import KEPT_FOR_WEIGHT, Simulation, count_microbatches
from shardwright.system.files import write_whole
from shardwright.system.units import counted

Spans = Sequence[Sequence[tuple[Action, float, float]]]

OP_WORDS: dict[Op, str] = {
    "F": "forward",
    "B": "backward",
    "I": "gradient of the input",
    "W": "gradient of the weights",
}
# A light and a dark shade for each op, after Okabe and Ito: blue, vermilion, yellow, bluish green.
SHADES: dict[Op, tuple[str, str]] = {
    "F": ("#a6d4f2", "#1f78b4"),
    "B": ("#f6a876", "#b04600"),
    "I": ("#fae68c", "#dba400"),
    "W": ("#79c9ab", "#00704f"),
}
# The colours of the report's page, which replaces these values by others in dark mode.
PAPER, INK, QUIET, IDLE = "#ffffff", "#1f2430", "#667080", "#e6e8ec"
IN_FLIGHT, WAITING = "#aab1be", "#a5d3c1"
# Boxes and the numbers in them keep their colours in dark mode: the page does not replace these values.
DARK_DIGITS, LIGHT_DIGITS = "#1c212c", "#fefefe"

NARROW, WIDE = 960, 1800
LEFT, RIGHT, MARGIN = 62, 152, 16
ROW, CURVE_HEIGHT, GAP = 18, 14, 10
HEADING, AXIS, BETWEEN, LEGEND = 44, 22, 18, 26
DIGIT = 6.0  # width of a digit of 10 px


@dataclass(frozen=True)
class ScheduleTimeline:
    """The actions of the ranks of one pipeline with their times.

    `spans[r]`: the actions of rank r, each with its start and end, in `unit`, since the start of the step. `n_stages`
    and `staggered` as in the schedule; with `staggered` the time before a rank's first action is not idle time. `note`:
    a second line, in a lighter colour. `kept_for_weight`: the fraction of a micro-batch in flight that one between I
    and W counts.
    """

    title: str
    spans: Spans
    n_stages: int
    unit: str = ""
    note: str = ""
    staggered: bool = False
    kept_for_weight: float = KEPT_FOR_WEIGHT

    @cached_property
    def end(self) -> float:
        """The end of the last action of any rank."""
        return max((end for spans in self.spans for _, _, end in spans), default=0.0)

    @cached_property
    def cost(self) -> float:
        """The time of a step, as in `simulate.Simulation.cost`."""
        if not self.staggered:
            return self.end
        ends = (max((end for *_, end in spans), default=0.0) for spans in self.spans)
        return max((end - self.begin(rank) for rank, end in enumerate(ends)), default=0.0)

    def begin(self, rank: int) -> float:
        """Return the start of the interval of length `cost` that the step takes on a rank."""
        return min((start for _, start, _ in self.spans[rank]), default=0.0) if self.staggered else 0.0

    @property
    def reach(self) -> float:
        """The end of the last rank's interval (`begin`), when the next step may start on it."""
        return max((self.begin(rank) for rank in range(len(self.spans))), default=0.0) + self.cost

    def bubble(self, rank: int) -> float:
        """Return the fraction of the cost in which a rank is idle, as in `simulate.Simulation.bubble_rates`."""
        work = sum(end - start for _, start, end in self.spans[rank])
        return (self.cost - work) / self.cost if self.cost else 0.0

    def curve(self, rank: int) -> list[tuple[float, float, float]]:
        """Return the activations of a rank over time: (time, micro-batches in flight from then on, memory of
        micro-batches between I and W).

        The unit is one micro-batch of 1/`pp` of the layers, so a stage of a rank with two stages counts half.
        """
        stage = len(self.spans) / self.n_stages
        return [
            (time, stage * number, stage * self.kept_for_weight * waiting)
            for time, number, waiting in count_microbatches(self.spans[rank])
        ]


def planned(simulation: Simulation, kept_for_weight: float = KEPT_FOR_WEIGHT) -> ScheduleTimeline:
    """Return the timeline of a simulation."""
    schedule = simulation.schedule
    stages = f", {schedule.n_stages} stages" if schedule.n_stages != schedule.n_ranks else ""
    times = simulation.times
    given = {"F": times.forward, "I": times.backward_input, "W": times.weight, "message": times.comm}
    words = ", ".join(f"{name} {time:g}" for name, time in given.items() if not isinstance(time, tuple) and time)
    sizes = f"{counted(schedule.n_ranks, 'rank')}{stages}, {counted(schedule.n_microbatches, 'micro-batch')}"
    return ScheduleTimeline(
        f"{schedule.name}: {sizes}",
        simulation.spans,
        schedule.n_stages,
        note=f"bubble {simulation.bubble_rate:.1%}, makespan {simulation.makespan:g}, "
        f"at most {max(simulation.peak_in_flight_shares, default=0):g} in flight, "
        f"memory {max(simulation.peak_memory_shares(kept_for_weight), default=0):.4g}; {words}",
        staggered=schedule.staggered,
        kept_for_weight=kept_for_weight,
    )


def draw(timelines: Sequence[ScheduleTimeline], path: str | Path, curves: bool = True) -> None:
    """Write timelines, one below the other, to an SVG file, which is replaced if it exists.

    `curves`: whether to draw a rank's activations below its row. Raises InputError if the file cannot be written.
    """
    write_whole(Path(path), svg(timelines, curves).encode("utf-8"))


def svg(timelines: Sequence[ScheduleTimeline], curves: bool = True) -> str:
    """Return the text of the SVG file. Timelines of the same unit share the scale of time; all share the scale of
    memory."""
    width = _width(timelines)
    highest = max(
        (sum(at[1:]) for timeline in timelines for rank in _ranks(timeline) for at in timeline.curve(rank)), default=0.0
    )
    parts: list[str] = []
    top = float(MARGIN)
    for timeline in timelines:
        longest = max(other.reach for other in timelines if other.unit == timeline.unit)
        canvas = _Canvas(top, (width - LEFT - RIGHT) / (longest or 1.0), curves, highest)
        parts += canvas.timeline(timeline, width)
        top = canvas.bottom(timeline) + BETWEEN
    legend, height = _legend(timelines, top, curves, width)
    parts += legend
    names = escape("; ".join(timeline.title for timeline in timelines))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:g}" width="{width}" height="{height:g}" '
        f'font-family="system-ui, \'DejaVu Sans\', sans-serif" font-size="10" role="img">\n<title>{names}</title>\n'
        f'<rect width="100%" height="100%" fill="{PAPER}"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _ranks(timeline: ScheduleTimeline) -> range:
    return range(len(timeline.spans))


def _width(timelines: Sequence[ScheduleTimeline]) -> int:
    """Return a width in pixels that fits numbers in boxes of the usual length, up to a limit."""
    needed = float(NARROW)
    for timeline in timelines:
        lengths = sorted(end - start for spans in timeline.spans for _, start, end in spans if end > start)
        if lengths:
            digits = len(str(max(action.microbatch for spans in timeline.spans for action, _, _ in spans)))
            needed = max(needed, LEFT + RIGHT + timeline.reach / lengths[len(lengths) // 10] * (digits * DIGIT + 2.5))
    return min(math.ceil(needed), WIDE)


@dataclass(frozen=True)
class _Canvas:
    """The position and scales of one timeline: `top` in pixels, `scale` in pixels a unit of time, `highest`: the value
    that fills the height of a curve."""

    top: float
    scale: float
    curves: bool
    highest: float

    @property
    def pitch(self) -> int:
        return ROW + (CURVE_HEIGHT + GAP if self.curves else 2)

    def row(self, rank: int) -> float:
        return self.top + HEADING + rank * self.pitch

    def bottom(self, timeline: ScheduleTimeline) -> float:
        return self.row(len(timeline.spans)) + AXIS

    def x(self, time: float) -> float:
        return LEFT + time * self.scale

    def timeline(self, timeline: ScheduleTimeline, width: int) -> list[str]:
        columns = width - RIGHT + 40, width - RIGHT + 87, width - MARGIN
        parts = [
            _text(MARGIN, self.top + 12, timeline.title, size=14, weight="bold"),
            _text(MARGIN, self.top + 30, timeline.note, size=11, colour=QUIET),
        ]
        for x, words in zip(columns, ("bubble", "in flight", "memory"), strict=True):
            parts.append(_text(x, self.top + 30, words, colour=QUIET, anchor="end"))
        for rank in _ranks(timeline):
            middle = self.row(rank) + ROW / 2 + 3.5
            bubble = f"{timeline.bubble(rank) + 1e-9:.1%}"  # equal ranks print the same despite rounding errors
            curve = timeline.curve(rank)
            in_flight = max((at[1] for at in curve), default=0.0)
            memory = max((sum(at[1:]) for at in curve), default=0.0)
            parts.append(_text(LEFT - 8, middle, f"rank {rank}", colour=QUIET, anchor="end"))
            for x, words in zip(columns, (bubble, f"{in_flight:g}", f"{memory:.4g}"), strict=True):
                parts.append(_text(x, middle, words, anchor="end"))
        return [*parts, *self._idle(timeline), *self._curves(timeline), *self._boxes(timeline), *self._axis(timeline)]

    def _idle(self, timeline: ScheduleTimeline) -> list[str]:
        """Return a background behind the boxes, visible where a rank is idle."""
        d = ""
        for rank in _ranks(timeline):
            d += _box(self.x(timeline.begin(rank)), self.row(rank), timeline.cost * self.scale, ROW)
        return [f'<path class="idle" fill="{IDLE}" d="{d}"/>']

    def _curves(self, timeline: ScheduleTimeline) -> list[str]:
        if not self.curves or not self.highest:
            return []
        whole: list[str] = []
        lower: list[str] = []
        for rank in _ranks(timeline):
            floor = self.row(rank) + ROW + 2 + CURVE_HEIGHT
            begin = f"M{_n(self.x(0))} {_n(floor)}"
            whole.append(begin)
            lower.append(f"{begin}H{_n(self.x(timeline.reach))}v.6H{_n(self.x(0))}v-.6")
            for time, number, waiting in timeline.curve(rank):
                for d, height in ((whole, number + waiting), (lower, number)):
                    d.append(f"H{_n(self.x(time))}V{_n(floor - CURVE_HEIGHT * height / self.highest)}")
            whole.append("z")
            lower.append("z")
        parts = [f'<path class="in-flight" fill="{IN_FLIGHT}" d="{"".join(lower)}"/>']
        if _waits(timeline):
            parts.insert(0, f'<path class="waiting" fill="{WAITING}" d="{"".join(whole)}"/>')
        return parts

    def _boxes(self, timeline: ScheduleTimeline) -> list[str]:
        shade_of = shades(timeline)
        boxes: dict[tuple[Op, str], list[str]] = {}
        numbers: dict[str, list[str]] = {}
        for rank, spans in enumerate(timeline.spans):
            y = self.row(rank)
            for action, start, end in spans:
                colour = shade_of(rank, action)
                x, width = self.x(start), (end - start) * self.scale
                gap = min(1.0, 0.12 * width)
                boxes.setdefault((action.op, colour), []).append(_box(x + gap / 2, y, width - gap, ROW))
                number = str(action.microbatch)
                if width >= len(number) * DIGIT + 2:
                    numbers.setdefault(ink_on(colour), []).append(
                        f'<text x="{_n(x + width / 2)}" y="{_n(y + ROW / 2 + 3.5)}">{number}</text>'
                    )
        parts = [
            f'<path class="{op}" fill="{colour}" d="{"".join(paths)}"/>'
            for (op, colour), paths in sorted(boxes.items())
        ]
        for colour, texts in numbers.items():
            parts += [f'<g fill="{colour}" text-anchor="middle">', *texts, "</g>"]
        return parts

    def _axis(self, timeline: ScheduleTimeline) -> list[str]:
        y = self.row(len(timeline.spans)) + (-2 if self.curves else 3)
        ticks = _ticks(timeline.reach, 70 / self.scale)
        marks = "".join(f"M{_n(self.x(tick))} {_n(y)}v4" for tick in ticks)
        line = f"M{LEFT} {_n(y)}H{_n(self.x(timeline.reach))}"
        parts = [f'<path fill="none" stroke="{QUIET}" stroke-width=".7" d="{line}{marks}"/>']
        for tick in ticks:
            label = f"{tick:g}" + (f" {timeline.unit}" if tick == ticks[-1] and timeline.unit else "")
            parts.append(_text(self.x(tick), y + 15, label, colour=QUIET, anchor="middle"))
        return parts


def _legend(timelines: Sequence[ScheduleTimeline], top: float, curves: bool, width: int) -> tuple[list[str], float]:
    """Return the legend, on as many lines as it needs, and its lower edge."""
    used = {action.op for timeline in timelines for spans in timeline.spans for action, _, _ in spans}
    many = any(_is_shaded(timeline) for timeline in timelines)
    items: list[tuple[tuple[str, ...], str]] = [
        (SHADES[op] if many else SHADES[op][:1], f"{op} {OP_WORDS[op]}") for op in OPS if op in used
    ]
    items.append(((IDLE,), "bubble"))
    if curves:
        items.append(((IN_FLIGHT,), "in flight"))
    if any(map(_waits, timelines)):
        words = _waiting_words(timelines)
        items.append(((WAITING,), words) if curves else ((), f"memory counts the activations {words}"))
    if many:
        items.append(((), _shade_words(timelines)))
    parts, x = [], float(LEFT)
    for colours, words in items:
        long = 12 * len(colours) + 5.7 * len(words) + 4
        if x + long > width - MARGIN:
            x, top = LEFT, top + LEGEND - 8
        for place, colour in enumerate(colours):
            parts.append(f'<path fill="{colour}" d="{_box(x + 12 * place, top, 11, 11)}"/>')
        start = x + 12 * len(colours) + (4 if colours else 0)
        parts.append(_text(start, top + 9.5, words, colour=INK if colours else QUIET))
        x += long + 14
    return parts, top + LEGEND


def _waits(timeline: ScheduleTimeline) -> bool:
    return any(action.op == "W" for spans in timeline.spans for action, _, _ in spans)


def _waiting_words(timelines: Iterable[ScheduleTimeline]) -> str:
    shares = sorted({timeline.kept_for_weight for timeline in timelines if _waits(timeline)})
    return f"waiting for W, each {' or '.join(f'{share:.4g}' for share in shares)} of one in flight"


def _is_shaded(timeline: ScheduleTimeline) -> bool:
    return any(len({action.stage for action, _, _ in spans}) > 1 for spans in timeline.spans)


def _both_ways(timeline: ScheduleTimeline) -> bool:
    """Return whether two ranks hold a stage, and micro-batches enter at both ends, as in DualPipe."""
    stages = [{action.stage for action, _, _ in spans} for spans in timeline.spans]
    return sum(map(len, stages)) > len(set().union(*stages))


def _shade_words(timelines: Iterable[ScheduleTimeline]) -> str:
    shaded = [timeline for timeline in timelines if _is_shaded(timeline)]
    words = [
        *["a rank's later stage"] * any(not _both_ways(timeline) for timeline in shaded),
        *["micro-batches from the other end"] * any(_both_ways(timeline) for timeline in shaded),
    ]
    return f"dark: {', or '.join(words)}"


def shades(timeline: ScheduleTimeline) -> Callable[[int, Action], str]:
    """Return the colour of an action of a rank: lighter for the rank's first stage, or for micro-batches that enter at
    rank 0, darker for later stages, or for micro-batches that enter at the last rank."""
    if _both_ways(timeline):
        entries = {a.microbatch: rank for rank, spans in enumerate(timeline.spans) for a, _, _ in spans if not a.stage}
        first = min(entries.values())
        return lambda rank, action: SHADES[action.op][entries.get(action.microbatch, first) != first]
    orders = [sorted({action.stage for action, _, _ in spans}) for spans in timeline.spans]
    colours = {
        (rank, stage, op): _between(*SHADES[op], place / max(1, len(order) - 1))
        for rank, order in enumerate(orders)
        for place, stage in enumerate(order)
        for op in OPS
    }
    return lambda rank, action: colours[rank, action.stage, action.op]


def _rgb(colour: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(colour[1:]))


def _between(light: str, dark: str, share: float) -> str:
    mixed = (round(a + share * (b - a)) for a, b in zip(_rgb(light), _rgb(dark), strict=True))
    return "#" + bytes(mixed).hex()


def ink_on(colour: str) -> str:
    """Return the colour of digits with the higher contrast on a box (relative luminance as in WCAG 2.2)."""
    red, green, blue = ((value / 255) ** 2.2 for value in _rgb(colour))
    return DARK_DIGITS if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.217 else LIGHT_DIGITS


def _ticks(end: float, least: float) -> list[float]:
    """Return round times from 0 to `end`, at least `least` apart."""
    if not end:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(least))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)
    return [i * step for i in range(math.floor(end / step * (1 + 1e-9)) + 1)]


def _n(value: float) -> str:
    """Return a coordinate to a hundredth of a pixel, without trailing zeros."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _box(x: float, y: float, width: float, height: float) -> str:
    return f"M{_n(x)} {_n(y)}h{_n(width)}v{_n(height)}h{_n(-width)}z"


def _text(x: float, y: float, words: str, size: int = 10, colour: str = INK, weight: str = "", anchor: str = "") -> str:
    more = "".join(
        f' {name}="{value}"'
        for name, value in (("font-size", size if size != 10 else ""), ("font-weight", weight), ("text-anchor", anchor))
        if value
    )
    return f'<text x="{_n(x)}" y="{_n(y)}" fill="{colour}"{more}>{escape(words, quote=False)}</text>'
