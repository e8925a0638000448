"""The messages of the busiest rank in a step: by the ranks that communicate, and how much of them overlaps."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from shardwright.cost.collectives import PricedMessage, named
from shardwright.cost.step import PIPELINE
from shardwright.cost.traffic import step_messages
from shardwright.planner.choice import PricedLayout
from shardwright.system.units import percent
from shardwright.view.document import BYTES, NUMBER, SECONDS, Column, Quantity, Table

COUNT = Quantity("{:,.0f}".format)


@dataclass(frozen=True)
class SentMessage:
    """The calls of one message in a step. `work`: the part of the step time that it belongs to; `size`, `stride`: ranks
    of its group and their distance; `n_bytes`: of the buffer of a call; `seconds`: of all calls, one after another."""

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
    found: dict[tuple[Any, ...], SentMessage] = {}
    for message in step_messages(priced.job, priced.candidates, int(priced.time.busiest[0])):
        key = message.what, named(message.collective), message.work, int(_first(message.size)), _bytes(message)
        before = found.get(key)
        calls, seconds = _first(message.calls), _first(message.seconds(priced.job.cluster))
        found[key] = SentMessage(
            *key[:4],
            int(_first(message.stride)),
            key[4],
            calls + (before.calls if before else 0.0),
            seconds + (before.seconds if before else 0.0),
        )
    return list(found.values())


def groups(priced: PricedLayout, messages: Iterable[SentMessage]) -> list[GroupTraffic]:
    """Return the messages by the kind of work and the ranks of a group, the slowest first."""
    cluster = priced.job.cluster
    found: dict[tuple[str, int, int], list[SentMessage]] = {}
    for each in messages:
        found.setdefault((each.work, each.size, each.stride), []).append(each)
    works = [work for work, _, _ in found]
    result = []
    for (work, size, stride), sent in found.items():
        inside = size * stride <= cluster.node_size or (size == 2 and stride < cluster.node_size)
        link = "links inside a node" if inside else f"network between nodes ({cluster.across.name})"
        name = work if works.count(work) == 1 else f"{work}, {size:,} ranks"
        n_bytes = sum(each.calls * each.n_bytes for each in sent)
        result.append(GroupTraffic(name, size, stride, link, n_bytes, sum(each.seconds for each in sent)))
    return sorted(result, key=lambda each: -each.seconds)


def overlap_table(priced: PricedLayout, messages: Sequence[SentMessage]) -> Table:
    """Return the time of the messages by kind of work: all calls one after another, the time by which they make the
    step longer, and the share that overlaps with computation. The messages of the pipeline are part of its waiting."""
    rows: list[Sequence[Any]] = []
    for work in dict.fromkeys(each.work for each in messages):
        alone = sum(each.seconds for each in messages if each.work == work)
        exposed = None if work == PIPELINE else priced.parts_s.get(work, 0.0)
        overlapped = None if exposed is None else percent(max(0.0, 1 - exposed / alone))
        rows.append((work, alone, exposed, overlapped))
    columns = Column("messages"), Column("one after another", SECONDS), Column("exposed", SECONDS)
    return Table((*columns, Column("overlapped", NUMBER)), rows)


def message_table(messages: Iterable[SentMessage], patterns: Sequence[str] = ("*",)) -> Table:
    """Return the messages whose names match one of the patterns."""
    columns = Column("message"), Column("kind"), Column("ranks", COUNT), Column("calls", COUNT)
    return Table(
        (*columns, Column("of a call", BYTES), Column("one after another", SECONDS)), [*_rows(messages, patterns)]
    )


def _rows(messages: Iterable[SentMessage], patterns: Sequence[str]) -> Iterator[Sequence[Any]]:
    for each in messages:
        if any(fnmatchcase(each.what, pattern) for pattern in patterns):
            yield each.what, each.collective, each.size, each.calls, each.n_bytes, each.seconds


def _bytes(message: PricedMessage) -> float:
    return _first(message.n_bytes)


def _first(value: Any) -> float:
    """Return the number of the one candidate."""
    return float(np.ravel(value)[0])
