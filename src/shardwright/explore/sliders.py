"""The sliders of a page: the positions that each key can have, and the state after a move.

A position is offered only if the layout after the move keeps every rule of the planner. A move has the consequences of
`Layout.changed`, and dp takes the rest of the accelerators.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

from shardwright.cost.job import Job
from shardwright.explore.state import LAYOUT_KEYS, PageState, check
from shardwright.layout.box import DENSE_AXES
from shardwright.layout.key import LayoutKey, written
from shardwright.layout.keys import KEYS
from shardwright.layout.layout import Layout
from shardwright.planner.choice import Choice
from shardwright.planner.words import choices_in_words
from shardwright.schedule.registry import find
from shardwright.split.stages import most_layers
from shardwright.system.errors import InputError
from shardwright.system.units import divisors

GROUPS: dict[str, tuple[str, ...]] = {
    "Parallelism": ("tp", "sequence_parallel", "pp", "pp_schedule", "virtual_stages", "cp", "cp_method", "ep"),
    "Data parallelism": ("dp_replicate", "zero", "zero_pp_gather", "zero_secondary_ranks"),
    "Memory": (
        *("micro_batch", "recompute", "recompute_modules", "recompute_layers", "loss_chunk_tokens"),
        *("offload_optimizer", "offload_parameters", "offload_activations"),
    ),
}
"""The keys that are always shown; the others are below them."""
OTHERS = "Further keys"
MOST_POSITIONS = 24
MICRO_BATCH = "micro_batch"
AXES = (*DENSE_AXES, "ep")
_SIZES: dict[str, tuple[int, ...]] = {
    "loss_chunk_tokens": (0, 1024, 2048, 4096, 8192),
    "offload_min_bytes": (2**16, 2**18, 2**20, 2**22, 2**24),
}
"""Positions of keys that any number is valid for."""


@dataclass(frozen=True)
class Slider:
    """A key with its positions as text, the text of its value, and the words for it. `number`: its positions are
    ordered numbers."""

    key: str
    value: str
    positions: Sequence[str]
    help: str
    words: str = ""
    number: bool = False


def moved(job: Job, choice: Choice, key: str, value: Any) -> Choice:
    """Return the choice with another value of a key and its consequences. Raises LayoutError if that is not valid."""
    if key == MICRO_BATCH:
        return replace(choice, micro_batch=value)
    layout, size = choice.layout, job.cluster.size
    changes: dict[str, Any] = {key: value}
    inside = 1
    for axis in ("tp", "pp", "cp"):
        inside *= value if axis == key else layout.degree(axis)
    if size % inside == 0:
        rest = size // inside
        whole = layout.zero == 0 if key != "zero" else value == 0
        replicas = value if key == "dp_replicate" else gcd(rest, layout.dp_replicate)
        if whole:
            replicas = rest
        elif key == "zero" and layout.zero == 0:
            replicas = 1
        changes |= {"dp_replicate": replicas, "dp_shard": max(1, rest // replicas)}
        if key == "dp_replicate" and value < rest and layout.zero == 0:
            changes["zero"] = None
    if key == "tp" and layout.tp == 1:
        changes["sequence_parallel"] = None
    if key == "virtual_stages" or (key == "pp" and value == 1):
        changes["stage_layers"] = None
    return Choice(layout.changed(**changes), choice.micro_batch)


def sliders(state: PageState) -> dict[str, list[Slider]]:
    """Return the sliders of a state by group, without keys that have one position."""
    by_group: dict[str, list[Slider]] = {}
    shown = {key: group for group, keys in GROUPS.items() for key in keys}
    order = [key for keys in GROUPS.values() for key in keys]
    for key in [*order, *(key for key in LAYOUT_KEYS if key not in shown and key != "dp_shard")]:
        slider = _slider(state, key)
        if slider is not None:
            by_group.setdefault(shown.get(key, OTHERS), []).append(slider)
    return by_group


def _slider(state: PageState, key: str) -> Slider | None:
    layout, row = state.layout, KEYS.get(key)
    if row is not None and key not in AXES and not row.used(layout):
        return None
    now = state.choice.micro_batch if row is None else getattr(layout, key)
    values = [value for value in _candidates(state, key) if value == now or _valid(state, key, value)]
    if len(values) < 2:
        return None
    if now not in values:
        values.append(now)
    number = all(type(value) is int for value in values)
    texts = [*map(position, sorted(values) if number else values)]
    if row is None:
        help = "sequences that a rank runs at a time"
        return Slider(key, position(now), texts, help, help, number)
    return Slider(key, position(now), texts, row.help, _words(state, row), number)


def position(value: Any) -> str:
    """Return the text of a position; empty for a key that is left out."""
    return "" if value is None else written(value)


def _words(state: PageState, row: LayoutKey) -> str:
    rows = {name: words for name, _, words in choices_in_words(state.job, state.choice)}
    return rows.get(row.name, "")


def _valid(state: PageState, key: str, value: Any) -> bool:
    try:
        check(state.job, moved(state.job, state.choice, key, value))
    except InputError:
        return False
    return True


def _candidates(state: PageState, key: str) -> Iterator[Any]:
    """Yield the values of a key that are worth a check, in order."""
    job, layout = state.job, state.layout
    if key == MICRO_BATCH:
        yield from _some(divisors(max(1, job.global_batch // layout.data_ranks)))
        return
    row = KEYS[key]
    if key == "dp_replicate":
        yield from divisors(job.cluster.size // (layout.tp * layout.pp * layout.cp))
    elif key in ("tp", "pp", "cp", "ulysses_degree"):
        yield from _some(divisors(job.cluster.size))
    elif key == "ep":
        yield from divisors(1 if job.model.moe is None else job.model.moe.n_experts)
    elif key in ("zero_secondary_ranks", "node_ranks"):
        yield from divisors(job.cluster.node_size)
    elif key == "virtual_stages":
        yield from layout.kind.virtual_stages_tried if layout.pp > 1 else ()
    elif key == "recompute_layers":
        yield from _layers(job, layout)
    elif key in _SIZES:
        yield from _SIZES[key]
    elif row.choices is not None:
        yield from (value for value in row.choices() if key != "pp_schedule" or not find(value).searched)
    elif key == "recompute_modules" and layout.recomputes_parts:
        yield from _parts(row)


def _layers(job: Job, layout: Layout) -> Iterator[int | None]:
    yield None
    if layout.recomputes:
        yield from range(1, most_layers(job.model, layout, job.seq_len) + 1)


def _parts(row: LayoutKey) -> Iterator[tuple[str, ...]]:
    """Yield the default parts, and these with each other part."""
    yield row.default
    assert row.members is not None
    for part in row.members():
        if part not in row.default:
            yield (*row.default, part)
    yield tuple(row.members())


def _some(values: Sequence[int]) -> Sequence[int]:
    """Return at most `MOST_POSITIONS` of the values, the smallest ones."""
    return values[:MOST_POSITIONS]
