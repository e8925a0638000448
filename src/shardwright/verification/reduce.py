"""Layouts of more ranks than this machine can hold: the same axes with fewer ranks each.

Any fault of an axis (a missing sum, a shard at the wrong place, messages in the wrong order) shows with two ranks of
it. So every degree becomes its smallest prime factor, from the largest degree on, until the ranks are few enough. If
even two ranks of each axis are too many, one axis after another is left out, so that any two of them still meet in one
of the layouts.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from math import prod

from shardwright.layout.box import DENSE_AXES
from shardwright.layout.layout import Layout
from shardwright.model.spec import ModelSpec
from shardwright.split import rules
from shardwright.system.errors import LayoutError
from shardwright.system.processes import PROCESS_BYTES, machine_bytes
from shardwright.system.units import divisors
from shardwright.verification.case import Case
from shardwright.verification.cut_case import cut_each

_RANKS_OF_A_CORE = 8
"""With more ranks a comparison takes minutes."""
_AT_LEAST = 8


def most_ranks() -> int:
    """Return the number of ranks of one layout that this machine can hold and run in about a minute."""
    in_memory = int(machine_bytes() * 0.8 / PROCESS_BYTES)
    return max(1, min(in_memory, max(_AT_LEAST, _RANKS_OF_A_CORE * (os.cpu_count() or 1))))


def reduced(case: Case, layout: Layout, most: int) -> tuple[list[tuple[Case, Layout]], str]:
    """Return cases at test size with layouts of at most `most` ranks that have every axis and choice of `layout`
    between them, and a sentence about the reduction. `case` has the true sizes.

    Raises LayoutError for a layout that the model cannot have, and if `most` is too small for any two axes.
    """
    if problems := rules.problems(case.spec, layout, case.seq_len):
        raise LayoutError(*problems)
    degrees = {axis: layout.degree(axis) for axis in DENSE_AXES}
    least = {axis: _least(layout, axis) for axis in DENSE_AXES}
    smaller = _lowered(degrees, least, most)
    if prod(smaller.values()) <= most:
        chosen = [smaller]
    else:
        chosen = [_lowered({**least, axis: 1}, {**least, axis: 1}, most) for axis in DENSE_AXES if least[axis] > 1]
        if any(prod(lowered.values()) > most for lowered in chosen):
            raise LayoutError(
                f"{layout}: {layout.world_size} ranks, and {prod(least.values())} with the fewest of each axis; this "
                f"machine holds {most}: verify a layout with fewer axes, or on a larger machine"
            )
    pairs = []
    for lowered in chosen:
        few = _with_degrees(layout, lowered)
        spec = _alike(case.spec, layout, few)
        pairs += cut_each(replace(case, spec=spec), [few])
    return pairs, _sentence(layout, degrees, chosen, pairs[0][1], most)


def _least(layout: Layout, axis: str) -> int:
    """Return the smallest degree of an axis that has the properties of its degree in `layout`."""
    degree = layout.degree(axis)
    if axis == "cp" and layout.cp_method == "usp":
        return _prime(layout.ulysses_degree) * _prime(layout.cp // layout.ulysses_degree)
    if axis == "dp_shard" and max(layout.node_ranks, layout.zero_secondary_ranks) > 1 and degree % 4 == 0:
        return 4  # two nodes of two ranks
    return _prime(degree)


def _prime(n: int) -> int:
    """Return the smallest prime factor of a number; 1 for 1."""
    return divisors(n)[:2][-1]


def _lowered(degrees: dict[str, int], least: dict[str, int], most: int) -> dict[str, int]:
    """Lower the largest degree that can be lowered, to its least, until there are few enough ranks."""
    lowered = dict(degrees)
    while prod(lowered.values()) > most:
        over = [axis for axis in lowered if lowered[axis] > least[axis]]
        if not over:
            break
        largest = max(over, key=lambda axis: lowered[axis])
        lowered[largest] = least[largest]
    return lowered


def _with_degrees(layout: Layout, degrees: dict[str, int]) -> Layout:
    """Return the layout with other degrees of its axes, and dependent keys: a valid number of experts on a rank, some
    ranks that shard the same experts if there were some, and the stages of a smaller pipeline."""
    changes: dict[str, object] = dict(degrees)
    fold, whole = degrees["dp_shard"] * degrees["cp"] * degrees["tp"], layout.dp_shard * layout.cp * layout.tp
    if layout.ep > 1 and fold > 1:
        kept = [n for n in divisors(fold)[1:] if n < fold or layout.ep == whole or fold == 2]
        changes["ep"] = max(n for n in kept or [fold])
    if layout.cp_method == "usp" and degrees["cp"] > 1:
        changes["ulysses_degree"] = _prime(layout.ulysses_degree)
    for name in ("node_ranks", "zero_secondary_ranks"):
        if getattr(layout, name) > 1:
            shards = degrees["dp_shard"] * degrees["cp"]
            changes[name] = 2 if shards > 2 and shards % 2 == 0 else 1
    if layout.kind.virtual_stages_tried and degrees["pp"] > 1 and not layout.stage_layers:
        changes["virtual_stages"] = min(layout.virtual_stages, 2)  # a rank runs three stages by the same code as two
    if layout.stage_layers and degrees["pp"] != layout.pp:
        n_stages = layout.n_stages // layout.pp * degrees["pp"]
        counts = layout.stage_layers
        step = (len(counts) - 1) / max(1, n_stages - 1)
        changes["stage_layers"] = tuple(counts[round(i * step)] for i in range(n_stages)) if degrees["pp"] > 1 else None
    return layout.changed(**changes)


def _alike(spec: ModelSpec, layout: Layout, few: Layout) -> ModelSpec:
    """Return the model with as many layers as the stages now have, and one kv head if kv heads were replicated, so that
    they are still replicated."""
    if few.stage_layers:
        spec = replace(spec, n_layers=sum(few.stage_layers))
    replicated = layout.tp * layout.cp_ulysses > spec.n_kv_heads
    if replicated and few.tp * few.cp_ulysses <= spec.n_kv_heads and spec.latent_attention is None:
        spec = replace(spec, n_kv_heads=1)
    if spec.moe is not None and few.ep > 1 and spec.moe.n_experts % few.ep:
        raise LayoutError(
            f"{few}: ep={few.ep} does not divide {spec.moe.n_experts} experts; verify it by its own --set"
        )
    return spec


def _sentence(layout: Layout, degrees: dict[str, int], chosen: list[dict[str, int]], smaller: Layout, most: int) -> str:
    def changes(lowered: dict[str, int]) -> Iterator[str]:
        for axis, degree in degrees.items():
            if lowered[axis] != degree:
                yield f"{axis} {degree} to {lowered[axis]}"
        if smaller.virtual_stages != layout.virtual_stages:
            yield f"virtual_stages {layout.virtual_stages} to {smaller.virtual_stages}"

    what = (
        ", ".join(changes(chosen[0]))
        if len(chosen) == 1
        else f"each axis to as few ranks as it can have, in {len(chosen)} layouts, each without one axis"
    )
    return (
        f"the layout has {layout.world_size} ranks and this machine holds {most}, so it is reduced: {what}; what can "
        f"be wrong with an axis is wrong with 2 ranks of it"
    )
