"""The seconds of one message or collective with the numbers of its formula (`cost.collectives`)."""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, log2

import numpy as np
from numpy.typing import ArrayLike

from shardwright.cost import collectives
from shardwright.cost.collectives import SATURATION, Placement
from shardwright.cost.hardware import Cluster, Link
from shardwright.cost.job import Floats
from shardwright.plan.line import Line, num

MESSAGE_FORMULA = "start + messages x latency + V' / bandwidth, V' = V + H^0.7 V^0.3"
"""V bytes that an accelerator sends, H those at which half of the bandwidth is reached."""
_PRICE: dict[str, Callable[[Cluster, ArrayLike, ArrayLike, ArrayLike], Floats]] = {
    "all-reduce": collectives.all_reduce,
    "all-gather": collectives.all_gather,
    "reduce-scatter": collectives.reduce_scatter,
    "message": collectives.point_to_point,
}


@dataclass(frozen=True)
class Term:
    """A value, and the arithmetic that gives it."""

    value: float
    numbers: str


def one(value: ArrayLike) -> float:
    """The only element of an array."""
    return float(np.asarray(value, dtype=np.float64).reshape(-1)[0])


def total(terms: list[Term]) -> Term:
    """Their sum."""
    return Term(sum(each.value for each in terms), " + ".join(each.numbers for each in terms) or "0")


def hidden(message: float, beside: float, interference: float, least: float = 0.0) -> Term:
    """What is left of a message beside other work (`cost.layer.hidden`)."""
    value = max(message - beside, least) + interference * min(message, beside)
    numbers = (
        f"max({num(message)} - {num(beside)}, {num(least)}) + {num(interference)} * min({num(message)}, {num(beside)})"
    )
    return Term(value, numbers)


def message_line(
    section: str, what: str, kind: str, cluster: Cluster, n_bytes: float, size: int, stride: int, more_s: float = 0.0
) -> Line:
    """One collective of `size` ranks, each `stride` from the next, for a buffer of `n_bytes`; `more_s` on top."""
    seconds = one(_PRICE[kind](cluster, n_bytes, size, stride)) + more_s
    numbers = _numbers(kind, cluster, n_bytes, size, stride) + (f" + {num(more_s)}" if more_s else "")
    place = Placement.of(cluster, size, stride)
    where = "" if one(place.nodes) == 1 else f" on {int(place.nodes)} nodes"
    among = "" if kind == "message" else f" over {size} ranks{where}"
    name = f"{what}: {kind} of {num(n_bytes)} B{among}"
    return Line(section, name, MESSAGE_FORMULA, numbers, seconds, "s", "cost/collectives.py")


def _numbers(kind: str, cluster: Cluster, n_bytes: float, size: int, stride: int) -> str:
    place = Placement.of(cluster, size, stride)
    n, g, k = int(place.size), int(place.per_node), int(place.nodes)
    inside, across = cluster.inside, cluster.across
    if n == 1:
        return "0"
    if kind == "message":
        link = across if k > 1 else inside
        return f"{num(link.start_s)} + 1 * {num(link.latency_s)} + {_bytes(link, n_bytes, 2 if k == 1 else 0)}"
    if kind != "all-reduce":
        sent = n_bytes * (n - 1) / n
        return _ring(cluster, n - k, k - 1, sent, g, k)
    ring_bytes = 2 * n_bytes * (n - 1) / n
    ring = _ring(cluster, 2 * (n - k), 2 * (k - 1), ring_bytes, g, k)
    if k > 1:
        tree = _ring(cluster, 2 * (g - 1), 2 * ceil(log2(k)), 2 * n_bytes, g, k)
        return f"min({ring}, {tree})"
    if inside.switch_bytes_per_s:
        switched = _saturated(inside, n_bytes)
        messages = 2 * ceil(log2(n))
        start = f"{num(inside.start_s)} + {messages} * {num(inside.latency_s)}"
        return f"min({ring}, {start} + {switched} / {num(inside.switch_bytes_per_s)})"
    return ring


def _ring(cluster: Cluster, n_inside: int, n_across: int, sent: float, g: int, k: int) -> str:
    inside, across = cluster.inside, cluster.across
    start = num(across.start_s if n_across else inside.start_s)
    parts = [start] + [
        f"{n_messages} * {num(link.latency_s)}"
        for n_messages, link in ((n_inside, inside), (n_across, across))
        if n_messages
    ]
    slower = [_bytes(inside, sent, g)] if g > 1 else []
    slower += [_bytes(across, sent / g, 0)] if k > 1 else []
    return " + ".join([*parts, f"max({', '.join(slower)})" if len(slower) > 1 else slower[0]])


def _bytes(link: Link, sent: float, members: int) -> str:
    """Seconds of the bytes alone; `members`: in a node, where each pair may have its own wire, or 0."""
    rate = link.bytes_per_s
    if members and link.peer_bytes_per_s:
        rate = min(rate, link.peer_bytes_per_s * max(members - 1, 1))
    return f"{_saturated(link, sent)} / {num(rate)}"


def _saturated(link: Link, sent: float) -> str:
    return f"({num(sent)} + {num(link.half_bytes)} ** {SATURATION} * {num(sent)} ** {1 - SATURATION:.9g})"
