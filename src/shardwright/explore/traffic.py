"""The messages of the busiest rank in a step: by the ranks that communicate, and how much of them overlaps."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from shardwright.cost.collectives import named
from shardwright.cost.speed import EXPERT
from shardwright.cost.step import PIPELINE
from shardwright.cost.traffic import step_messages
from shardwright.layout.box import DENSE_AXES
from shardwright.planner.choice import PricedLayout
from shardwright.system.units import percent
from shardwright.view.document import BYTES, NUMBER, ROUNDED, SECONDS, Column, Table


@dataclass(frozen=True)
class SentMessage:
    """The calls of one message in a step. `work`: the part of the step time that it belongs to; `size`, `stride`: ranks
    of its group and their distance; `n_bytes`: of the buffer of a call; `seconds`: of all calls in a step, one after
    another."""

    what: str
    collective: str
    work: str
    size: int
    stride: int
    n_bytes: float
    calls: float
    seconds: float


@dataclass(frozen=True)
class GroupTraffic:
    """All messages of the ranks of one kind of group. `link`: the links they use; `n_bytes`, `seconds`: of all calls in
    a step, one after another."""

    name: str
    size: int
    stride: int
    link: str
    n_bytes: float
    seconds: float


def sent_messages(priced: PricedLayout) -> list[SentMessage]:
    """Return the messages of the rank of pp with the most work, with equal messages of its layers added up."""
    by_key: dict[tuple[Any, ...], SentMessage] = {}
    for message in step_messages(priced.job, priced.candidates, int(priced.time.busiest[0])):
        size, stride = int(_first(message.size)), int(_first(message.stride))
        key = message.what, named(message.collective), message.work, size, stride, _first(message.n_bytes)
        before = by_key.get(key)
        slower = priced.job.stack.speed.slowdown(message.work)
        calls, seconds = _first(message.calls), _first(message.seconds(priced.job.cluster, slower))
        by_key[key] = SentMessage(
            *key,
            calls + (before.calls if before else 0.0),
            seconds + (before.seconds if before else 0.0),
        )
    return list(by_key.values())


def groups(priced: PricedLayout, messages: Iterable[SentMessage]) -> list[GroupTraffic]:
    """Return the messages by the kind of work and the ranks of a group, the slowest first."""
    cluster = priced.job.cluster
    by_group: dict[tuple[str, int, int], list[SentMessage]] = {}
    for message in messages:
        by_group.setdefault((message.work, message.size, message.stride), []).append(message)
    result = []
    for (work, size, stride), sent in by_group.items():
        inside = size * stride <= cluster.node_size or (size == 2 and stride < cluster.node_size)
        link = "links inside a node" if inside else f"network between nodes ({cluster.across.name})"
        name = f"{work}, {_axes(priced, work, size, stride)}"
        n_bytes = sum(message.calls * message.n_bytes for message in sent)
        result.append(GroupTraffic(name, size, stride, link, n_bytes, sum(message.seconds for message in sent)))
    return sorted(result, key=lambda group: -group.seconds)


def _axes(priced: PricedLayout, work: str, size: int, stride: int) -> str:
    """Return the axes whose ranks form groups of `size` ranks, `stride` apart, else these two numbers."""
    layout, heads = priced.layout, priced.job.model.n_kv_heads
    dense, inner_first = {}, DENSE_AXES[::-1]
    for at, first in enumerate(inner_first):
        apart = math.prod(map(layout.degree, inner_first[:at]))
        for end in range(len(inner_first), at, -1):
            axes = inner_first[at:end]
            shared = [axis for axis in axes if layout.degree(axis) > 1]
            dense[math.prod(map(layout.degree, axes)), apart] = " and ".join(shared) or first
    experts = {(layout.ep, 1): "ep", (layout.expert_dp_shard, layout.ep): "dp_shard of experts"}
    next_stage = {(2, layout.world_size // layout.pp): "pp"} if work == PIPELINE else {}
    copies = {(layout.tp // heads, 1): "copies of kv heads in tp"} if layout.tp > heads else {}
    names = dense | experts if work == EXPERT else experts | dense
    return (copies | names | next_stage).get((size, stride), f"{size:,} ranks, {stride:,} apart")


def overlap_table(priced: PricedLayout, messages: Sequence[SentMessage]) -> Table:
    """Return the time of the messages by kind of work: all calls one after another, the time by which they make the
    step longer, and the share that overlaps with computation. The messages of the pipeline are part of its waiting."""
    rows: list[Sequence[Any]] = []
    for work in dict.fromkeys(message.work for message in messages):
        alone = sum(message.seconds for message in messages if message.work == work)
        exposed = None if work == PIPELINE else priced.parts_s[work]
        overlapped = None if exposed is None or not alone else percent(max(0.0, 1 - exposed / alone))
        rows.append((work, alone, exposed, overlapped))
    columns = Column("messages"), Column("one after another", SECONDS), Column("exposed", SECONDS)
    return Table((*columns, Column("overlapped", NUMBER)), rows)


def message_table(messages: Iterable[SentMessage], patterns: Sequence[str] = ("*",)) -> Table:
    """Return the messages whose names match one of the patterns."""
    columns = Column("message"), Column("kind"), Column("ranks", ROUNDED), Column("calls", ROUNDED)
    return Table(
        (*columns, Column("of a call", BYTES), Column("one after another", SECONDS)), [*_rows(messages, patterns)]
    )


def _rows(messages: Iterable[SentMessage], patterns: Sequence[str]) -> Iterator[Sequence[Any]]:
    for message in messages:
        if any(fnmatchcase(message.what, pattern) for pattern in patterns):
            yield message.what, message.collective, message.size, message.calls, message.n_bytes, message.seconds


def _first(value: Any) -> float:
    """Return the number of the one candidate."""
    return float(np.ravel(value)[0])
