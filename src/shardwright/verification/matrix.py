"""The layouts of a number of ranks for a model and a sequence length; no torch.

Without a pipeline these are all there are. With one there would be too many to run, since nine schedules multiply with
the rest (of 8 ranks 1260 for the debug model), so for each set of degrees as many are taken as it needs for every two
choices to meet (`_covering`: 396).
"""

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from math import gcd
from typing import Any

from shardwright.box import DENSE_AXES
from shardwright.errors import LayoutError
from shardwright.layout import Layout
from shardwright.layout_keys import KEYS
from shardwright.model.spec import ModelSpec
from shardwright.split.rules import problems
from shardwright.units import divisors

Choice = dict[str, Any]
"""Values of fields of a Layout that are chosen together."""
Pair = tuple[tuple[str, Any], tuple[str, Any]]
"""Two keys of a layout with their values; of an axis, that it has several ranks."""
_IN_TURN = {name: (*key.in_turn, key.default) for name, key in KEYS.items() if key.in_turn}
"""The values of the keys that go with every axis but are not in every layout, the default last."""


def layouts(spec: ModelSpec, world_size: int, seq_len: int) -> list[Layout]:
    """Ways to lay this model over exactly `world_size` ranks, with the choices that make a difference.

    Every combination of degrees is there. Without pp each is there with every combination of zero, sequence_parallel
    and cp_method, and of ep where the model has experts. With pp each is there with every schedule, and any two of
    these choices are together in one layout at least, if the model can be partitioned so: pp_schedule, zero (3 with
    either zero_pp_gather), sequence_parallel, cp_method, ep.

    Last come layouts with recomputation, a chunked loss, offload and compression (`Key.in_turn`): one of each
    combination of degrees, and more until any two values of these keys, and any value with each axis, with token shards
    and with a split backward pass, are together in one of them, if a layout can have both. Keys left at their default
    say why (`Key.unverified`).

    Choices that change nothing are left at their default: sequence_parallel without tp, cp_method without cp, "usp"
    with all or none of cp given to Ulysses, ep without experts, and ZeRO with nothing to shard over.
    """
    found: list[Layout] = []
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
            if not problems(spec, layout, seq_len):
                possible[layout] = numbers
        taken = _covering(possible) if degrees["pp"] > 1 else list(possible)
        found += taken
        of_degrees.append(taken)
    return found + _varied([those for those in of_degrees if those])


def _degrees(world_size: int) -> Iterator[Choice]:
    for pp in divisors(world_size):
        for tp in divisors(world_size // pp):
            for cp in divisors(world_size // (pp * tp)):
                rest = world_size // (pp * tp * cp)
                for dp_shard in divisors(rest):
                    yield {"tp": tp, "cp": cp, "dp_shard": dp_shard, "dp_replicate": rest // dp_shard, "pp": pp}


def _choices(degrees: Choice, n_experts: int) -> list[list[Choice]]:
    """The choices with these degrees: for each group of keys (`Key.group`) its choices, the last group
    varying fastest."""
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
    """Whether a choice, with its degrees, is a layout in which every key that is not at its default has a meaning."""
    try:
        layout = Layout(**choice)
    except LayoutError:
        return False
    dull = any(getattr(layout, name) != key.default_in(layout) and not key.used(layout) for name, key in KEYS.items())
    return not dull and not (layout.cp_method == "usp" and layout.ulysses_degree == layout.cp)


def _varied(of_degrees: Sequence[Sequence[Layout]]) -> list[Layout]:
    """Layouts in which the keys of `_IN_TURN` have other values: first one for each combination of degrees, of which
    the layouts are given, then those that are missing for any two values to be together."""
    plain = [layout for those in of_degrees for layout in those]
    met = {pair for layout in plain for pair in _pairs(layout)}
    found: list[Layout] = []

    def take(layout: Layout) -> None:
        found.append(layout)
        met.update(_pairs(layout))

    for number, those in enumerate(of_degrees):
        take(_filled(those[(number + 1) % len(those)], met))
    # What a layout can have of these keys follows from its axes and ZeRO stage; those that can have most come first.
    alike = {(len(_axes(layout)), layout.zero, _axes(layout)): layout for layout in reversed(plain)}
    for layout in (alike[key] for key in sorted(alike, reverse=True)):
        for one, other in sorted(set(_wanted(layout)) - met, key=str):
            if (one, other) not in met and (able := _able(layout, dict([one, other]))):
                take(_filled(able, met, (one[0], other[0])))
    return found


def _axes(layout: Layout) -> tuple[str, ...]:
    """Those of several ranks, and two ways in which a layer runs otherwise over them."""
    split = layout.pp > 1 and layout.kind.splits_backward
    ways = {"token shards": layout.token_shards, "split backward": split}
    return tuple(axis for axis in (*DENSE_AXES, "ep") if layout.degree(axis) > 1) + tuple(w for w in ways if ways[w])


def _pairs(layout: Layout) -> set[Pair]:
    """The pairs of a layout."""
    values = [(name, getattr(layout, name)) for name in _IN_TURN]
    return {*combinations(values, 2), *product([(axis, True) for axis in _axes(layout)], values)}


def _wanted(layout: Layout) -> Iterator[Pair]:
    """All pairs of the keys with its axes, and with one another, whether it can have them or not."""
    values = [[(name, value) for value in values] for name, values in _IN_TURN.items()]
    for one, other in combinations(values, 2):
        yield from product(one, other)
    for each in values:
        yield from product([(axis, True) for axis in _axes(layout)], each)


def _able(layout: Layout, pair: Choice) -> Layout | None:
    """The layout with two values, and a third where one of them needs that; None where it cannot have them."""
    chosen = {name: value for name, value in pair.items() if name in _IN_TURN}
    third = [{name: value} for name, values in _IN_TURN.items() for value in values if value != KEYS[name].default]
    for more in ({}, *third):
        changed = _changed(layout, more | chosen)
        if changed and all(getattr(changed, name) == value for name, value in chosen.items()):
            return changed
    return None


def _filled(layout: Layout, met: set[Pair], kept: Sequence[str] = ()) -> Layout:
    """The layout with values of the keys, but for those to be `kept`, that bring most pairs together for the first
    time: key by key, the best of each."""
    held = {name: getattr(layout, name) for name in kept if name in _IN_TURN}
    for name, values in _IN_TURN.items():
        if name not in held:
            tried = [_changed(layout, {name: value}) for value in values]
            able = [each for each in tried if each and all(getattr(each, k) == v for k, v in held.items())]
            layout = max(able, key=lambda each: len(_pairs(each) - met))
    return layout


def _changed(layout: Layout, changes: Choice) -> Layout | None:
    try:
        return layout.changed(**changes)
    except LayoutError:
        return None


def _covering(possible: dict[Layout, tuple[int, ...]]) -> Sequence[Layout]:
    """Some of the layouts, in their order, such that every two choices that are together in one are so in one of those.

    `possible` has for each layout the number of each of its choices. Taken is, again and again, the first of those that
    bring most pairs together for the first time: not the fewest layouts there could be, but close, and always the same.
    """
    pairs = {layout: set(combinations(enumerate(numbers), 2)) for layout, numbers in possible.items()}
    missing = set().union(*pairs.values())
    taken = set()
    while missing:
        best = max(pairs, key=lambda layout: len(pairs[layout] & missing))
        missing -= pairs[best]
        taken.add(best)
    return [layout for layout in possible if layout in taken]
