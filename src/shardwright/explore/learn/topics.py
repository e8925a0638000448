"""The topics of Learn: text and choices from `topics.toml`, and the states and ledger entries that a page shows."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

from shardwright.cost.ledger import LedgerEntry
from shardwright.explore.learn.served import served_entries
from shardwright.explore.state import LAYOUT_KEYS, PageState, ParsedState, parse, query_of
from shardwright.planner.explain import explain

PLAIN = "plain"
"""In a change of a state: drop the keys of the layout first."""
SERVED = "inference"
"""The topic whose entries are of serving the model."""


@dataclass(frozen=True)
class LearnQuestion:
    """A question with states that answer it. `tries`: changes of `base`, or of the page's state if that is empty;
    `show`: names of ledger entries, or ratios of two."""

    ask: str
    tries: Sequence[str]
    show: Sequence[str]
    why: str
    base: str = ""


@dataclass(frozen=True)
class BarsChoice:
    """A bar for each change of the page's state, by kind of memory or of work (`kind`: "memory" or "time")."""

    kind: str
    tries: Sequence[str]
    title: str


@dataclass(frozen=True, kw_only=True)
class LearnTopic:
    """A page of Learn; `topics.toml` describes the fields. `systems`: the systems that the page explains."""

    slug: str
    title: str
    systems: Sequence[str]
    verbs: Sequence[str]
    about: Sequence[str]
    figures: Sequence[str]
    entries: Sequence[str]
    questions: Sequence[LearnQuestion]
    messages: Sequence[str] = ()
    bars: BarsChoice | None = None
    needs: str = ""
    example: str = ""

    def shown(self, state: PageState) -> PageState:
        """Return the state, or the example if the state's layout does not use the topic's key."""
        if not self.needs or getattr(state.layout, self.needs) not in (1, "none"):
            return state
        example = _parsed(self.example).state
        assert example is not None, f"{self.slug}: {_parsed(self.example).problems}"
        return example


def _read(path: Path) -> dict[str, LearnTopic]:
    with path.open("rb") as file:
        tables: Mapping[str, dict[str, Any]] = tomllib.load(file)
    topics = {}
    for slug, table in tables.items():
        questions = [LearnQuestion(**row) for row in table.pop("questions")]
        bars = BarsChoice(**table.pop("bars")) if "bars" in table else None
        topics[slug] = LearnTopic(slug=slug, questions=questions, bars=bars, **table)
    return topics


ALL_TOPICS = _read(Path(__file__).with_name("topics.toml"))
TOPICS = {slug: topic.title for slug, topic in ALL_TOPICS.items()}
"""The title of each page by its slug, in order."""


@dataclass(frozen=True)
class TriedState:
    """A changed state. `words`: the change; `query`: of the changed state; `state`: None if the layout is not possible,
    for the reason `problem`."""

    words: str
    query: str
    state: PageState | None
    problem: str = ""


def tried(base: str, changes: Sequence[str], hardware: Path | None = None) -> list[TriedState]:
    """Return the states of a query string with each of the changes. `hardware`: the user's hardware file."""
    return [_changed(base, change, hardware) for change in changes]


def _changed(base: str, change: str, hardware: Path | None) -> TriedState:
    new = dict(parse_qsl(change, keep_blank_values=True))
    plain = new.pop(PLAIN, None) is not None or change.startswith(PLAIN)
    old = {key: text for key, text in parse_qsl(base) if not (plain and key in LAYOUT_KEYS)}
    if not {"tp", "pp", "cp", "zero", "count"}.isdisjoint(new) and not {"dp_shard", "dp_replicate"} & set(new):
        old = {key: text for key, text in old.items() if key not in ("dp_shard", "dp_replicate")}
    query = urlencode(old | new)
    result = _parsed(query, hardware)
    words = ", ".join(f"{key}={text}" for key, text in new.items() if text) or "as it is"
    if result.state is None:
        return TriedState(words, query, None, result.problems[0])
    query = query_of(result.state, pinned=False)
    return TriedState(words, query, _parsed(query, hardware).state)


@lru_cache(maxsize=256)
def _parsed(query: str, hardware: Path | None = None) -> ParsedState:
    return parse(query, hardware)


def ledger_of(state: PageState, topic: LearnTopic) -> tuple[LedgerEntry, ...]:
    """Return the ledger of a state: of training, or for the topic `SERVED` of serving."""
    return _ledger(state, topic.slug == SERVED)


@lru_cache(maxsize=256)
def _ledger(state: PageState, serving: bool) -> tuple[LedgerEntry, ...]:
    return tuple(served_entries(state) if serving else explain(state.priced))


def matching(entries: Sequence[LedgerEntry], patterns: Sequence[str]) -> Iterator[LedgerEntry]:
    """Yield the entries whose names match, in the order of the patterns, one for each name."""
    seen: set[str] = set()
    for pattern in patterns:
        for entry in sorted(entries, key=_preference):
            if entry.what not in seen and fnmatchcase(entry.what, pattern):
                seen.add(entry.what)
                yield entry


def _preference(entry: LedgerEntry) -> bool:
    """Return whether an entry of the same name in another section comes first: a layer before embedding and head."""
    return entry.section.startswith(("Embedding", "Head"))
