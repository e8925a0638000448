"""The layouts of a number of ranks for a model and a sequence length; no torch.

Without a pipeline these are all there are. With one there would be too many to run, since nine schedules multiply with
the rest (of 8 ranks 1260 for the debug model), so for each set of degrees as many are taken as it needs for every two
choices to meet (`_covering`: 396).
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import combinations, islice, product
from math import gcd
from typing import Any

from shardwright.errors import LayoutError
from shardwright.layout import Layout
from shardwright.layout_keys import KEYS
from shardwright.model.spec import ModelSpec
from shardwright.split.rules import problems

Choice = dict[str, Any]
"""Values of fields of a Layout that are chosen together."""


def layouts(spec: ModelSpec, world_size: int, seq_len: int) -> list[Layout]:
    """Ways to lay this model over exactly `world_size` ranks, with the choices that make a difference.

    Every combination of degrees is there. Without pp each is there with every combination of zero, sequence_parallel
    and cp_method, and of ep where the model has experts. With pp each is there with every schedule, and any two of
    these choices are together in one layout at least, if the model can be partitioned so: pp_schedule, zero (3 with
    either zero_pp_gather), sequence_parallel, cp_method, ep. Last comes, for each combination of degrees, one of its
    layouts with a chunked loss, with optimizer states on a disk, and with recomputation, selective and full in turn
    (`Key.in_turn`), and for a key that none of these could have, the first layout that can. Keys left at their default
    say why (`Key.unverified`).

    Choices that change nothing are left at their default: sequence_parallel without tp, cp_method without cp, "usp"
    with all or none of cp given to Ulysses, ep without experts, and ZeRO with nothing to shard over.
    """
    found: list[Layout] = []
    varied: list[Layout] = []
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
        varied += _varied(taken, len(varied))
    return found + varied + list(_left(found, varied))


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


def _varied(those: Sequence[Layout], number: int) -> Iterator[Layout]:
    """One of these layouts, with values of the keys that are varied in turn (`Key.in_turn`); another layout and other
    values for each `number`."""
    if those:
        layout = those[(number + 1) % len(those)]
        for name, key in KEYS.items():
            if key.in_turn:
                layout = _with_one_of(layout, name, [*key.in_turn[number % len(key.in_turn) :], *key.in_turn])
        yield layout


def _left(found: Sequence[Layout], varied: Sequence[Layout]) -> Iterator[Layout]:
    """For each key that is varied in turn and has its default in all of these, the first layout that can have another
    value."""
    for name, key in KEYS.items():
        if key.in_turn and all(getattr(layout, name) == key.default for layout in (*found, *varied)):
            others = (_with_one_of(layout, name, key.in_turn) for layout in found)
            yield from islice((other for other in others if getattr(other, name) != key.default), 1)


def _with_one_of(layout: Layout, name: str, values: Sequence[Any]) -> Layout:
    """The layout with the first of these values of a key that it can have, or as it is."""
    for value in values:
        with suppress(LayoutError):
            return layout.changed(**{name: value})
    return layout


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


def divisors(n: int) -> list[int]:
    """Every divisor of a number, in order."""
    return [d for d in range(1, n + 1) if n % d == 0]
