"""The layouts of a number of ranks for a model and a sequence length; no torch.

Without a pipeline these are all layouts. With a pipeline there would be too many to run, because nine schedules
multiply with the rest (1260 on 8 ranks for the debug model), so each set of degrees has only as many layouts as are
needed for every two choices to meet (`_covering`: 396).
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import combinations, product
from math import gcd
from typing import Any

from shardwright.layout.box import DENSE_AXES
from shardwright.layout.keys import KEYS
from shardwright.layout.layout import Layout
from shardwright.model.spec import ModelSpec
from shardwright.split.rules import problems
from shardwright.system.errors import LayoutError
from shardwright.system.units import divisors

Choice = dict[str, Any]
"""Values of fields of a Layout that are chosen together."""
Pair = tuple[tuple[str, Any], tuple[str, Any]]
"""Two keys of a layout with their values; for an axis, whether it has several ranks."""
_IN_TURN = {name: (*key.in_turn, key.default) for name, key in KEYS.items() if key.in_turn}
"""The values of the keys that are compatible with every axis but not in every layout, the default last."""


def layouts(spec: ModelSpec, world_size: int, *seq_lens: int) -> list[Layout]:
    """Return layouts of this model over exactly `world_size` ranks for sequences of each length, with the choices that
    make a difference.

    Every combination of degrees is included. Without pp each has every combination of zero, sequence_parallel and
    cp_method, and of ep if the model has experts. With pp each has every schedule, and any two of these choices are
    together in at least one layout, if the model can be partitioned so: pp_schedule, zero (3 with either
    zero_pp_gather), sequence_parallel, cp_method, ep.

    Last come layouts with recomputation, a chunked loss, offload and compression (`LayoutKey.in_turn`): one of each
    combination of degrees, and more until any two values of these keys, and any value with each axis, with token shards
    and with a split backward pass, are together in one of them, if a layout can have both. Keys left at their default
    have a reason (`LayoutKey.unverified`).

    Choices that change nothing stay at their default: sequence_parallel without tp, cp_method without cp, "usp" with
    all or none of cp given to Ulysses, ep without experts, and ZeRO with nothing to shard over.
    """
    result: list[Layout] = []
    of_degrees: list[Sequence[Layout]] = []
    for degrees in _degrees(world_size):
        possible: dict[Layout, tuple[int, ...]] = {}
        axes = _choices(degrees, spec.moe.n_experts if spec.moe else 1)
        for numbers in product(*(range(len(choices)) for choices in axes)):
            chosen = [choices[number] for choices, number in zip(axes, numbers, strict=True)]
            try:
                layout = Layout(**degrees, **{name: value for choice in chosen for name, value in choice.items()})
            except LayoutError:
                continue
            if not any(problems(spec, layout, seq_len) for seq_len in seq_lens):
                possible[layout] = numbers
        taken = _covering(possible) if degrees["pp"] > 1 else list(possible)
        result += taken
        of_degrees.append(taken)
    return result + _varied([group for group in of_degrees if group])


def _degrees(world_size: int) -> Iterator[Choice]:
    for pp in divisors(world_size):
        for tp in divisors(world_size // pp):
            for cp in divisors(world_size // (pp * tp)):
                rest = world_size // (pp * tp * cp)
                for dp_shard in divisors(rest):
                    yield {"tp": tp, "cp": cp, "dp_shard": dp_shard, "dp_replicate": rest // dp_shard, "pp": pp}


def _choices(degrees: Choice, n_experts: int) -> list[list[Choice]]:
    """Return the choices with these degrees for each group of keys (`LayoutKey.group`), the last group varying
    fastest."""
    groups: dict[str, list[Choice]] = {}
    for name, key in KEYS.items():
        if name in degrees or key.unverified or key.in_turn:
            continue
        values: Sequence[Any] = key.choices() if key.choices else ()
        if name == "ep":
            values = divisors(gcd(degrees["dp_shard"] * degrees["cp"] * degrees["tp"], n_experts))
        elif name == "ulysses_degree":
            values = divisors(degrees["cp"])
        before = groups.get(key.group, [{}])
        groups[key.group] = [choice | {name: value} for choice in before for value in values]
    return [[choice for choice in choices if _makes_sense(degrees | choice)] for choices in groups.values()]


def _makes_sense(choice: Choice) -> bool:
    """Return whether a choice with its degrees is a layout in which every key beyond its default has a meaning."""
    try:
        layout = Layout(**choice)
    except LayoutError:
        return False
    dull = any(getattr(layout, name) != key.default_in(layout) and not key.used(layout) for name, key in KEYS.items())
    return not dull and not (layout.cp_method == "usp" and layout.ulysses_degree == layout.cp)


def _varied(of_degrees: Sequence[Sequence[Layout]]) -> list[Layout]:
    """Return layouts in which the keys of `_IN_TURN` have other values: first one for each combination of degrees,
    whose layouts are given, then more until any two values are together in one."""
    plain = [layout for group in of_degrees for layout in group]
    met = {pair for layout in plain for pair in _pairs(layout)}
    result: list[Layout] = []

    def take(layout: Layout) -> None:
        result.append(layout)
        met.update(_pairs(layout))

    for number, group in enumerate(of_degrees):
        take(_filled(group[(number + 1) % len(group)], met))
    # The axes and the ZeRO stage decide which of these keys a layout can have; layouts with the most come first.
    alike = {(len(_axes(layout)), layout.zero, _axes(layout)): layout for layout in reversed(plain)}
    for layout in (alike[key] for key in sorted(alike, reverse=True)):
        for one, other in sorted(set(_wanted(layout)) - met, key=str):
            if (one, other) not in met and (able := _able(layout, dict([one, other]))):
                take(_filled(able, met, (one[0], other[0])))
    return result


def _axes(layout: Layout) -> tuple[str, ...]:
    """Return the axes with several ranks, and two ways in which a layer runs differently over them."""
    split = layout.pp > 1 and layout.kind.splits_backward
    ways = {"token shards": layout.token_shards, "split backward": split}
    return tuple(axis for axis in (*DENSE_AXES, "ep") if layout.degree(axis) > 1) + tuple(w for w in ways if ways[w])


def _pairs(layout: Layout) -> set[Pair]:
    values = [(name, getattr(layout, name)) for name in _IN_TURN]
    return {*combinations(values, 2), *product([(axis, True) for axis in _axes(layout)], values)}


def _wanted(layout: Layout) -> Iterator[Pair]:
    """Yield all pairs of the keys with the layout's axes, and with one another, possible or not, of the values that the
    layout can have."""
    values = [[(name, value) for value in values if _able(layout, {name: value})] for name, values in _IN_TURN.items()]
    for one, other in combinations(values, 2):
        yield from product(one, other)
    for key_values in values:
        yield from product([(axis, True) for axis in _axes(layout)], key_values)


def _able(layout: Layout, pair: Choice) -> Layout | None:
    """Return the layout with two values, and a third if one of them needs that; None if it cannot have them."""
    chosen = {name: value for name, value in pair.items() if name in _IN_TURN}
    third = [{name: value} for name, values in _IN_TURN.items() for value in values if value != KEYS[name].default]
    for more in ({}, *third):
        changed = _changed(layout, more | chosen)
        if changed and all(getattr(changed, name) == value for name, value in chosen.items()):
            return changed
    return None


def _filled(layout: Layout, met: set[Pair], kept: Sequence[str] = ()) -> Layout:
    """Return the layout with values of the keys, except the `kept` ones, that bring most pairs together for the first
    time: key by key, the best value of each."""
    fixed = {name: getattr(layout, name) for name in kept if name in _IN_TURN}
    for name, values in _IN_TURN.items():
        if name not in fixed:
            tried = [_changed(layout, {name: value}) for value in values]
            able = [other for other in tried if other and all(getattr(other, k) == v for k, v in fixed.items())]
            layout = max(able, key=lambda other: len(_pairs(other) - met))
    return layout


def _changed(layout: Layout, changes: Choice) -> Layout | None:
    return _with_items(layout, tuple(changes.items()))


@lru_cache(2**16)
def _with_items(layout: Layout, items: tuple[tuple[str, Any], ...]) -> Layout | None:
    """Return the layout with changes, or None if that is not a layout. The pairs of a matrix ask for the same change
    many times, and the matrices of other models again."""
    try:
        return layout.changed(**dict(items))
    except LayoutError:
        return None


def _covering(possible: dict[Layout, tuple[int, ...]]) -> Sequence[Layout]:
    """Return some of the layouts, in their order, that together have every two choices that one of them has together.

    `possible` has for each layout the number of each of its choices. The layout that brings most pairs together for the
    first time is taken repeatedly, the first one of equals: not the fewest layouts possible, but close, and always the
    same.
    """
    pairs = {layout: set(combinations(enumerate(numbers), 2)) for layout, numbers in possible.items()}
    missing = set().union(*pairs.values())
    taken = set()
    while missing:
        best = max(pairs, key=lambda layout: len(pairs[layout] & missing))
        missing -= pairs[best]
        taken.add(best)
    return [layout for layout in possible if layout in taken]
